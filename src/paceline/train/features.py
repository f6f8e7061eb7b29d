"""Rows with the frozen target's tapped states: from shards on disk, or captured when needed.

Does not know drafters or losses.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.capture import (
    Taps,
    capture,
    load_frozen,
    load_tokenizer,
    target_fingerprint,
    target_folder,
)
from paceline.train.corpus import Row
from paceline.train.shards import (
    Origin,
    Shard,
    open_shard,
    shard_bytes,
    shard_path,
    write_shard,
)

__all__ = [
    "CachePlan",
    "FeatureRow",
    "Taps",
    "load_frozen",
    "load_tokenizer",
    "open_features",
    "plan_cache",
    "stack_features",
    "target_fingerprint",
    "target_folder",
]

Report = Callable[[dict[str, float]], None]
_GB = 1e9


@dataclass(frozen=True)
class Stored:
    """Where a row's features lie: row `at` of a shard."""

    shard: Shard
    at: int

    @property
    def shape(self) -> tuple[int, int]:
        """[S, F]."""
        return self.shard.offsets[self.at + 1] - self.shard.offsets[self.at], self.shard.width

    def read(self, stop: int | None) -> Tensor:
        """Features bf16 [S, F] of the first `stop` tokens."""
        return self.shard.read(self.at, stop)


@dataclass(frozen=True)
class Online:
    """A row whose features are captured each time they are needed."""

    taps: Taps
    tokens: npt.NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int]:
        """[S, F]."""
        return len(self.tokens), self.taps.width

    def read(self, stop: int | None) -> Tensor:
        """Features bf16 [S, F] of the first `stop` tokens, on the target's device."""
        tokens = self.tokens[:stop]
        return self.taps.run_rows([tokens])[0, : len(tokens)].bfloat16()


@dataclass(frozen=True)
class FeatureRow:
    """A row and its features [S, F]: on disk, captured online, or bf16 bits in memory."""

    row: Row
    features: Stored | Online | npt.NDArray[np.uint16]

    @property
    def width(self) -> int:
        """F, taps times hidden size."""
        return self.features.shape[1]

    def tensor(self, stop: int | None = None) -> Tensor:
        """The features of tokens [0, stop) as a bf16 tensor (a copy).

        Raises ValueError when the file behind them is damaged.
        """
        return self._read(stop).clone()

    def _read(self, stop: int | None) -> Tensor:
        if isinstance(self.features, np.ndarray):
            return torch.from_numpy(np.array(self.features[:stop])).view(torch.bfloat16)
        return self.features.read(stop)


def stack_features(rows: Sequence[FeatureRow], width: int) -> Tensor:
    """Features bf16 [R, width, F] of the first `width` tokens of each row, padded with zeros.

    Rows without stored features are captured together in one forward; then the result lies on the
    target's device, else on the CPU. Raises ValueError when a file behind the rows is damaged.
    """
    online: dict[Taps, list[int]] = {}
    for r, item in enumerate(rows):
        if isinstance(item.features, Online):
            online.setdefault(item.features.taps, []).append(r)
    device = next(iter(online)).device if online else torch.device("cpu")
    out = torch.zeros(len(rows), width, rows[0].width, dtype=torch.bfloat16, device=device)
    for taps, places in online.items():
        tokens = [rows[r].row.tokens[:width] for r in places]
        captured = taps.run_rows(tokens)
        for at, r in enumerate(places):
            out[r, : len(tokens[at])] = captured[at, : len(tokens[at])]
    for r, item in enumerate(rows):
        if not isinstance(item.features, Online):
            part = item._read(width)
            out[r, : len(part)] = part
    return out


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """How much of a corpus is cached: the first `shards` shards, `rows` rows, `tokens` tokens."""

    shards: int
    rows: int
    tokens: int
    bytes: int


def plan_cache(
    rows: Sequence[Row], *, width: int, rows_per_shard: int, limit_gb: float | None
) -> CachePlan:
    """The whole shards, from the first one on, that fit into `limit_gb` (10^9 bytes; None: all).

    Depends on nothing but its arguments, so that a row's features come from the same place in
    every run. Reads and writes nothing.
    """
    shards = size = 0
    for part in _parts(rows, rows_per_shard):
        more = shard_bytes(part, width)
        if limit_gb is not None and size + more > limit_gb * _GB:
            break
        shards, size = shards + 1, size + more
    cached = rows[: shards * rows_per_shard]
    tokens = sum(len(row.tokens) for row in cached)
    return CachePlan(shards=shards, rows=len(cached), tokens=tokens, bytes=size)


def open_features(
    rows: Sequence[Row],
    folder: Path,
    model: Any,
    *,
    layer_ids: Sequence[int],
    rows_per_shard: int,
    limit_gb: float | None,
    batch_tokens: int = 1024,
    report: Report = lambda _: None,
) -> list[FeatureRow]:
    """All rows in order, with features of the tapped layers; captures first what is missing.

    The first shards, up to `limit_gb`, are kept in `folder`; the rows behind them are captured
    each time they are needed. Shards that are there already are kept, so this may be stopped and
    repeated. Under torch.distributed each of W ranks captures every W-th missing shard; the ranks
    must share the folder and call this together.

    `report` first gets the size of the cache (rows, online_rows, tokens, bytes, shards, and
    missing: the shards to capture), then after each shard this rank's progress (shard, shards,
    tokens, tokens_per_s, seconds_left).

    Raises ValueError naming file and fix for a shard that is damaged, of other rows, taps or
    target, or beyond the limit; for too little disk space; for taps that the target does not have.
    """
    taps = Taps(model, tuple(layer_ids))
    plan = plan_cache(rows, width=taps.width, rows_per_shard=rows_per_shard, limit_gb=limit_gb)
    cache = _Cache(
        folder=folder,
        origin=Origin(taps=taps.layer_ids, target=target_fingerprint(model), width=taps.width),
        parts=_parts(rows, rows_per_shard)[: plan.shards],
    )
    missing = cache.open_present()
    _refuse_surplus(folder, plan)
    sizes: dict[str, float] = {"rows": plan.rows, "tokens": plan.tokens, "bytes": plan.bytes}
    sizes |= {"shards": plan.shards, "missing": len(missing)}
    report(sizes | {"online_rows": len(rows) - plan.rows})
    _check_space(folder, [shard_bytes(cache.parts[number], taps.width) for number in missing], plan)
    _barrier()  # every rank has listed the same shards before one of them writes
    rank, world = (dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)
    cache.capture(taps, missing[rank::world], batch_tokens, report)
    _barrier()
    if left := cache.open_present():
        raise ValueError(
            f"{shard_path(folder, left[0])} is not there: all ranks must share that folder"
        )
    return cache.rows() + [FeatureRow(row, Online(taps, row.tokens)) for row in rows[plan.rows :]]


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """The shards of a folder: `parts` are the rows of each, `opened` those found so far."""

    folder: Path
    origin: Origin
    parts: Sequence[Sequence[Row]]
    opened: dict[int, Shard] = field(default_factory=dict)

    def open_present(self) -> list[int]:
        """Open and check the shards that are there; returns the numbers of the missing ones."""
        for number, part in enumerate(self.parts):
            path = shard_path(self.folder, number)
            if number not in self.opened and path.exists():
                self.opened[number] = open_shard(path, self.origin, part)
        return [number for number in range(len(self.parts)) if number not in self.opened]

    def capture(
        self, taps: Taps, numbers: Sequence[int], batch_tokens: int, report: Report
    ) -> None:
        """Capture and write the named shards, reporting after each."""
        total = sum(len(row.tokens) for number in numbers for row in self.parts[number])
        began, tokens = time.monotonic(), 0
        for done, number in enumerate(numbers, start=1):
            part = self.parts[number]
            features = capture(taps, [row.tokens for row in part], batch_tokens)
            write_shard(shard_path(self.folder, number), self.origin, part, features)
            tokens += len(features)
            rate = tokens / max(1e-9, time.monotonic() - began)
            figures: dict[str, float] = {"shard": done, "shards": len(numbers), "tokens": tokens}
            left = round((total - tokens) / rate, 1)
            report(figures | {"tokens_per_s": round(rate, 1), "seconds_left": left})

    def rows(self) -> list[FeatureRow]:
        """All rows of the opened shards, in order."""
        return [
            FeatureRow(row, Stored(self.opened[number], at))
            for number, part in enumerate(self.parts)
            for at, row in enumerate(part)
        ]


def _refuse_surplus(folder: Path, plan: CachePlan) -> None:
    """Raise ValueError when shards of an earlier run make the folder larger than it may be."""
    planned = {shard_path(folder, number) for number in range(plan.shards)}
    if surplus := sorted(set(folder.glob("shard-*.safetensors")) - planned):
        size = sum(path.stat().st_size for path in surplus) / _GB
        raise ValueError(
            f"{surplus[0]}: this run caches {plan.shards} shards, and {len(surplus)} more "
            f"({size:.3g} GB) of an earlier run lie behind them; delete those from this one on, or "
            "raise cache_gb"
        )


def _check_space(folder: Path, sizes: Sequence[int], plan: CachePlan) -> None:
    """Raise ValueError when the missing shards do not fit on the disk."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    need, free = sum(sizes), shutil.disk_usage(there).free
    if need > free:
        fits = (plan.bytes - need + 0.9 * free) / _GB
        raise ValueError(
            f"{folder}: the feature cache of {plan.tokens} tokens still needs {need / _GB:.2f} GB "
            f"and the disk has {free / _GB:.2f} GB free; set cache_gb={fits:.2f} or less (rows "
            "beyond it are captured during training, 0 caches nothing)"
        )


def _parts(rows: Sequence[Row], rows_per_shard: int) -> list[Sequence[Row]]:
    return [rows[at : at + rows_per_shard] for at in range(0, len(rows), rows_per_shard)]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _barrier() -> None:
    if _is_distributed():
        dist.barrier()
