"""Trains a DFlash drafter on cached features of the frozen target; stops and resumes anywhere.

Does not know recipes, commands or decoding.

All randomness is a function of (seed, step), so a checkpoint is weights, optimiser state and the
step. Masters are float32; a bf16 copy computes (a float32 one in tests).
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    offsets_of,
    save_dflash,
    vocabulary_fingerprint,
)
from paceline.train.blocks import Blocks, block_states, make_blocks
from paceline.train.config import Phase, TrainConfig
from paceline.train.corpus import Row, count_tokens, draft_vocabulary, read_corpus
from paceline.train.features import (
    FeatureRow,
    capture_shards,
    load_frozen,
    load_tokenizer,
    open_shards,
)
from paceline.train.losses import frozen_head_ce, leading_correct, position_weights
from paceline.train.start import drafter_config, embedding_table, feature_scales, start_module


@dataclass(kw_only=True)
class Trainee:
    """A drafter in training: float32 masters (fc in scaled coordinates) and the computing copy."""

    shape: DFlashConfig
    module: DFlashModule
    masters: dict[str, Tensor]
    scales: dict[str, Tensor]  # effective weight = master * scale
    optimizer: torch.optim.Optimizer
    head_VD: Tensor
    embedding_VD: Tensor
    vocabulary: Tensor | None  # target ids [V'] of the draft vocabulary
    to_draft: Tensor  # [V] draft index of a target id, -100 outside the draft vocabulary
    totals: dict[str, float] = field(default_factory=lambda: {"blocks": 0.0, "positions": 0.0})

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the computing copy up to date with the masters."""
        for name, weight in self.module.named_parameters():
            master = self.masters[name]
            weight.copy_(master * self.scales[name] if name in self.scales else master)

    @torch.no_grad()
    def take_gradients(self) -> float:
        """Move gradients from the copy to the masters; returns their global norm."""
        squares = 0.0
        for name, weight in self.module.named_parameters():
            assert weight.grad is not None
            grad = weight.grad.float()
            if name in self.scales:
                grad = grad * self.scales[name]
            self.masters[name].grad = grad
            squares += float(grad.square().sum())
            weight.grad = None
        return math.sqrt(squares)

    def labels(self, blocks: Blocks) -> Tensor:
        """Labels in the draft vocabulary [R, A, k]; -100 where a draft could never be right."""
        known = blocks.labels_RAk.clamp_min(0)
        return torch.where(blocks.labels_RAk >= 0, self.to_draft[known], -100)


def make_trainee(
    config: TrainConfig, target: Any, rows: Sequence[FeatureRow], dtype: torch.dtype
) -> Trainee:
    """Build the drafter, its masters and its optimiser at step 0."""
    shape = drafter_config(config, target)
    rms = feature_scales(rows[:256])
    start = start_module(config, shape, target, rows, rms)
    scales = {"fc.weight": 1.0 / rms}
    masters: dict[str, Tensor] = {}
    for name, weight in start.named_parameters():
        value = weight.detach().float()
        masters[name] = torch.nn.Parameter(
            value / scales[name] if name in scales else value.clone()
        )
    module = DFlashModule(shape).to(dtype)
    embedding = embedding_table(target, dtype)
    head = target.get_output_embeddings().weight.detach().to(dtype)
    vocabulary, to_draft = None, torch.arange(shape.vocab_size)
    if shape.draft_vocab_size is not None:
        counts = count_tokens([item.row for item in rows], shape.vocab_size)
        vocabulary = torch.from_numpy(draft_vocabulary(counts, shape.draft_vocab_size))
        head = head[vocabulary].contiguous()
        to_draft = torch.full((shape.vocab_size,), -100)
        to_draft[vocabulary] = torch.arange(len(vocabulary))
    optimizer = torch.optim.AdamW(
        masters.values(),
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )
    trainee = Trainee(
        shape=shape,
        module=module,
        masters=masters,
        scales=scales,
        optimizer=optimizer,
        head_VD=head,
        embedding_VD=embedding,
        vocabulary=vocabulary,
        to_draft=to_draft,
    )
    trainee.publish()
    return trainee


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then cosine to zero."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def step_rows(config: TrainConfig, rows: Sequence[FeatureRow], step: int) -> list[FeatureRow]:
    """The rows of a step: a fresh permutation every epoch, similar lengths together."""
    size = config.rows_per_step
    per_epoch = max(1, len(rows) // size)
    epoch, at = divmod(step, per_epoch)
    order = _epoch_order(tuple(len(item.row.tokens) for item in rows), size, config.seed, epoch)
    return [rows[i] for i in order[at]]


_ORDERS: dict[tuple[int, int, int, int], list[list[int]]] = {}


def _epoch_order(lengths: tuple[int, ...], size: int, seed: int, epoch: int) -> list[list[int]]:
    key = (hash(lengths), size, seed, epoch)
    if key not in _ORDERS:
        rng = random.Random(seed * 1_000_003 + epoch)
        order = list(range(len(lengths)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for at in range(0, len(order), 16 * size):  # sort inside small windows only
            window = sorted(order[at : at + 16 * size], key=lambda i: lengths[i])
            batches += [window[i : i + size] for i in range(0, len(window), size)]
        batches = [batch for batch in batches if len(batch) == size] or [order]
        rng.shuffle(batches)
        _ORDERS.clear()
        _ORDERS[key] = batches
    return _ORDERS[key]


def train_step(
    config: TrainConfig, trainee: Trainee, rows: Sequence[FeatureRow], step: int
) -> dict[str, float]:
    """One optimiser step; returns loss, gradient norm, learning rate and positions trained."""
    phase: Phase = config.phase_at(step)
    rng = np.random.default_rng((config.seed, step))
    batch = step_rows(config, rows, step)
    blocks = make_blocks(batch, anchors=phase.anchors_per_row, block_size=phase.block_size, rng=rng)
    labels = trainee.labels(blocks)
    weights = position_weights(labels, config.gamma) * blocks.keep_RA[..., None]
    states = block_states(trainee.module, blocks, trainee.embedding_VD)
    drafts = states.view(-1, blocks.block_size, states.shape[-1])[:, 1:].reshape(labels.numel(), -1)
    loss = frozen_head_ce(drafts, trainee.head_VD, labels.flatten(), weights.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    norm = trainee.take_gradients()
    if not math.isfinite(norm):
        raise FloatingPointError(f"step {step}: the gradient is not finite; lower lr or clip")
    for master in trainee.masters.values():
        if master.grad is not None and norm > config.clip:
            master.grad.mul_(config.clip / norm)
    for group in trainee.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    trainee.optimizer.step()
    trainee.publish()
    return {
        "loss": float(loss.detach()),
        "grad_norm": norm,
        "lr": learning_rate(config, step),
        "blocks": int(blocks.keep_RA.sum()),
        "positions": int((labels >= 0).sum()),
    }


@torch.no_grad()
def served_estimate(
    config: TrainConfig, trainee: Trainee, rows: Sequence[FeatureRow]
) -> tuple[float, int]:
    """Acceptance length (bonus included) to expect when serving, and the blocks behind it.

    1 + mean leading run of right drafts over held-out greedy rows at full block size. A token
    outside the draft vocabulary counts as wrong, as it will be.
    """
    total = blocks_seen = 0
    greedy = [item for item in rows if item.row.greedy]
    for at in range(0, len(greedy), 8):
        rng = np.random.default_rng((config.seed, 7, at))
        part = greedy[at : at + 8]
        blocks = make_blocks(
            part, anchors=config.eval_anchors, block_size=config.block_size, rng=rng
        )
        labels = trainee.labels(blocks).flatten(0, 1)
        states = block_states(trainee.module, blocks, trainee.embedding_VD)
        drafts = states.view(len(labels), config.block_size, -1)[:, 1:].reshape(labels.numel(), -1)
        runs = leading_correct(drafts, trainee.head_VD, labels)
        kept = blocks.keep_RA.flatten()
        total += int(runs[kept].sum())
        blocks_seen += int(kept.sum())
    return 1 + total / max(1, blocks_seen), blocks_seen


def save_checkpoint(path: Path, trainee: Trainee, step: int) -> None:
    """Write weights, optimiser and step; the file appears whole or not at all."""
    work = path.with_suffix(".tmp")
    state = {
        "step": step,
        "masters": {name: master.detach() for name, master in trainee.masters.items()},
        "scales": trainee.scales,
        "vocabulary": trainee.vocabulary,
        "optimizer": trainee.optimizer.state_dict(),
        "totals": trainee.totals,
    }
    torch.save(state, work)
    os.replace(work, path)


def load_checkpoint(path: Path, trainee: Trainee) -> int:
    """Restore a checkpoint into a trainee of the same config; returns the next step."""
    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, master in trainee.masters.items():
            master.copy_(state["masters"][name])
    trainee.scales.update(state["scales"])
    trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.totals = state["totals"]
    trainee.publish()
    return int(state["step"])


def export(trainee: Trainee, folder: Path, provenance: dict[str, Any]) -> Path:
    """Write the drafter as a plain DFlash folder (bf16) with its provenance beside it."""
    d2t = None if trainee.vocabulary is None else offsets_of(trainee.vocabulary)
    text = json.dumps(provenance, indent=1) + "\n"
    return save_dflash(folder, trainee.shape, trainee.module, d2t, files={"provenance.json": text})


def provenance(config: TrainConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """What made a drafter: settings, versions and figures; no path and no host."""
    settings = asdict(config)
    settings["data"] = [Path(path).name for path in config.data]
    settings.pop("run_dir")
    if config.init_from:
        settings["init_from"] = Path(config.init_from).name
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    return {"settings": settings, "versions": versions, "figures": figures}


def prepare_rows(config: TrainConfig) -> list[Row]:
    """Corpus rows in the order of the feature shards: each file shuffled by itself, in turn.

    A file added later leaves the earlier shards valid.
    """
    rows: list[Row] = []
    for path in config.data:
        part = read_corpus(
            [path],
            max_tokens=config.max_tokens,
            min_reply=config.min_reply,
            held_out_share=config.held_out_share,
        )
        random.Random(config.seed).shuffle(part)
        rows += part
    return rows


def open_features(
    config: TrainConfig, target: Any, report: Callable[[dict[str, float]], None] = lambda _: None
) -> list[FeatureRow]:
    """Feature rows of every corpus file, captured first where they are missing."""
    found: list[FeatureRow] = []
    width = len(config.taps) * target.config.hidden_size
    for path in config.data:
        rows = prepare_rows(config.replace(data=(path,)))
        folder = Path(config.run_dir) / f"features-{Path(path).name.split('.')[0]}"
        capture_shards(
            target,
            rows,
            folder,
            layer_ids=config.taps,
            rows_per_shard=config.rows_per_shard,
            report=report,
        )
        found += open_shards(
            rows, folder, layer_ids=config.taps, width=width, rows_per_shard=config.rows_per_shard
        )
    return found


def fit(config: TrainConfig, *, log: Callable[[str], None] = print) -> Path:
    """Train to the end, resuming from the run folder if it holds a checkpoint.

    Writes ``checkpoint.pt``, ``log.jsonl`` and, at each evaluation, ``drafter/`` (the best so far
    by the served estimate). SIGTERM saves first. Returns the drafter's folder.
    """
    run = Path(config.run_dir)
    run.mkdir(parents=True, exist_ok=True)
    target = load_frozen(config.target)
    rows = open_features(config, target, lambda figures: log(f"capture {figures}"))
    train = [item for item in rows if not item.row.held_out]
    held = [item for item in rows if item.row.held_out]
    trainee = make_trainee(config, target, train, torch.bfloat16)
    if (tokenizer := load_tokenizer(config.target)) is not None:
        named = vocabulary_fingerprint(tokenizer)
        trainee.shape = replace(trainee.shape, vocabulary_fingerprint=named)
    checkpoint = run / "checkpoint.pt"
    first = load_checkpoint(checkpoint, trainee) if checkpoint.exists() else 0
    stop: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    try:
        for step in _watched(config, trainee, train, held, first, run, log):
            if stop:
                save_checkpoint(checkpoint, trainee, step + 1)
                log(f"stopped at step {step + 1}; run again to resume")
                break
    finally:
        signal.signal(signal.SIGTERM, before)
    return run / "drafter"


def _watched(
    config: TrainConfig,
    trainee: Trainee,
    train: Sequence[FeatureRow],
    held: Sequence[FeatureRow],
    first: int,
    run: Path,
    log: Callable[[str], None],
) -> Iterator[int]:
    """Steps with logging, evaluation and checkpoints around them; yields each finished step."""
    saved = began = time.monotonic()
    totals, at_start = trainee.totals, trainee.totals["positions"]
    for step in range(first, config.steps):
        figures = train_step(config, trainee, train, step)
        for name in totals:
            totals[name] += figures[name]
        done = step + 1
        if done % 50 == 0 or done == config.steps:
            spent = time.monotonic() - began
            figures |= {"step": done, "seconds": round(spent, 1)}
            figures["positions_per_second"] = round((totals["positions"] - at_start) / spent)
            _append(run / "log.jsonl", figures)
            log(f"step {done}/{config.steps} loss {figures['loss']:.3f} {figures}")
        if done % config.eval_every == 0 or done == config.steps:
            estimate, blocks = served_estimate(config, trainee, held)
            spent = time.monotonic() - began
            result = {"step": done, "served_estimate": round(estimate, 4), "eval_blocks": blocks}
            _append(run / "log.jsonl", result | totals | {"seconds": round(spent, 1)})
            log(f"step {done}: served-acceptance estimate {estimate:.3f} over {blocks} blocks")
            export(trainee, run / "drafter", provenance(config, result | totals))
        if time.monotonic() - saved > config.checkpoint_seconds or done == config.steps:
            save_checkpoint(run / "checkpoint.pt", trainee, done)
            saved = time.monotonic()
        yield step


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(record) + "\n")
