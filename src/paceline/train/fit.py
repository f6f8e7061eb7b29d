"""Trains a DFlash drafter on features of the frozen target; stops and resumes anywhere.

Does not know recipes, commands or decoding.

All randomness is a function of (seed, step, row), so a checkpoint is weights, optimiser state and
the step, and any number of processes draws the same anchors.
"""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.target import parse_dtype
from paceline.train.capture import Taps
from paceline.train.checkpoint import Origin, export, load_checkpoint, origin, save_checkpoint
from paceline.train.config import TrainConfig
from paceline.train.corpus import Corpus, check_corpus, read_corpus, reasons
from paceline.train.earlier import as_it_stands, check_start, check_weights, left_behind
from paceline.train.features import (
    FeatureRow,
    Online,
    load_frozen,
    load_tokenizer,
    open_features,
    plan_cache,
)
from paceline.train.growth import Growth
from paceline.train.logs import Progress, RunLog, Say
from paceline.train.objectives import batch_loss
from paceline.train.on_policy import make_source
from paceline.train.policy import supervise
from paceline.train.ranks import Ranks, join_processes, only_run
from paceline.train.served import Served, served_estimate
from paceline.train.sources import Source, Stopped
from paceline.train.start import drafter_shape
from paceline.train.trainee import Trainee, make_trainee

_LOG_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where the drafter is, and whether the run got to its end (else: run it again to resume)."""

    drafter: Path
    finished: bool


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then cosine to zero; of each phase, its share."""
    warm = max(1, round(config.warmup * config.steps))
    top = config.lr * config.phase_at(step).lr_share
    if step < warm:
        return top * (step + 1) / warm
    return top * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def gamma_at(config: TrainConfig, rows: int, step: int) -> float:
    """The decay of the position weights in this step: it grows with each whole pass over the rows."""
    return config.gamma + config.gamma_step * (step * config.rows_per_step // max(1, rows))


def train_step(
    config: TrainConfig, trainee: Trainee, source: Source, step: int
) -> dict[str, float]:
    """One optimiser step; returns loss, gradient norm, learning rate, blocks, positions and counts.

    Every process gets the blocks of all rows, so each knows the weight of the whole step, and
    computes its own rows' part of the loss. Raises `Stopped` when the source does.
    """
    phase = config.phase_at(step)
    batch, head = source.batch(step), trainee.head_of(phase.words)
    rows, blocks = batch.rows, batch.blocks
    how: Any = {"gamma": gamma_at(config, trainee.rows, step), "widened_from": phase.widened_from}
    supervised = supervise(config, head, blocks, batch.rounds, **how)
    mine = _parts(len(rows), config.micro_batches, trainee.ranks)
    loss = 0.0
    for at, part in enumerate(mine):
        chosen = part or [0]  # a process without rows goes along with a part of no weight
        here, items = blocks.take(chosen), [rows[r] for r in chosen]
        given = supervised.take(chosen, weigh=bool(part))
        with trainee.micro_batch(last=at == len(mine) - 1):
            part_loss = batch_loss(config, trainee, items, here, head, given)
            # Processes average their gradients; the parts are to be summed.
            (part_loss * trainee.ranks.world).backward()
        loss += float(part_loss.detach())
    norm = _optimise(config, trainee, step)
    figures: dict[str, float] = {
        "loss": loss,
        "grad_norm": norm,
        "lr": learning_rate(config, step),
        "blocks": int(blocks.keep_RA.sum()),
        "positions": int((supervised.total_RAk > 0).sum()),
    }
    if supervised.clipped.total:
        figures["clip_ratio"] = supervised.clipped.ratio
    return figures | dict(batch.counts)


def _parts(rows: int, micro_batches: int, ranks: Ranks) -> list[list[int]]:
    """The rows of this process, dealt out to the processes and then to micro-batches."""
    mine = list(range(rows))[ranks.rank :: ranks.world]
    return [mine[m::micro_batches] for m in range(micro_batches)]


def _optimise(config: TrainConfig, trainee: Trainee, step: int) -> float:
    """Clip, step and forget the gradients; returns their norm before clipping."""
    found: Any = torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), config.clip)
    norm = float(
        found.full_tensor() if isinstance(found, torch.distributed.tensor.DTensor) else found
    )
    if not math.isfinite(norm):
        raise ValueError(
            f"step {step}: the gradient is not finite; set a lower lr or clip, in a new --run-dir"
        )
    for group in trainee.optimizer.param_groups:
        group["lr"] = learning_rate(config, step) * group["share"]
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return norm


def read_rows(config: TrainConfig) -> list[Corpus]:
    """The rows of each corpus file, shuffled within it: a file added later leaves the features
    captured for the others valid. Raises ValueError for text of another target."""
    check_corpus(config.data, config.target)
    found = []
    for path in config.data:
        left_out = Counter[str]()
        part = read_corpus(
            [path],
            max_tokens=config.max_tokens,
            min_reply=config.min_reply,
            held_out_share=config.held_out_share,
            left_out=left_out,
        )
        random.Random(config.seed).shuffle(part)
        found.append(Corpus(path=path, rows=part, left_out=left_out))
    return found


def _check_rows(corpora: Sequence[Corpus], target: Any, log: RunLog) -> None:
    """Say what each file gives; raise ValueError for tokens that the target does not have."""
    size = target.get_input_embeddings().weight.shape[0]
    for corpus in corpora:
        if (largest := max(int(row.tokens.max()) for row in corpus.rows)) >= size:
            raise ValueError(f"{corpus.path} has token {largest}, the target {size} embedding rows")
        held = sum(row.held_out for row in corpus.rows)
        why = f"; left out: {reasons(corpus.left_out)}" if corpus.left_out else ""
        log.say(f"{corpus.path}: {len(corpus.rows)} rows, {held} of them held out{why}")


def feature_rows(
    config: TrainConfig, target: Any, corpora: Sequence[Corpus], log: RunLog
) -> list[FeatureRow]:
    """All rows with their features, captured first where they are missing."""
    found: list[FeatureRow] = []
    width = len(config.taps) * target.config.get_text_config().hidden_size
    room, used = config.cache_gb, set[str]()
    for corpus in corpora:
        rows, stem = corpus.rows, Path(corpus.path).name.split(".")[0]
        name = stem if stem not in used else f"{stem}-{len(used)}"
        used.add(name)
        if config.on_policy is not None:  # records bring their own features
            taps = Taps(target, config.taps)
            found += [FeatureRow(r, Online(taps, r.tokens)) for r in rows if not r.held_out]
            rows, name = [row for row in rows if row.held_out], f"{name}-held-out"
        found += open_features(
            rows,
            Path(config.features_dir or config.run_dir) / f"features-{name}",
            target,
            layer_ids=config.taps,
            rows_per_shard=config.rows_per_shard,
            limit_gb=room,
            report=_capture_report(log, name),
        )
        if room is not None:
            how = {"width": width, "rows_per_shard": config.rows_per_shard, "limit_gb": room}
            room -= plan_cache(rows, **how).bytes / 1e9  # type: ignore[arg-type]
    return found


def _capture_report(log: RunLog, name: str) -> Callable[[dict[str, float]], None]:
    def report(figures: dict[str, float]) -> None:
        if "missing" in figures:
            size = f"{figures['tokens']:,.0f} tokens, {figures['bytes'] / 1e9:.2f} GB"
            online = f"{figures['online_rows']:.0f} rows captured when needed"
            log.say(
                f"features of {name}: {size}; {figures['missing']:.0f} shards missing, {online}"
            )
        else:
            done, total = int(figures["shard"]), int(figures["shards"])
            log.progress(f"capture {figures['tokens_per_s']:.0f} tokens/s", done, total)

    return report


def fit(
    config: TrainConfig,
    *,
    say: Say = print,
    progress: Progress = lambda _what, _done, _total: None,
) -> Outcome:
    """Train to the end, resuming from the run folder if it holds a checkpoint.

    Writes ``checkpoint.pt``, ``provenance.json``, ``log.jsonl``, ``tensorboard/`` and, at each
    evaluation, ``drafter/``. SIGTERM and SIGINT save first. Under torchrun the processes share the
    rows of each step; they need a common run folder.

    Raises ValueError for text, settings or a checkpoint that do not fit, a full disk, a run folder
    that another process trains in, and a gradient that is not finite.
    """
    run = Path(config.run_dir)
    run.mkdir(parents=True, exist_ok=True)
    with join_processes() as ranks, only_run(run, ranks):
        log = RunLog(run, first=ranks.first, say=say, progress=progress)
        dtype = parse_dtype(config.compute, ranks.device)
        target = load_frozen(config.target, dtype).to(ranks.device)
        config = _within_context(as_it_stands(config), target, log)
        corpora = read_rows(config)
        _check_rows(corpora, target, log)
        shape = drafter_shape(config, target.config)
        check_start(config, shape)
        check_weights(config)
        if gone := left_behind(config, shape):
            log.say(f"{config.init_from}: its {' and '.join(gone)} does not go on in this run")
        made = origin(config, target, corpora)
        checkpoint = run / "checkpoint.pt"
        rows = feature_rows(config, target, corpora, log)
        train = [item for item in rows if not item.row.held_out]
        held = [item for item in rows if item.row.held_out]
        if not train:
            raise ValueError("every row is held out; lower held_out_share or give more text")
        trainee = make_trainee(
            config, target, train, dtype, ranks=ranks, tokenizer=load_tokenizer(config.target)
        )
        first = load_checkpoint(checkpoint, trainee, made) if checkpoint.exists() else 0
        log.open(resumed_at=first)
        if first:
            log.say(f"resuming behind step {first}")
        growth = Growth.of(config, trainee, held, resumed=first > 0)
        watched = _Run(
            config=config, trainee=trainee, held=held, made=made, log=log, run=run, growth=growth
        )
        finished = False
        with _noted_signals() as signals:
            how: Any = {"made": made, "log": log, "stopped": lambda: bool(signals)}
            source = make_source(config, trainee, train, target, **how)
            try:
                finished = watched.steps(source, first, signals)
            finally:
                source.close(finished=finished)
        log.close()
        if finished:
            log.say(f"drafter in {run / 'drafter'}")
        return Outcome(drafter=run / "drafter", finished=finished)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The steps of a run with logging, evaluation and checkpoints around them."""

    config: TrainConfig
    trainee: Trainee
    held: Sequence[FeatureRow]
    made: Origin
    log: RunLog
    run: Path
    growth: Growth | None

    def steps(self, source: Source, first: int, signals: Sequence[int]) -> bool:
        """Train from step ``first``; False when a signal ended it before the last step."""
        config, ranks, totals = self.config, self.trainee.ranks, self.trainee.totals
        saved = before = time.monotonic()
        at_start = dict(totals)
        for step in range(first, config.steps):
            try:
                figures = train_step(config, self.trainee, source, step)
            except Stopped:
                return self._stop(source, step)
            now = time.monotonic()
            figures["seconds"], before = now - before, now
            for name in totals:
                totals[name] += figures.pop(name)
            done, last = step + 1, step + 1 == config.steps
            late = now - saved > config.checkpoint_seconds
            # What one process notices, all do behind the same step.
            loss, stop, save = ranks.sum(figures["loss"], len(signals), late)
            if done % _LOG_EVERY == 0 or last:
                new = {name: totals[name] - at_start[name] for name in totals}
                rate = round(new["positions"] / max(new["seconds"], 1e-9))
                self._tell(done, figures | {"loss": loss, "positions_per_second": rate})
            if done % config.eval_every == 0 or last:
                self._evaluate(done)
            if stop and not last:
                return self._stop(source, done)
            if save or last:
                self._save(source, done)
                saved = time.monotonic()
        if not (self.run / "drafter").exists():  # finished before, and deleted since
            self._evaluate(config.steps)
        return True

    def _save(self, source: Source, done: int) -> None:
        save_checkpoint(self.run / "checkpoint.pt", self.trainee, done, self.made)
        source.saved()

    def _stop(self, source: Source, done: int) -> bool:
        self._save(source, done)
        self.log.say(f"stopped behind step {done}, saved; run again to resume")
        return False

    def _tell(self, done: int, figures: dict[str, float]) -> None:
        self.log.write(done, figures | self._totals())
        loss, rate = figures["loss"], figures["positions_per_second"]
        self.log.progress(f"loss {loss:.3f}, {rate} positions/s", done, self.config.steps)

    def _totals(self) -> dict[str, float]:
        return {f"total_{name}": value for name, value in self.trainee.totals.items()}

    def _evaluate(self, done: int) -> None:
        """Log the served-acceptance estimate and export the drafter."""
        config = self.config
        sources = served_estimate(self.trainee, self.held, config.block_size, config.eval_rows)
        total = sum(sources.values(), Served())
        result: dict[str, Any] = {"served_rounds": int(total.verify_rounds)}
        if total.verify_rounds:
            each = {n: round(s.acceptance_length, 4) for n, s in sources.items()}
            result["served_estimate"] = round(total.acceptance_length, 4)
            result["served_by_source"] = each
        if self.growth is not None:
            result["growth"] = self.growth.measure()
            self.log.say(self.growth.sentence(result["growth"]))
        self.log.write(done, result | self._totals())
        if not total.verify_rounds:
            self.log.say(f"step {done}: no held-out greedy row, so no served-acceptance estimate")
        else:
            parts = [f"{n or 'text'} {s.acceptance_length:.3f}" for n, s in sources.items()]
            self.log.say(
                f"step {done}: served-acceptance estimate {total.acceptance_length:.3f} "
                f"({', '.join(parts)}; {total.verify_rounds:.0f} rounds)"
            )
        figures = {"step": done} | result | self.trainee.totals
        export(self.trainee, self.run / "drafter", self.made.provenance(figures))


def _within_context(config: TrainConfig, target: Any, log: RunLog) -> TrainConfig:
    """Rows are cut where the target's positions end."""
    limit = target.config.get_text_config().max_position_embeddings
    if config.max_tokens <= limit:
        return config
    log.say(
        f"max_tokens is {limit} instead of {config.max_tokens}: the target has no more positions"
    )
    return config.replace(max_tokens=limit)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """SIGTERM and the first SIGINT are noted, not obeyed; a second SIGINT interrupts."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # Python lets only the main thread choose what signals do
        return

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
