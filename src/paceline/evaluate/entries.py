"""A bench's replies as records, and its figures from nothing else: one run per method and setting.

Knows nothing about models or files; the definitions are in docs/bench.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.core import Completion, Round
from paceline.decode.loop import Seconds
from paceline.evaluate.metrics import acceptance, loops, quotient, ratio
from paceline.evaluate.traces import PHASES, Trace

WITHOUT_LOOPS = (
    "requests",
    "verify_rounds",
    "accepted_drafts",
    "committed_tokens",
    "acceptance_length_pooled",
    "acceptance_length_request_mean",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One reply of one method with its counts and clocks; as JSON it is a side file's record.

    ``repeat`` above 0: the same request timed again. Only clocks count there.
    """

    method: str
    task: str
    category: str | None
    batch_size: int
    temperature: float
    chunk: int
    repeat: int
    row: int
    turn: int
    together: int  # rows that its batch began with
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    rounds: list[list[int]]  # drafted, accepted, committed
    seconds: dict[str, float]  # by phase, its share of the passes after the prefill
    prefill: float
    passes: float
    difference: dict[str, Any] | None = None  # from plain's reply; None: the same ids

    @staticmethod
    def of(trace: Trace, **place: Any) -> Entry:
        """The record of a trace, not judged; ``place`` is what a trace does not know."""
        return Entry(
            prompt_ids=trace.prompt_ids,
            token_ids=trace.reply.token_ids,
            finish_reason=trace.reply.finish_reason,
            rounds=[[r.drafted, r.accepted, r.committed] for r in trace.reply.rounds],
            seconds=asdict(trace.seconds),
            prefill=trace.prefill,
            passes=trace.passes,
            **place,
        )

    @property
    def request(self) -> tuple[Any, ...]:
        """Which prompt under which setting; the same for every method and repeat."""
        return (self.task, self.batch_size, self.temperature, self.row, self.turn)

    @property
    def verdict(self) -> str:
        """``identical``, ``near-tie``, ``bug``, or ``draw``: sampled with other numbers than plain."""
        return "identical" if self.difference is None else str(self.difference["verdict"])

    @property
    def looping(self) -> bool:
        """Whether the reply ends in a loop."""
        return loops(self.token_ids)

    @property
    def reply(self) -> Completion:
        """What the metrics count."""
        rounds = [Round(drafted=d, accepted=a, committed=c) for d, a, c in self.rounds]
        return Completion(
            index=0,
            text="",
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=None,
            logprobs=None,
            rounds=rounds,
        )

    @property
    def decoded(self) -> int:
        """Tokens committed after the prefill round."""
        return sum(committed for _, _, committed in self.rounds[1:])

    @property
    def total(self) -> float:
        """Seconds after the prefill round."""
        return Seconds(**self.seconds).total

    def shown(self) -> dict[str, Any]:
        """The reply as it stands in the bench's JSON."""
        names = ("method", "task", "category", "batch_size", "temperature", "row", "turn")
        counts = acceptance([self.reply])
        sums = ("verify_rounds", "drafted_tokens", "accepted_drafts", "committed_tokens")
        kept = ("position", "plain_token", "speculative_token", "margin", "rounding")
        found = self.difference
        return {
            **{name: getattr(self, name) for name in names},
            "prompt_tokens": len(self.prompt_ids),
            "output_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            **{name: getattr(counts, name) for name in sums},
            "seconds": self.total,
            "looping": self.looping,
            "verdict": self.verdict,
            "difference": None if found is None else {name: found[name] for name in kept},
        }


Pair = tuple[Entry, Entry]  # a method's reply and plain's to the same prompt at the same time


def summarise(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The ``runs`` of docs/bench.md, in the order of the entries; totals before categories.

    Every method's reply needs plain's to the same request in the same repeat among the entries.
    """
    every = list(entries)
    plain = {(e.request, e.repeat): e for e in every if e.method == "plain"}
    groups: dict[tuple[Any, ...], list[Pair]] = {}
    for e in every:
        setting = (e.method, e.task, e.batch_size, e.temperature)
        groups.setdefault(setting, []).append((e, plain[e.request, e.repeat]))
    runs = []
    for (method, task, batch_size, temperature), pairs in groups.items():
        categories = dict.fromkeys(e.category for e, _ in pairs if e.category is not None)
        for category in [None, *categories]:
            some = [pair for pair in pairs if category in (None, pair[0].category)]
            run = {"method": method, "task": task, "category": category}
            run |= {"batch_size": batch_size, "temperature": temperature}
            runs.append(run | figures(some))
    return runs


def counted(entries: Iterable[Entry]) -> list[Entry]:
    """The first pass, whose tokens count, with the mean of the clocks of all repeats."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for e in entries:
        groups.setdefault((e.method, *e.request), []).append(e)
    found = []
    for some in groups.values():
        first = min(some, key=lambda e: e.repeat)
        seconds = {phase: statistics.fmean(e.seconds[phase] for e in some) for phase in PHASES}
        prefill = statistics.fmean(e.prefill for e in some)
        if first.repeat == 0:  # else a later turn that the first pass did not reach
            found.append(replace(first, seconds=seconds, prefill=prefill))
    return found


def figures(measured: Sequence[Pair]) -> dict[str, Any]:
    """Sums and ratios of some requests of one method; a ratio without anything to count is None."""
    mine = counted(e for e, _ in measured)
    plain = counted(p for _, p in measured)
    pairs = list(zip(mine, plain, strict=True))
    seconds = {phase: math.fsum(e.seconds[phase] for e in mine) for phase in PHASES}
    seconds["total"] = math.fsum(seconds.values())
    chunks: dict[tuple[int, int], list[Pair]] = {}
    for pair in measured:
        chunks.setdefault((pair[0].chunk, pair[0].repeat), []).append(pair)
    ratios = {at: found for at, some in chunks.items() if (found := speedup(some)) is not None}
    verdicts = [e.verdict for e in mine]
    kept = [(e, p) for e, p in pairs if not e.looping and not p.looping]
    counts = acceptance(e.reply for e, _ in kept)
    sums = acceptance(e.reply for e in mine)
    passes = math.fsum(e.passes for e in mine)
    return {
        **sums.figures(),
        "output_tokens": sum(len(e.token_ids) for e in mine),
        "seconds": seconds,
        "prefill_seconds": math.fsum(e.prefill for e in mine),
        "forward_passes": passes,
        "rows_per_pass": ratio(sums.verify_rounds, passes),
        "unfilled_requests": sum(e.together < e.batch_size for e in mine),
        "tokens_per_second": speed(mine),
        "speedup_vs_plain": speedup(pairs),
        "speedup_median": statistics.median(ratios.values()) if ratios else None,
        "speedup_end_to_end": quotient(end_to_end(mine), end_to_end(plain)),
        "chunks": len({chunk for chunk, _ in ratios}),
        "measurements": len(ratios),
        "identical_to_plain": verdicts.count("identical"),
        "near_ties": verdicts.count("near-tie"),
        "bugs": verdicts.count("bug"),
        "other_draws": verdicts.count("draw"),
        "looping_share": ratio(sum(e.looping for e in mine), len(mine)),
        "without_loops": {
            **{name: getattr(counts, name) for name in WITHOUT_LOOPS},
            "tokens_per_second": speed([e for e, _ in kept]),
            "speedup_vs_plain": speedup(kept),
        },
    }


def speed(entries: Sequence[Entry]) -> float | None:
    """Tokens per second after the prefill."""
    return quotient(sum(e.decoded for e in entries), math.fsum(e.total for e in entries))


def end_to_end(entries: Sequence[Entry]) -> float | None:
    """Tokens per second with the prefill."""
    seconds = math.fsum(e.prefill + e.total for e in entries)
    return quotient(sum(len(e.token_ids) for e in entries), seconds)


def speedup(pairs: Sequence[Pair]) -> float | None:
    """Speed over plain's for the same requests."""
    return quotient(speed([e for e, _ in pairs]), speed([p for _, p in pairs]))
