"""How much of a draft is verified: a fixed length, or what pays on this machine.

Does not know drafters, models, how costs and survival were measured, or when drafting pauses (pace.py).

Sources: DSpark, arXiv 2607.05147 (expected tokens per second over the batch); CaDDTree, arXiv 2606.01813
(nodes in order of probability). Letters: B rows, N drafts a row, V' draft vocabulary, T scored nodes of
all rows together (B roots and the drafts that are kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.core import Draft, DraftContext, Row
from paceline.decode.pace import SparingState

Floats = npt.NDArray[np.floating[Any]]


class LengthRule(Protocol):
    """Chooses how many drafts of each row are verified."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def law(self) -> str:
        """`keeps`, `mixes` for a rule that looks at other rows, or `chooses` at sampled tokens."""

    def __call__(self, draft: Draft, ctx: DraftContext) -> list[int]:
        """Sizes [B]; 0 is plain decoding for that row. More than there are means all."""


class Cut:
    """The stage around a length rule: cut drafts are not computed.

    Behind a rule that looked at sampled tokens the draft has no law any more.
    """

    def __init__(self, rule: LengthRule) -> None:
        self.rule, self.name, self.law = rule, rule.name, rule.law

    def __call__(self, draft: Draft, ctx: DraftContext) -> Draft:
        """The draft with its rows cut."""
        wanted = self.rule(draft, ctx)
        sizes = [max(0, min(a, b)) for a, b in zip(draft.sizes_B, wanted, strict=True)]
        laws = None if self.law == "chooses" else draft.probs_BNV
        return replace(draft, sizes_B=sizes, probs_BNV=laws)


@dataclass(frozen=True)
class First:
    """The first ``count`` drafts of every row."""

    count: int
    name: str = "first"
    law: str = "keeps"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"first:{self.count}: the number of drafts is at least 0")

    def __call__(self, draft: Draft, ctx: DraftContext) -> list[int]:
        """The same for all rows."""
        return [self.count] * len(draft.sizes_B)


_SINGLE = ("context", "per_cached", "per_waiting", "node_greedy", "node_warm")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a round on one machine, from a grid of measured points.

    ``verify_BN[i][j]`` are seconds of the target's pass over ``rows_B[i]`` rows with ``drafts_N[j]``
    drafts each at ``context`` cached tokens a row; every further cached token costs ``per_cached``.
    ``draft_B`` are seconds of drafting and refining greedy rows, ``draft_warm_B`` rows that sample
    (None: the same), without the new features, of which each token costs ``per_waiting`` to take in;
    ``node_greedy`` and ``node_warm`` are seconds of the accept rule a scored node.
    Between the points times are interpolated, so steps of the machine's kernels between two of them are
    missed; beyond the last number of rows time grows in proportion.

    Raises ValueError for figures that no measurement gives.
    """

    rows_B: tuple[int, ...]
    drafts_N: tuple[int, ...]
    verify_BN: tuple[tuple[float, ...], ...]
    draft_B: tuple[float, ...]
    context: int
    per_cached: float
    per_waiting: float = 0.0
    draft_warm_B: tuple[float, ...] | None = None
    node_greedy: float = 0.0
    node_warm: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("rows_B", 1), ("drafts_N", 0)):
            grid = _figures(name, getattr(self, name))
            if grid.ndim != 1 or not grid.size or grid[0] < least or (np.diff(grid) <= 0).any():
                raise ValueError(f"{name} must be numbers from {least} on that rise")
        B, N = len(self.rows_B), len(self.drafts_N)
        shapes: dict[str, tuple[int, ...]] = {"verify_BN": (B, N), "draft_B": (B,)}
        shapes |= dict.fromkeys(_SINGLE, ())
        if self.draft_warm_B is not None:
            shapes["draft_warm_B"] = (B,)
        for name, shape in shapes.items():
            found = _figures(name, getattr(self, name))
            if found.shape != shape:
                raise ValueError(f"{name} must have shape {shape}; got {found.shape}")
            if (found < 0).any() or (name == "verify_BN" and (found == 0).any()):
                raise ValueError(f"{name} holds times that are not positive")

    def verify(self, rows: int, drafts_T: Floats, cached: int) -> Floats:
        """Seconds with each number of drafts of all rows together, ``cached`` tokens of all rows."""
        each = drafts_T / rows
        curves = [np.interp(each, self.drafts_N, line) for line in self.verify_BN]
        base = self._at(rows, np.stack(curves))
        return np.maximum(base + self.per_cached * (cached - rows * self.context), 1e-9)

    def draft(self, rows: int, warm: float = 0.0) -> float:
        """Seconds of drafting for so many rows, a share ``warm`` of which samples."""
        cold = np.asarray(self.draft_B, float)
        hot = cold if self.draft_warm_B is None else np.asarray(self.draft_warm_B, float)
        return float(self._at(rows, (1 - warm) * cold + warm * hot))

    def node(self, warm: float) -> float:
        """Seconds of judging one scored node, where a share ``warm`` of the rows samples."""
        return (1 - warm) * self.node_greedy + warm * self.node_warm

    def _at(self, rows: int, values: Floats) -> Floats:
        """``values`` [grid rows, ...] at a number of rows."""
        grid = np.asarray(self.rows_B, float)
        above = int(np.searchsorted(grid, rows))
        if above == len(grid):
            return np.asarray(values[-1] * rows / grid[-1])
        if above == 0:
            return np.asarray(values[0])
        share = (rows - grid[above - 1]) / (grid[above] - grid[above - 1])
        return np.asarray((1 - share) * values[above - 1] + share * values[above])


def _figures(name: str, value: Any) -> Floats:
    """The array of nested numbers; ValueError for ragged ones and for what is no finite number."""
    try:
        found = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} has lines of different lengths") from None
    if found.size and (found.dtype.kind not in "fiu" or not np.isfinite(found).all()):
        raise ValueError(f"{name} holds something that is no finite number")
    return found.astype(float)


def best_lengths(
    survival_BN: Floats, seconds_T: Floats, idle: int = 0, drafting: float = 0.0
) -> tuple[list[int], Floats]:
    """Sizes [B] with the most expected committed tokens per second, and the tokens at every total.

    ``idle`` rows without drafts commit a token each in the same round. ``drafting`` seconds are spent
    already: they count in what a second is worth, the better of such rounds and of plain ones.

    ``survival_BN[b, k]`` is the chance that drafts 1 .. k + 1 of row b are all accepted: it must not rise
    along k. ``seconds_T[t]`` is what a round with t drafts of all rows together takes. Drafts are
    taken in order of survival, which for every total is the best choice; measured costs have steps, so
    every total is looked at.
    """
    B, N = survival_BN.shape
    slots = np.tile(np.arange(N), (B, 1)).ravel()
    order = np.lexsort((slots, -survival_BN.ravel()))  # of equals the earlier slot first
    gains = np.concatenate(([0.0], np.cumsum(survival_BN.ravel()[order])))
    tokens: Floats = idle + B + gains
    worth = max(float((tokens / (seconds_T + drafting)).max()), tokens[0] / seconds_T[0])
    chosen = order[: int(np.argmax(tokens - worth * seconds_T))]
    return np.bincount(chosen // N, minlength=B).tolist(), tokens


def isotonic(xs: Floats, ys: Floats, weights: Floats) -> Floats:
    """The non-decreasing values [n] closest to ``ys`` in weighted squares, in the order of ``xs``.

    Pool-adjacent-violators, O(n).
    """
    order = np.argsort(xs, kind="stable")
    pools: list[list[float]] = []  # value, weight, count
    for y, w in zip(ys[order], weights[order], strict=True):
        pools.append([float(y), float(w), 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            y1, w1, n1 = pools.pop()
            y0, w0, n0 = pools.pop()
            total = w0 + w1
            pools.append([(y0 * w0 + y1 * w1) / total, total, n0 + n1])
    out = np.empty(len(xs))
    out[order] = np.repeat([p[0] for p in pools], [int(p[2]) for p in pools])
    return out


@dataclass(frozen=True, kw_only=True)
class Survival:
    """How often a draft of a certain confidence is accepted where the ones before it were.

    ``confidence[k]`` and ``accepted[k]`` are points of a rising curve for slot k + 1; a slot beyond them
    has the last curve. ``typical`` are the confidences of whole blocks, a line each, as they came.

    Raises ValueError for points that are no such curves, and lines of different lengths.
    """

    confidence: tuple[tuple[float, ...], ...]
    accepted: tuple[tuple[float, ...], ...]
    typical: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.confidence or len(self.confidence) != len(self.accepted):
            raise ValueError("confidence and accepted must have a line for every slot")
        for xs, ys in zip(self.confidence, self.accepted, strict=True):
            x, y = _figures("confidence", xs), _figures("accepted", ys)
            if x.ndim != 1 or not x.size or x.shape != y.shape:
                raise ValueError("confidence and accepted must be points of one curve a slot")
            if (np.diff(x) < 0).any():
                raise ValueError("confidence falls along a slot's curve")
            if (y < 0).any() or (y > 1).any():
                raise ValueError("accepted must be chances in [0, 1]")
        blocks = _figures("typical", self.typical)
        if self.typical and (blocks.ndim != 2 or not blocks.size):
            raise ValueError("typical must have a line for every block")

    def __call__(self, confidence_BN: Floats) -> Floats:
        """Survival [B, N]: the running product of calibrated chances."""
        each = np.empty_like(confidence_BN)
        for k in range(confidence_BN.shape[1]):
            at = min(k, len(self.confidence) - 1)
            each[:, k] = np.interp(confidence_BN[:, k], self.confidence[at], self.accepted[at])
        out: Floats = np.cumprod(each, axis=1)
        return out


def confidences(logits_RNV: Tensor) -> Tensor:
    """Probability [R, N] of the likeliest token, to the precision of the logits.

    One kernel in the logits' dtype: 5 times faster on a CPU than a float32 copy of them.
    """
    return logits_RNV.softmax(-1).amax(-1).float()


def looked_at(draft: Draft, base: bool) -> Tensor:
    """The logits a rule may look at: refined ones if there are any and the law need not be kept."""
    logits: Tensor = draft.hints["logits_RNV"]
    return logits if base else draft.hints.get("refined_RNV", logits)


GROUPS = 32  # an expectation is the mean of so many draws of typical blocks


@dataclass(frozen=True, kw_only=True)
class CostAware:
    """The lengths with the most expected committed tokens per measured second, over all rows.

    ``greedy`` and ``sampled`` are calibrations for rows at temperature 0 and above. With ``base`` it
    looks at the drafter's first logits only, which do not depend on what is sampled this round. It is
    the `pace.Outlook` of a drafter that pauses, too.
    """

    costs: Costs
    greedy: Survival
    sampled: Survival
    base: bool = False
    name: str = "cost"
    profile: str = ""  # a short hash of the file that the figures come from
    _known: dict[tuple[int, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def law(self) -> str:
        """`mixes` if it looks at first logits only: those of other rows tell what they sampled."""
        return "mixes" if self.base else "chooses"

    def __call__(self, draft: Draft, ctx: DraftContext) -> list[int]:
        """Sizes [B]; rows that were not drafted stay so. Tells the session's pace what it saw."""
        if "ready" not in draft.hints:
            return list(draft.sizes_B)
        live = [(i, b) for i, b in enumerate(draft.hints["ready"]) if draft.sizes_B[b] > 0]
        if not live:
            return list(draft.sizes_B)
        found = confidences(looked_at(draft, self.base)).double().cpu().numpy()
        chosen = [ctx.rows[b] for _, b in live]
        survival = self._survival(found[[i for i, _ in live]], chosen)
        kept, lost = self._best(survival, ctx.rows)
        if isinstance(ctx.state, SparingState):
            ctx.state.pace.seen(lost)
        sizes = [0] * len(draft.sizes_B)
        for (_, b), size in zip(live, kept, strict=True):
            sizes[b] = size
        return sizes

    def lost(self, rows: Sequence[Row]) -> float:
        """Plain rounds that a drafted round of typical blocks loses: the mean of many draws of them.

        0 without typical blocks. Contexts are told apart by steps of 256 cached tokens a row.
        """
        warm, context = sum(map(_warm, rows)), _cached(rows) // (256 * len(rows))
        key = len(rows), warm, context
        if not (self.greedy.typical and self.sampled.typical):
            return 0.0
        if key not in self._known:
            rng = np.random.default_rng(0)
            drawn = []
            for _ in range(GROUPS):
                parts = [
                    curve(np.array(curve.typical)[rng.integers(len(curve.typical), size=count)])
                    for curve, count in ((self.greedy, len(rows) - warm), (self.sampled, warm))
                ]
                drawn.append(self._best(np.concatenate(parts), rows)[1])
            self._known[key] = float(np.mean(drawn))
        return self._known[key]

    def catching_up(self, rows: Sequence[Row]) -> float:
        """Plain rounds that the drafter needs to take in what waits in ``row.features``."""
        waiting = sum(len(part) for row in rows for part in row.features)
        return self.costs.per_waiting * waiting / float(self._seconds(rows, np.zeros(1))[0])

    def _best(self, survival_RN: Floats, rows: Sequence[Row]) -> tuple[list[int], float]:
        """The best sizes [R] of the drafted ones of all rows, and the plain rounds that they lose."""
        seconds_T = self._seconds(rows, np.arange(survival_RN.size + 1.0))
        drafting = self.costs.draft(len(rows), sum(map(_warm, rows)) / len(rows))
        idle = len(rows) - len(survival_RN)
        kept, tokens_T = best_lengths(survival_RN, seconds_T, idle, drafting)
        spent_T = seconds_T + drafting + self.costs.per_waiting * tokens_T
        return kept, float((spent_T / seconds_T[0] - tokens_T / tokens_T[0]).min())

    def _seconds(self, rows: Sequence[Row], drafts_T: Floats) -> Floats:
        """Seconds of verifying and judging with each number of drafts of all rows together."""
        node = self.costs.node(sum(map(_warm, rows)) / len(rows))
        return self.costs.verify(len(rows), drafts_T, _cached(rows)) + node * (len(rows) + drafts_T)

    def _survival(self, confidence_RN: Floats, rows: Sequence[Row]) -> Floats:
        warm = np.array([_warm(row) for row in rows])
        out = self.greedy(confidence_RN)
        out[warm] = self.sampled(confidence_RN[warm])
        budgets = np.array([row.budget for row in rows])[:, None]
        out[np.arange(out.shape[1])[None] >= budgets] = 0.0  # never committed
        return out


def _warm(row: Row) -> bool:
    return row.params.temperature > 0


def _cached(rows: Sequence[Row]) -> int:
    """Tokens of all rows together."""
    return sum(len(row.tokens) for row in rows)
