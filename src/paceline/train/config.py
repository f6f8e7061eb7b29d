"""The full description of a training run: one frozen, keyword-only dataclass.

Does not know how training works; recipes return it and `fit` reads it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the run with one block length: ``share`` of the steps."""

    share: float
    block_size: int
    anchors_per_row: int


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the result of a run.

    ``gamma`` is the decay of the position weights exp(-(k - 1) / gamma). ``init_layers`` are target
    layers whose weights start the draft layers. ``draft_vocab_size`` None trains the full
    vocabulary. ``init_from`` is a drafter folder to start from instead.
    """

    target: str
    data: tuple[str, ...]
    run_dir: str
    taps: tuple[int, ...]
    init_layers: tuple[int, ...]
    phases: tuple[Phase, ...]
    mask_token_id: int
    steps: int
    block_size: int = 8
    draft_vocab_size: int | None = None
    init_from: str | None = None
    rows_per_step: int = 4
    lr: float = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.04
    clip: float = 1.0
    gamma: float = 3.0
    seed: int = 0
    max_tokens: int = 704
    min_reply: int = 4
    held_out_share: float = 0.02
    rows_per_shard: int = 128
    eval_every: int = 500
    eval_anchors: int = 12
    checkpoint_seconds: float = 180.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")
        if not self.phases or abs(sum(p.share for p in self.phases) - 1) > 1e-6:
            raise ValueError("the shares of the phases must sum to 1")
        if self.phases[-1].block_size != self.block_size:
            raise ValueError("the last phase must have the drafter's block_size")
        if not self.data:
            raise ValueError("name at least one corpus file (--data)")

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with some fields changed; ValueError names an unknown key's nearest field."""
        known = [field.name for field in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown setting {key!r}{hint}")
        return dataclasses.replace(self, **changes)

    def phase_at(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        done = 0.0
        for phase in self.phases:
            done += phase.share
            if step < round(done * self.steps):
                return phase
        return self.phases[-1]


def parse_settings(pairs: list[str]) -> Mapping[str, Any]:
    """``key=value`` pairs from a command line; values are JSON, or text if they are not."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"setting {pair!r} is not key=value")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        found[key] = tuple(value) if isinstance(value, list) else value
    return found
