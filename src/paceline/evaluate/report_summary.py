"""The main finding of a report in words and in four numbers, computed from its runs.

Knows nothing about files, charts or HTML.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.evaluate.metrics import percent, ratio
from paceline.evaluate.results import Run
from paceline.evaluate.svg import Series

FEW_CHUNKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a table holds constant. ``machine`` is empty unless the files differ in it."""

    batch_size: int
    temperature: float
    machine: str

    @property
    def label(self) -> str:
        """In words."""
        sampling = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        parts = [f"batch {self.batch_size}", sampling, self.machine]
        return ", ".join(part for part in parts if part)

    @property
    def order(self) -> tuple[float, int]:
        """Greedy and small batches first; machines stay in the order of the files."""
        return self.temperature, self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run, where it belongs and what its method is called on the page."""

    run: Run
    setting: Setting
    series: Series
    file: str  # name of the file it is from
    prompts: str  # fingerprint of the task's prompts
    max_new_tokens: int

    @property
    def asked(self) -> tuple[str, str, int]:
        """What was asked: only runs that were asked the same can be compared."""
        return self.run.task, self.prompts, self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A headline number, what it is, and whether it is bad news."""

    value: str
    caption: str
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The fastest method of one setting among those that were asked the same."""

    setting: Setting
    file: str | None  # where methods of several files cannot be compared: the file it is of
    entries: Sequence[Entry]  # its totals, one a task
    speedup: float  # geometric mean over those tasks
    rivals: int  # methods that it was compared with, itself included

    @property
    def label(self) -> str:
        """The method."""
        return self.entries[0].series.label

    @property
    def where(self) -> str:
        """The setting in words."""
        return f"{self.setting.label}{f' in {self.file}' if self.file else ''}"

    @property
    def acceptance(self) -> float:
        """Committed tokens per verify round, pooled over the tasks; there are rounds to a speed-up."""
        rounds = sum(entry.run.verify_rounds for entry in self.entries)
        return sum(entry.run.committed_tokens for entry in self.entries) / rounds


def findings(totals: Sequence[Entry]) -> list[Finding]:
    """The fastest method of every setting, settings in their order.

    Methods compete that were asked the same: the same tasks, prompts and reply lengths. One that
    was measured on some of the others' tasks only is left out, since a mean over the easy tasks
    alone would win for nothing. Where the prompts themselves differ, every file has its own winner.
    """
    found = []
    for setting in dict.fromkeys(entry.setting for entry in totals):
        timed = [
            entry
            for entry in totals
            if entry.setting == setting and entry.series.index and entry.run.speedup_vs_plain
        ]
        files = list(dict.fromkeys(entry.file for entry in timed))
        if timed and _comparable(timed):
            found.append(_fastest(setting, None, timed))
        else:
            for file in files:
                found.append(_fastest(setting, file, [e for e in timed if e.file == file]))
    return found


def _by_method(entries: Sequence[Entry]) -> dict[Series, list[Entry]]:
    methods: dict[Series, list[Entry]] = {}
    for entry in entries:
        methods.setdefault(entry.series, []).append(entry)
    return methods


def _comparable(entries: Sequence[Entry]) -> bool:
    """Whether some method was asked all that any was."""
    asked = [frozenset(e.asked for e in some) for some in _by_method(entries).values()]
    return frozenset().union(*asked) in asked


def _fastest(setting: Setting, file: str | None, entries: Sequence[Entry]) -> Finding:
    methods = _by_method(entries).values()
    most = max(methods, key=len)
    same = frozenset(entry.asked for entry in most)
    rivals = [some for some in methods if frozenset(entry.asked for entry in some) == same]
    means = [
        Finding(
            setting=setting,
            file=file,
            entries=some,
            speedup=statistics.geometric_mean(e.run.speedup_vs_plain or 0 for e in some),
            rivals=len(rivals),
        )
        for some in rivals
    ]
    return max(means, key=lambda finding: finding.speedup)


def remarks(entries: Sequence[Entry]) -> list[str]:
    """What the figures of one setting's totals rest on, where that is not much."""
    found = dict.fromkeys(
        f"{e.run.task}: {e.run.unfilled_requests} of {e.run.requests} requests were decoded in "
        f"batches of fewer than {e.run.batch_size} rows."
        for e in entries
        if e.run.unfilled_requests
    )
    few = dict.fromkeys(e.run.task for e in entries if e.run.chunks < FEW_CHUNKS)
    if few:
        found[
            f"Fewer than {FEW_CHUNKS} chunks of requests on {', '.join(few)}: repeats even out the "
            "clock, not the choice of prompts."
        ] = None
    return list(found)


def summarise(totals: Sequence[Entry], target: str) -> list[str]:
    """Sentences: the fastest method, what it does elsewhere, whether outputs changed, loops."""
    found = findings(totals)
    if not found:
        return [_only_plain(totals, target)]
    first = found[0]
    among = f", the fastest of {first.rivals} methods," if first.rivals > 1 else ""
    tasks = sorted(first.entries, key=lambda entry: -(entry.run.speedup_vs_plain or 0))
    each = ", ".join(f"{e.run.speedup_vs_plain:.2f}× on {e.run.task}" for e in tasks)
    mean = (
        f"the geometric mean of {len(tasks)} tasks: {each}"
        if len(tasks) > 1
        else f"on {tasks[0].run.task}"
    )
    said = [
        f"On {target} at {first.where}, {first.label}{among} {_verdict(first.speedup)} "
        f"({mean}), with {first.acceptance:.2f} tokens committed per verify round."
    ]
    if len(found) > 1:
        others = "; ".join(f"{f.label} {f.speedup:.2f}× at {f.where}" for f in found[1:])
        said.append(f"Fastest elsewhere: {others}.")
    return [*said, _identity(totals), *_loops(first)]


def tiles(totals: Sequence[Entry]) -> list[Tile]:
    """The headline numbers of the first setting; none where only plain decoding was measured."""
    found = findings(totals)
    if not found:
        return []
    first = found[0]
    same, near, bugs = _verdicts(totals)
    replies = same + near + bugs
    loops = _loop_counts(first)
    return [
        Tile(value=f"{first.speedup:.2f}×", caption=f"plain decoding's speed: {first.label}"),
        Tile(value=f"{first.acceptance:.2f}", caption="tokens per verify round"),
        Tile(
            value=f"{bugs}" if bugs else percent(ratio(same, replies)),
            caption=f"of {replies} replies differ from plain: bugs"
            if bugs
            else f"of {replies} replies identical to plain{', the others near ties' * (near > 0)}",
            alarm=bugs > 0,
        ),
        Tile(value=percent(loops), caption=f"of {first.label}'s replies end in a loop"),
    ]


def _verdict(speedup: float) -> str:
    if speedup >= 1.005:
        return f"decodes {speedup:.2f}× as fast as plain decoding"
    if speedup > 0.995:
        return "decodes only as fast as plain decoding"
    return f"is slower than plain decoding, at {speedup:.2f}× its speed"


def _only_plain(totals: Sequence[Entry], target: str) -> str:
    speeds = ", ".join(
        f"{e.run.tokens_per_second:.1f} tokens/s on {e.run.task} ({e.setting.label})"
        for e in totals
        if e.run.tokens_per_second
    )
    return (
        f"No speed-up was measured on {target}, so there is nothing to compare. "
        f"Plain decoding: {speeds or 'no decoded token'}."
    )


def _verdicts(totals: Sequence[Entry]) -> tuple[int, int, int]:
    """Replies of all methods but plain: identical, near ties, bugs."""
    runs = [entry.run for entry in totals if entry.series.index]
    return (
        sum(run.identical_to_plain for run in runs),
        sum(run.near_ties for run in runs),
        sum(run.bugs for run in runs),
    )


def _identity(totals: Sequence[Entry]) -> str:
    same, near, bugs = _verdicts(totals)
    replies = f"the {same + near + bugs} replies with drafts, over all methods and settings,"
    if bugs:
        return (
            f"Of {replies} {bugs} differ from plain decoding by more than rounding explains: "
            "those are bugs, and the speed-ups must not be trusted before they are found."
        )
    if near:
        return (
            f"Of {replies} {same} are token for token those of plain decoding; the other {near} "
            "part from it at a near tie, where rounding alone decides, and none is a bug."
        )
    return f"All of {replies} are token for token those of plain decoding."


def _loop_counts(finding: Finding) -> float:
    """Share of looping replies over the finding's tasks."""
    requests = sum(entry.run.requests for entry in finding.entries)
    looping = sum((e.run.looping_share or 0) * e.run.requests for e in finding.entries)
    return looping / requests


def _loops(finding: Finding) -> list[str]:
    share = _loop_counts(finding)
    if not share:
        return []
    without = [entry.run.without_loops["speedup_vs_plain"] for entry in finding.entries]
    known = [value for value in without if value]
    speed = (
        f"; without them the speed-up is {statistics.geometric_mean(known):.2f}×" if known else ""
    )
    return [
        f"At {finding.where}, {percent(share)} of {finding.label}'s replies end in a loop, which "
        f"flatters a drafter{speed}."
    ]
