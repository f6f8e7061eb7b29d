"""What a round costs on this machine: seconds of verifying, drafting and judging, measured on a grid.

Does not know how lengths are chosen from it (decode/length.py), nor where figures are kept (profile.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.core import Draft, DraftContext, Noise, Row, SamplingParams
from paceline.decode.length import Costs
from paceline.decode.warp import warp
from paceline.pipeline import Pipeline

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 768)  # the middle one carries the grid
SMALLEST = 16  # the last of them where positions are few
REPEATS = 5
Progress = Callable[[str, int, int | None], None]


def contexts(pipeline: Pipeline) -> tuple[int, int, int]:
    """Context lengths to measure at: ``CONTEXTS``, or less where target or drafter end before.

    Raises ValueError where not even ``SMALLEST`` tokens and a block fit.
    """
    drafter: Any = pipeline.drafter
    block: int = drafter.config.block_size
    limit = min(pipeline.target.max_length, drafter.config.max_position_embeddings)
    if limit < SMALLEST + block:
        raise ValueError(
            f"target and drafter have {limit} positions: too few to measure blocks of {block} behind "
            f"{SMALLEST} tokens"
        )
    parts = zip(CONTEXTS, (4, 2, 1), strict=True)
    low, middle, high = (min(context, (limit - block) // part) for context, part in parts)
    return low, middle, high


def measure_costs(
    pipeline: Pipeline, progress: Progress, rows: Sequence[int] | None = None
) -> tuple[Costs, float]:
    """Seconds of verifying, drafting and judging, and the largest error of interpolation.

    Verifying is measured on a grid; the error is that of points between the grid's, relative.
    """
    drafter: Any = pipeline.drafter
    rows, most = rows or ROWS, (rows or ROWS)[-1]
    low, middle, high = contexts(pipeline)
    width = drafter.config.block_size - 1
    drafts = tuple(sorted({0, 1, max(1, width // 4), max(1, width // 2), width}))
    between = [(r, width - 1) for r in rows[1:-1:2] if width > 2]
    points = [(r, d, middle) for r in rows for d in drafts]
    points += [(r, d, middle) for r, d in between]
    points += [(most, 0, low), (most, 0, high)]
    with torch.inference_mode():
        benches = {(r, c): _Bench(pipeline, r, c) for r, _, c in points}
        timed: dict[Any, Callable[[], float]]
        timed = {(r, d, c): partial(benches[r, c].verify, d) for r, d, c in points}
        for warm in (False, True):
            timed |= {("draft", r, warm): partial(benches[r, middle].draft, warm) for r in rows}
            timed["node", warm] = partial(benches[rows[len(rows) // 2], middle].node, warm)
        some = rows[len(rows) // 2]
        timed["waiting"] = benches[some, middle].waiting
        took = _medians(timed, progress)
    slope = (took[most, 0, high] - took[most, 0, low]) / (most * (high - low))
    waiting = (took["waiting"] - took["draft", some, False]) / (some * middle)
    costs = Costs(
        rows_B=tuple(rows),
        drafts_N=drafts,
        verify_BN=tuple(tuple(took[r, d, middle] for d in drafts) for r in rows),
        draft_B=tuple(took["draft", r, False] for r in rows),
        draft_warm_B=tuple(took["draft", r, True] for r in rows),
        node_greedy=took["node", False],
        node_warm=took["node", True],
        context=middle,
        per_cached=max(0.0, slope),
        per_waiting=max(0.0, waiting),
    )
    errors = [0.0]
    for r, d in between:
        guess = costs.verify(r, np.array([float(r * d)]), r * middle)[0]
        errors.append(abs(float(guess) / took[r, d, middle] - 1))
    return costs, max(errors)


def _medians(timed: Mapping[Any, Callable[[], float]], progress: Progress) -> dict[Any, float]:
    """Repeats go around everything, so that a slow minute of the machine does not fall on one point."""
    seconds: dict[Any, list[float]] = {what: [] for what in timed}
    for done in range(REPEATS):
        for what, once in timed.items():
            seconds[what].append(once())
        progress(f"{len(timed)} costs", done + 1, REPEATS)
    return {what: statistics.median(times) for what, times in seconds.items()}


class _Bench:
    """Rows with a context of random tokens, drafted, scored and judged again and again."""

    def __init__(self, pipeline: Pipeline, rows: int, context: int) -> None:
        self.pipeline, self.target = pipeline, pipeline.target
        generator = torch.Generator().manual_seed(rows)
        self.rows = []
        for slot in range(rows):
            ids = torch.randint(0, self.target.vocab_size, (context + 1,), generator=generator)
            self.rows.append(_row(slot, ids.tolist(), _GREEDY))
        self.cache = self.target.new_cache(rows)
        self.accept = pipeline.session(1).accept
        drafter: Any = pipeline.drafter
        self.state = drafter.new_state(rows)
        for row in self.rows:  # one at a time: a context of all rows at once may not fit
            last = row.tokens.pop()
            self.cache.lengths[row.slot] = 0
            scored = self.target.score(Draft.empty(1), [row], self.cache, drafter.taps)
            row.features.append(scored.taps_TF)
            self.cache.lengths[row.slot] = len(row.tokens)
            row.tokens.append(last)
        self._drafted(warm=False)  # takes the features in

    def verify(self, drafts: int) -> float:
        """Seconds of one pass over every row's root and so many drafts."""
        B = len(self.rows)
        draft = Draft.chain(torch.ones(B, drafts, dtype=torch.int64), [drafts] * B)
        began = time.perf_counter()
        self._logits(draft)
        return time.perf_counter() - began

    def draft(self, warm: bool) -> float:
        """Seconds of drafting for all rows, stages included; ``warm`` rows have temperature 1."""
        began = time.perf_counter()
        self._drafted(warm)
        return time.perf_counter() - began

    def waiting(self) -> float:
        """Seconds of drafting for rows whose whole context waits to be taken in."""
        drafter: Any = self.pipeline.drafter
        width = len(drafter.taps) * self.target.hidden_size
        for row in self.rows:
            drafter.release(self.state, row.slot)
            features = torch.randn(len(row.tokens) - 1, width).to(self.target.dtype)
            row.features.append(features.to(self.target.device))
        began = time.perf_counter()
        self._drafted(warm=False)
        return time.perf_counter() - began

    def node(self, warm: bool) -> float:
        """Seconds of the target's laws and the accept rule for one scored node of whole blocks."""
        draft = self._drafted(warm)
        logits_TV = self._logits(draft)
        began = time.perf_counter()
        self.accept(draft, warp(logits_TV, draft, self.rows), self.rows)
        return (time.perf_counter() - began) / len(logits_TV)

    def _logits(self, draft: Draft) -> torch.Tensor:
        drafter: Any = self.pipeline.drafter
        scored = self.target.score(draft, self.rows, self.cache, drafter.taps)
        logits_TV: torch.Tensor = scored.logits_TV
        float(logits_TV[-1, 0])  # waits for an accelerator
        return logits_TV

    def _drafted(self, warm: bool) -> Draft:
        for row in self.rows:
            row.params = _WARM if warm else _GREEDY
        ctx, drafter = DraftContext(rows=self.rows, state=self.state), self.pipeline.drafter
        assert drafter is not None
        draft = drafter.propose(ctx)
        for stage in self.pipeline.stages:
            draft = stage(draft, ctx)
        if not all(draft.sizes_B):
            raise ValueError("nothing was drafted for some rows: what drafting costs is not known")
        return draft


_GREEDY = SamplingParams(max_tokens=64)
_WARM = SamplingParams(max_tokens=64, temperature=1.0, seed=0)  # rows have noise of their own


def _row(slot: int, tokens: list[int], params: SamplingParams) -> Row:
    return Row(
        slot=slot,
        tokens=tokens,
        prompt_length=len(tokens) - 1,
        params=params,
        noise=Noise(slot),
        stop_ids=frozenset(),
        limit=len(tokens) + 64,
    )
