"""The charts of a report with their numbers as tables: runs in, panels out.

Knows nothing about files or HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.evaluate import metrics, svg
from paceline.evaluate.report_summary import Entry, Setting
from paceline.evaluate.results import PHASES, SHARES, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A small table of text: the same numbers as a chart, for who cannot see it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart with its heading and its numbers."""

    heading: str
    chart: str
    table: Table


def speedup_panel(
    name: str, setting: Setting, tasks: Mapping[str, Sequence[Entry]], largest: float
) -> Panel | None:
    """None where no method but plain was measured."""
    methods = list(
        dict.fromkeys(e.series for some in tasks.values() for e in some if e.series.index)
    )
    if not methods:
        return None
    values = {
        method: [
            next((e.run.speedup_vs_plain for e in some if e.series == method), None)
            for some in tasks.values()
        ]
        for method in methods
    }
    rows = [[method.label, *map(number, values[method])] for method in methods]
    return Panel(
        heading=setting.label,
        chart=svg.speedups(
            name,
            alt(f"Speed-up over plain decoding, {setting.label}", rows, list(tasks)),
            list(tasks),
            [svg.Bars(series=method, values=values[method]) for method in methods],
            largest,
        ),
        table=Table(head=["Method", *tasks], rows=rows),
    )


def split_panel(name: str, task: str, setting: Setting, entries: Sequence[Entry]) -> Panel:
    parts = [[_per_token(entry.run, phase) for phase in PHASES] for entry in entries]
    labels = [entry.series.label for entry in entries]
    rows = [
        [entry.series.label, *map(number, [*part, sum(part), _per_pass(entry.run)])]
        for entry, part in zip(entries, parts, strict=True)
    ]
    head = [*PHASES, "together", "per pass of the batch"]
    about = f"Milliseconds per committed token by phase, {task}, {setting.label}"
    return Panel(
        heading=task,
        chart=svg.time_split(name, alt(about, rows, head), labels, parts),
        table=Table(head=["Method", *head], rows=rows),
    )


def _per_token(run: Run, phase: str) -> float:
    return 1000 * run.seconds[phase] / run.committed_tokens


def _per_pass(run: Run) -> float | None:
    return 1000 * run.seconds["total"] / run.forward_passes if run.forward_passes else None


def histogram_panel(name: str, task: str, setting: Setting, entries: Sequence[Entry]) -> Panel:
    lengths = [sorted(int(length) for length in entry.run.histogram) for entry in entries]
    largest = max(most[-1] for most in lengths)
    counts = [
        svg.Counts(
            series=entry.series,
            shares={n: entry.run.histogram[str(n)] / entry.run.verify_rounds for n in some},
            mean=entry.run.committed_tokens / entry.run.verify_rounds,
        )
        for entry, some in zip(entries, lengths, strict=True)
    ]
    head = [str(n) for n in range(1, largest + 1)]
    rows = [
        [one.series.label, *(percent(one.shares.get(n, 0)) for n in range(1, largest + 1))]
        for one in counts
    ]
    about = f"Share of rounds by tokens committed, {task}, {setting.label}"
    return Panel(
        heading=task,
        chart=svg.histograms(name, alt(about, rows, head), counts, largest),
        table=Table(head=["Tokens in a round", *head], rows=rows),
    )


def slots_panel(name: str, task: str, setting: Setting, entries: Sequence[Entry]) -> Panel:
    curves, rows = [], []
    for entry in entries:
        slots = entry.run.slot_acceptance
        shares = {kind: [slot[kind] for slot in slots] for kind in SHARES}
        reached = [slot["reached"] for slot in slots]
        curves.append(svg.Curve(series=entry.series, reached=reached, **shares))
    depth = max(len(curve.reached) for curve in curves)
    for curve in curves:
        blank = [""] * (depth - len(curve.reached))
        for kind, values in (
            ("unconditional", map(percent, curve.unconditional)),
            ("conditional", map(percent, curve.conditional)),
            ("rounds", map(str, curve.reached)),
        ):
            rows.append([f"{curve.series.label}, {kind}", *values, *blank])
    head = [str(position) for position in range(1, depth + 1)]
    about = f"Share of draft tokens kept by position, {task}, {setting.label}"
    return Panel(
        heading=task,
        chart=svg.slots(name, alt(about, rows, head), curves),
        table=Table(head=["Draft position", *head], rows=rows),
    )


def alt(about: str, rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """A chart in words: what it is, then every row's numbers."""
    said = (
        f"{row[0]}: " + ", ".join(f"{h} {v}" for h, v in zip(head, row[1:], strict=True) if v)
        for row in rows
    )
    return f"{about}. " + "; ".join(said) + "."


def number(value: float | None) -> str:
    """Two decimals below 100, none above; a dash where nothing was measured."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def percent(value: float | None) -> str:
    """Whole percents; a dash where nothing was counted."""
    return metrics.percent(value, "–")
