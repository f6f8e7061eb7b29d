"""The decode loop: draft, score, accept, commit, for all live rows at once.

Knows nothing about drafter architectures, sampling formulas or text; it only passes them on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core import AcceptRule, Draft, DraftContext, Drafter, Row, Stage, Verdict
from paceline.decode.commit import commit_row
from paceline.decode.warp import warp


class Scorer(Protocol):
    """What the loop needs of a target; ``paceline.target.Target`` is one, the table LM another."""

    def new_cache(self, slots: int) -> Any:
        """A cache with ``lengths`` per slot and ``keep_path(slot, start, nodes)``."""

    def score(self, draft: Draft, rows: Sequence[Row], cache: Any, taps: Sequence[int]) -> Any:
        """Logits of every row's root and draft nodes, and the tapped states of all nodes."""


Watch = Callable[[Sequence[Row], Draft, Any, Verdict], None]
"""`watch(rows, draft, scored, verdict)` sees a round before it is committed; it must change nothing."""


@dataclass(slots=True)
class Seconds:
    """Wall seconds by phase, summed over rounds."""

    draft: float = 0.0
    refine: float = 0.0  # the stages
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """All phases together."""
        return self.draft + self.refine + self.verify + self.accept + self.commit


@dataclass(kw_only=True)
class Session:
    """B rows that decode together; rows join with ``add`` and leave when they finish.

    ``step`` runs one round over the live rows and returns the ids each committed. A fresh row's
    first round is its prefill: it scores its prompt and nothing is drafted for it, whatever the
    drafter, so that no draft escapes the metrics, which begin behind it. Engines do the same.
    """

    target: Scorer
    drafter: Drafter | None
    accept: AcceptRule
    stages: Sequence[Stage] = ()
    slots: int = 1
    rows: list[Row] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.cache = self.target.new_cache(self.slots)
        self.state = self.drafter.new_state(self.slots) if self.drafter else None
        self.taps: tuple[int, ...] = self.drafter.taps if self.drafter else ()
        self.free = list(range(self.slots))[::-1]

    def add(self, row: Row) -> None:
        """Give the row a free slot; it takes part from the next step on."""
        row.slot = self.free.pop()
        self.cache.lengths[row.slot] = 0
        self.rows.append(row)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """One round: draft -> stages -> score -> accept -> commit. Returns committed ids per row."""
        began = time.perf_counter()
        rows = self.rows
        ctx = DraftContext(rows=[row for row in rows if row.rounds], state=self.state)
        draft = self.drafter.propose(ctx) if self.drafter and ctx.rows else Draft.empty(len(rows))
        drafted = refined = time.perf_counter()
        if self.stages and ctx.rows:
            for stage in self.stages:
                draft = stage(draft, ctx)
            refined = time.perf_counter()
        draft = _within_budget(_of_all(draft, rows), rows)
        scored = self.target.score(draft, rows, self.cache, self.taps)
        verified = time.perf_counter()
        verdict = self.accept(draft, warp(scored.logits_TV, draft, rows), rows)
        accepted = time.perf_counter()
        if self.watch is not None:
            self.watch(rows, draft, scored, verdict)
        committed = self._commit(rows, draft, verdict, scored)
        self.seconds.draft += drafted - began
        self.seconds.refine += refined - drafted
        self.seconds.verify += verified - refined
        self.seconds.accept += accepted - verified
        self.seconds.commit += time.perf_counter() - accepted
        return committed

    def _commit(
        self, rows: list[Row], draft: Draft, verdict: Verdict, scored: Any
    ) -> list[tuple[Row, list[int]]]:
        out: list[tuple[Row, list[int]]] = []
        first_logit = first_node = 0
        for b, row in enumerate(rows):
            path, size = verdict.paths[b], draft.sizes_B[b]
            known = len(row.tokens)
            waiting = known - self.cache.lengths[row.slot]
            nodes = [first_logit] + [first_logit + 1 + node for node in path]
            ids = commit_row(row, verdict.tokens[b], size, scored.logits_TV, nodes)
            out.append((row, ids))
            self.cache.keep_path(row.slot, known, path)
            self.cache.lengths[row.slot] = min(known + len(path), len(row.tokens) - 1)
            if scored.taps_TF is not None and row.finish_reason is None:
                row.features.append(_taps_of(scored.taps_TF, first_node, waiting, path))
            first_logit += size + 1
            first_node += waiting + size
        for row in [row for row in rows if row.finish_reason is not None]:
            self._leave(row)
        return out

    def _leave(self, row: Row) -> None:
        self.rows = [other for other in self.rows if other is not row]
        row.features.clear()
        if self.drafter:
            self.drafter.release(self.state, row.slot)
        self.free.append(row.slot)


def _taps_of(taps_TF: Tensor, first: int, waiting: int, path: list[int]) -> Tensor:
    """Tapped states of the tokens that are now committed and cached, in order [c, F]."""
    if path == list(range(len(path))):
        return taps_TF[first : first + waiting + len(path)]
    kept = list(range(first, first + waiting)) + [first + waiting + node for node in path]
    return taps_TF[torch.tensor(kept, device=taps_TF.device)]


def _of_all(draft: Draft, rows: Sequence[Row]) -> Draft:
    """The draft of the rows past their first round as a draft of all rows; the others' are empty."""
    if len(draft.sizes_B) == len(rows):
        return draft
    later = [b for b, row in enumerate(rows) if row.rounds]
    sizes = [0] * len(rows)
    for b, size in zip(later, draft.sizes_B, strict=True):
        sizes[b] = size

    def spread(part: Tensor) -> Tensor:
        whole = part.new_zeros(len(rows), *part.shape[1:])
        whole[later] = part
        return whole

    return Draft(
        tokens_BN=spread(draft.tokens_BN),
        parents_BN=spread(draft.parents_BN),
        sizes_B=sizes,
        probs_BNV=None if draft.probs_BNV is None else spread(draft.probs_BNV),
    )


def _within_budget(draft: Draft, rows: Sequence[Row]) -> Draft:
    """Cut what could never be committed: nodes deeper than the tokens a row may still emit.

    Parents come before children, so a prefix of the nodes is a tree again; the cut is at the first
    node that is too deep. It depends on lengths only, never on tokens, so exact laws stay exact.
    """
    if all(size <= row.budget for size, row in zip(draft.sizes_B, rows, strict=True)):
        return draft
    sizes = []
    for parents, size, row in zip(draft.parents_BN.tolist(), draft.sizes_B, rows, strict=True):
        depths: list[int] = []
        for parent in parents[:size]:
            depth = 1 if parent < 0 else depths[parent] + 1
            if depth > row.budget:
                break
            depths.append(depth)
        sizes.append(len(depths))
    return Draft(
        tokens_BN=draft.tokens_BN,
        parents_BN=draft.parents_BN,
        sizes_B=sizes,
        probs_BNV=draft.probs_BNV,
        hints=draft.hints,
    )


def run(session: Session, rows: Sequence[Row]) -> Iterator[tuple[Row, list[int]]]:
    """Decode all rows, at most ``session.slots`` at a time, in order of arrival."""
    waiting = [row for row in rows if row.finish_reason is None][::-1]
    while waiting or session.rows:
        while waiting and session.free:
            session.add(waiting.pop())
        yield from session.step()
