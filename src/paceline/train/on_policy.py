"""Puts a run's source of rows together: corpus, replay, or rollouts in this process or another.

Knows files and the order of things; does not know losses or the decode loop's insides.

A run folder holds ``records/`` (records.py) and ``versions/`` (versions.py). The trainer publishes
versions and reads records; whoever rolls out reads versions and writes records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.pipeline import Pipeline
from paceline.prepack import can_prepack, prepack
from paceline.target import Target
from paceline.train.capture import load_tokenizer
from paceline.train.checkpoint import Origin as Made
from paceline.train.checkpoint import export
from paceline.train.config import TrainConfig
from paceline.train.corpus import Row
from paceline.train.features import FeatureRow
from paceline.train.logs import RunLog
from paceline.train.records import Origin, RecordReader, RecordWriter
from paceline.train.rollout import Prompts, roll_out_forever, write_rollouts
from paceline.train.sources import (
    CorpusSource,
    RecordMaker,
    ReplaySource,
    RolloutSource,
    Source,
    Stopped,
)
from paceline.train.trainee import Trainee
from paceline.train.versions import Versions

_PATIENCE = 30.0  # seconds without a record before the trainer says what it waits for
_POLL = 0.1


def records_folder(run: Path) -> Path:
    """Where a run's records are."""
    return run / "records"


def versions_folder(run: Path) -> Path:
    """Where a run's versions are."""
    return run / "versions"


def record_origin(config: TrainConfig, fingerprint: str) -> Origin:
    """What the records of a run have in common."""
    policy = config.on_policy
    assert policy is not None
    return Origin(taps=config.taps, target=fingerprint, records_per_shard=policy.records_per_shard)


def prompts_of(config: TrainConfig, rows: Sequence[Row], target: Target) -> Prompts:
    """The prompts of the training rows, as an endless line of jobs.

    Raises ValueError when none leaves room for a reply in the target's context.
    """
    policy = config.on_policy
    assert policy is not None
    fitting = [row for row in rows if not row.held_out and row.start < target.max_length]
    if not fitting:
        raise ValueError("no training row has a prompt that the target's context has room for")
    return Prompts(
        rows=fitting,
        seed=config.seed,
        temperature=policy.temperature,
        max_tokens=policy.reply_tokens,
    )


def drafting(target: Target, folder: Path) -> Pipeline:
    """The target with a published drafter. Any accept rule is exact; this one takes any draft."""
    return Pipeline(target=target, drafter=DFlashDrafter.load(folder, target))


def open_replay(folder: str, config: TrainConfig, fingerprint: str) -> RecordReader:
    """The records of an earlier rollout.

    Raises ValueError for a folder without records, or with those of another target or other taps.
    """
    path = Path(folder) / "index.json"
    if not path.exists():
        raise ValueError(
            f"{folder} holds no records (no index.json): a run with source=rollout does"
        )
    per_shard = int(json.loads(path.read_text())["records_per_shard"])
    origin = Origin(taps=config.taps, target=fingerprint, records_per_shard=per_shard)
    reader = RecordReader(Path(folder), origin)
    if reader.first >= reader.available:
        raise ValueError(f"{folder} holds no records any more: a run deletes what it has trained")
    return reader


@dataclass(kw_only=True)
class _Publisher:
    """Publishes the weights in training, at most once every so many steps."""

    versions: Versions
    trainee: Trainee
    made: Made
    every: int
    last: int | None = None  # the step of the version that this process published last

    def publish_due(self, step: int) -> None:
        """Publish the weights before this step, if it is time."""
        if self.last is not None and step // self.every == self.last // self.every:
            return
        text = self.made.provenance({"step": step})
        self.versions.publish(lambda folder: export(self.trainee, folder, text))
        self.last = step

    def newest(self) -> int:
        """The newest version."""
        return self.versions.newest() or 0


def make_source(
    config: TrainConfig,
    trainee: Trainee,
    rows: Sequence[FeatureRow],
    target: Any,
    *,
    made: Made,
    log: RunLog,
    stopped: Callable[[], bool],
) -> Source:
    """The source that the config names; ``rows`` are the training rows, ``stopped`` ends waiting.

    Raises ValueError for records that do not fit, and for rollouts under torchrun.
    """
    policy, limit = config.on_policy, trainee.shape.max_position_embeddings
    if policy is None:
        return CorpusSource(config, rows, limit)
    if policy.replay_from is not None:
        replay = open_replay(policy.replay_from, config, made.target)
        log.say(f"{policy.replay_from}: records {replay.first} to {replay.available - 1}")
        records = [replay.read(number) for number in range(replay.first, replay.available)]
        return ReplaySource(config, records, limit)
    if trainee.ranks.world > 1:
        raise ValueError("rollouts are trained by one process: start it without torchrun")
    run, origin = Path(config.run_dir), record_origin(config, made.target)
    publisher = _Publisher(
        versions=Versions(versions_folder(run)),
        trainee=trainee,
        made=made,
        every=policy.publish_every,
    )
    reader = RecordReader(records_folder(run), origin)
    if policy.asynchronous:
        makes: RecordMaker = _Elsewhere(publisher, run, log, stopped)
    else:
        texts = [item.row for item in rows]
        makes = _Here(config, publisher, target, texts, reader, log, stopped)
    return RolloutSource(config, reader, trainee.totals, limit, makes)


class _Elsewhere:
    """Another process rolls out: weights are published for it when due, and its records awaited."""

    def __init__(
        self, publisher: _Publisher, run: Path, log: RunLog, stopped: Callable[[], bool]
    ) -> None:
        self._publisher, self._run, self._log, self._stopped = publisher, run, log, stopped
        self.newest, self.begin = publisher.newest, publisher.publish_due
        self._since, self._step = time.monotonic(), -1

    def more(self, step: int) -> None:
        """Wait a moment; say so once it takes long. Raises `Stopped`."""
        if self._stopped():
            raise Stopped
        now = time.monotonic()
        if step != self._step:
            self._since, self._step = now, step
        if now - self._since > _PATIENCE:
            self._log.say(f"step {step} waits for rollouts into {records_folder(self._run)}")
            self._since = now
        time.sleep(_POLL)

    def close(self) -> None:
        """Nothing is held."""


class _Here:
    """This process rolls out the next shard; weights are published before it when due."""

    def __init__(
        self,
        config: TrainConfig,
        publisher: _Publisher,
        target: Any,
        rows: Sequence[Row],
        reader: RecordReader,
        log: RunLog,
        stopped: Callable[[], bool],
    ) -> None:
        if can_prepack(target.dtype, target.device):
            prepack(target)
        self._target, self._config = Target(target, load_tokenizer(config.target)), config
        self._prompts = prompts_of(config, rows, self._target)
        self._publisher, self._log, self._stopped = publisher, log, stopped
        self._writer = RecordWriter(reader.folder, reader.origin)
        self.newest, self.close = publisher.newest, self._writer.close

    def begin(self, step: int) -> None:
        """Weights are published when a shard is made."""

    def more(self, step: int) -> None:
        """Make the next shard. Raises `Stopped` between rounds: the shard is begun anew on resuming."""
        policy, writer = self._config.on_policy, self._writer
        assert policy is not None
        self._publisher.publish_due(step)
        found = self._publisher.versions.load(lambda folder: drafting(self._target, folder))
        assert found is not None
        version, pipeline = found
        first, count = writer.next_id, policy.records_per_shard

        def tell(done: int) -> None:
            if self._stopped():
                raise Stopped
            self._log.progress(f"rollouts of version {version}", done - first, count)

        write_rollouts(
            writer,
            pipeline,
            self._prompts.job,
            below=first + 1,
            slots=policy.slots,
            version=version,
            progress=tell,
        )


def serve_rollouts(
    config: TrainConfig,
    target: Target,
    fingerprint: str,
    rows: Sequence[Row],
    *,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _text: None,
) -> None:
    """Roll out for the asynchronous run in ``config.run_dir``, until it is done or ``stopped`` says so.

    ``rows`` are the run's rows (`fit.read_rows`), whose prompts are answered; ``fingerprint`` is the
    target's (`target_fingerprint`), taken before it was prepacked. May be killed and started again.

    Raises ValueError for a config without asynchronous rollouts, and as `roll_out_forever`.
    """
    policy = config.on_policy
    if policy is None or not policy.asynchronous:
        raise ValueError("this run makes its own rollouts: set on_policy with asynchronous=true")
    run, origin = Path(config.run_dir), record_origin(config, fingerprint)
    versions, prompts = Versions(versions_folder(run)), prompts_of(config, rows, target)

    def newer(than: int) -> tuple[int, Pipeline] | None:
        return versions.load(lambda folder: drafting(target, folder), newer_than=than)

    with RecordWriter(records_folder(run), origin) as writer:
        roll_out_forever(
            writer,
            newer,
            prompts.job,
            slots=policy.slots,
            max_ahead=policy.max_ahead,
            stopped=stopped,
            say=say,
        )
