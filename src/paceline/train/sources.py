"""Where a step's rows and blocks come from: a corpus, rollouts as they are written, or recorded ones.

Does not know losses, optimisers or how rollouts are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.train.blocks import Blocks, draw, make_blocks
from paceline.train.config import TrainConfig
from paceline.train.features import FeatureRow
from paceline.train.order import Order
from paceline.train.records import Record, RecordReader
from paceline.train.rounds import Rounds, recorded_blocks

COUNTS = ("records", "stale")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows with their blocks; ``rounds`` if they stand where rollouts had theirs.

    ``counts`` are added to a run's totals: ``records`` trained and ``stale`` ones left out.
    """

    rows: list[FeatureRow]
    blocks: Blocks
    rounds: Rounds | None = None
    counts: Mapping[str, float] = field(default_factory=dict)


class Source(Protocol):
    """Gives each step its batch. All that must survive a kill is in the run's totals and on disk."""

    def batch(self, step: int) -> Batch:
        """The rows of a step with their blocks; raises `Stopped` when it waited and is not to."""

    def saved(self) -> None:
        """A checkpoint with the totals of now is on disk."""

    def close(self, *, finished: bool) -> None:
        """No more batches are wanted: from this process, or ever."""


class RecordMaker(Protocol):
    """Whoever makes records, as a source sees it."""

    def newest(self) -> int:
        """The newest version of the weights, against which a record's age is taken."""

    def begin(self, step: int) -> None:
        """A step begins."""

    def more(self, step: int) -> None:
        """Called while the next record is not there: make it, or wait a moment. Raises `Stopped`."""

    def close(self) -> None:
        """Make no more."""


class Stopped(Exception):
    """A source that waited for rows was told to stop."""


def place(config: TrainConfig, rows: Sequence[FeatureRow], step: int, limit: int) -> Batch:
    """Rows with blocks at anchors drawn anew, a function of the seed, the step and the place."""
    phase = config.phase_at(step)
    blocks = make_blocks(
        [item.row for item in rows],
        anchors=phase.anchors_per_row,
        block_size=phase.block_size,
        choose=draw(phase.anchors_per_row, [(config.seed, step, r) for r in range(len(rows))]),
        limit=limit,
    )
    return Batch(rows=list(rows), blocks=blocks)


def place_records(config: TrainConfig, records: Sequence[Record], step: int, limit: int) -> Batch:
    """Records with blocks as ``on_policy.anchors`` says; see `recorded_blocks`."""
    assert config.on_policy is not None
    phase, rows = config.phase_at(step), [record.row() for record in records]
    if config.on_policy.anchors == "drawn":
        return place(config, rows, step, limit)
    blocks, rounds = recorded_blocks(
        records,
        block_size=phase.block_size,
        anchors=phase.anchors_per_row,
        limit=limit,
        seeds=[(config.seed, step, r) for r in range(len(records))],
        shuffled=config.on_policy.anchors == "shuffled",
    )
    return Batch(rows=rows, blocks=blocks, rounds=rounds)


class CorpusSource:
    """Rows of a corpus in a seeded order, with anchors drawn at every step. ``limit``: see `place`."""

    def __init__(self, config: TrainConfig, rows: Sequence[FeatureRow], limit: int) -> None:
        self._config, self._limit = config, limit
        self._order = Order(rows, config.rows_per_step, config.seed)

    def batch(self, step: int) -> Batch:
        """The rows of a step with their blocks."""
        return place(self._config, self._order.batch(step), step, self._limit)

    def saved(self) -> None:
        """Nothing is kept."""

    def close(self, *, finished: bool) -> None:
        """Nothing is held."""


class ReplaySource:
    """The records of an earlier rollout in a seeded order, as often as there are steps."""

    def __init__(self, config: TrainConfig, records: Sequence[Record], limit: int) -> None:
        self._config, self._limit = config, limit
        rows = [record.row() for record in records]
        self._record = {id(row): record for row, record in zip(rows, records, strict=True)}
        self._order = Order(rows, config.rows_per_step, config.seed)

    def batch(self, step: int) -> Batch:
        """The records of a step with their blocks."""
        chosen = [self._record[id(row)] for row in self._order.batch(step)]
        return place_records(self._config, chosen, step, self._limit)

    def saved(self) -> None:
        """Records stay."""

    def close(self, *, finished: bool) -> None:
        """Nothing is held."""


class RolloutSource:
    """Records in the order of their ids as they are written, each trained once or left out as stale.

    The next id is the sum of ``totals`` records and stale, which are part of every checkpoint: a killed
    run goes on there, and shards are deleted only when a checkpoint covers them.
    """

    def __init__(
        self,
        config: TrainConfig,
        reader: RecordReader,
        totals: dict[str, float],
        limit: int,
        makes: RecordMaker,
    ) -> None:
        for name in COUNTS:
            totals.setdefault(name, 0.0)
        self._config, self._reader, self._totals, self._limit = config, reader, totals, limit
        self._makes = makes
        self._reader.tell(self._at)

    @property
    def _at(self) -> int:
        return int(sum(self._totals[name] for name in COUNTS))

    def batch(self, step: int) -> Batch:
        """The next records with their blocks; fewer than rows_per_step never."""
        assert self._config.on_policy is not None
        self._makes.begin(step)
        oldest = self._config.on_policy.max_stale
        at, found = self._at, list[Record]()
        while len(found) < self._config.rows_per_step:
            if at >= self._reader.available:
                self._reader.tell(at)
                self._makes.more(step)
                continue
            record = self._reader.read(at)
            at += 1
            if oldest is None or self._makes.newest() - record.version <= oldest:
                found.append(record)
        self._reader.tell(at)
        batch = place_records(self._config, found, step, self._limit)
        stale = float(at - self._at - len(found))
        return Batch(
            rows=batch.rows,
            blocks=batch.blocks,
            rounds=batch.rounds,
            counts={"records": float(len(found)), "stale": stale},
        )

    def saved(self) -> None:
        """Delete the shards that the checkpoint covers, unless they are to be kept."""
        assert self._config.on_policy is not None
        if not self._config.on_policy.keep_records:
            self._reader.delete(self._at)

    def close(self, *, finished: bool) -> None:
        """Tell who rolls out whether anything more is wanted."""
        self._reader.tell(self._at, done=finished)
        self._makes.close()
