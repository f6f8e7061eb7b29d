"""The report's page of a preflight: verdicts, figures and charts from the JSON that the command wrote.

Does not judge anything again; what follows from the histogram is checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.evaluate import svg
from paceline.evaluate.preflight import SCHEMA, Domain
from paceline.evaluate.report_panels import Panel, Table, alt, number, percent
from paceline.evaluate.results import Maybe, agree, check, read_schema

_DOMAIN = {
    "domain": str,
    "requests": int,
    "looping_share": Maybe(kind=float),
    "unfinished_share": Maybe(kind=float),
    "histogram": [int],
    "survival": [float],
    "conditional": [Maybe(kind=float)],
    "verdict": str,
    "sentence": str,
    "rounds": int,
    "accepted_drafts_per_round": Maybe(kind=float),
    "ceiling": float,
    "stranded_drafts": float,
}
_FILE = {"arguments": {}, "block_size": int, "longer_block": int, "domains": [_DOMAIN]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """One preflight file as the page shows it; ``speeds`` by domain, empty where nothing was timed."""

    file: str
    arguments: Mapping[str, Any]
    block_size: int
    longer_block: int
    domains: Sequence[Mapping[str, Any]]
    speeds: Sequence[Sequence[float | None]]
    legend: Sequence[svg.Series]
    histogram: Panel
    slots: Panel | None


def read_preflight(path: Path, name: str) -> Preflight:
    """Read, check and draw one file; ``name`` is unique in the page.

    Raises ValueError naming file and key for what is missing, of another kind, or at odds with the
    histogram beside it.
    """
    raw = read_schema(path, dict([SCHEMA]))
    try:
        check(raw, _FILE, "")
        if raw["block_size"] < 2 or not raw["domains"]:
            raise ValueError("block_size or domains: nothing was counted")
        if raw["longer_block"] <= raw["block_size"]:
            raise ValueError(f"longer_block: {raw['longer_block']} is not longer")
        if "target" in raw["arguments"]:
            check(raw["arguments"]["target"], str, "arguments.target")
        for i, one in enumerate(raw["domains"]):
            _check_domain(one, raw["block_size"], raw["longer_block"], f"domains[{i}]")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    names = ("speed", "best_speed", "longer_speed")
    legend = [svg.Series(label=one["domain"], index=i) for i, one in enumerate(raw["domains"], 1)]
    timed = any(one.get("speed") for one in raw["domains"])
    return Preflight(
        file=path.name,
        arguments=raw["arguments"],
        block_size=raw["block_size"],
        longer_block=raw["longer_block"],
        domains=raw["domains"],
        speeds=[[one.get(key) for key in names] if timed else [] for one in raw["domains"]],
        legend=legend,
        histogram=_histogram(f"{name}-rounds", raw["domains"], legend, raw["block_size"]),
        slots=_slots(f"{name}-slots", raw["domains"], legend, raw["block_size"]),
    )


def _check_domain(one: Mapping[str, Any], block: int, longer: int, where: str) -> None:
    """The figures that follow from a histogram are its own, and shares are none above 1."""
    for key, size in (("histogram", block), ("survival", block - 1), ("conditional", block - 1)):
        if len(one[key]) != size:
            raise ValueError(
                f"{where}.{key}: {len(one[key])} entries, a block of {block} has {size}"
            )
    for key in ("speed", "best_speed", "longer_speed"):
        check(one.get(key), Maybe(kind=float), f"{where}.{key}")
    for key in ("looping_share", "unfinished_share"):
        if (one[key] or 0) > 1:
            raise ValueError(f"{where}.{key}: {one[key]} is a share above 1")
    counts = tuple(one["histogram"])
    mine = Domain(name="", requests=0, looping=0, unfinished=0, kept_n=counts)
    agree(f"{where}.rounds", one["rounds"], mine.rounds)
    agree(f"{where}.ceiling", one["ceiling"], mine.ceiling)
    agree(f"{where}.accepted_drafts_per_round", one["accepted_drafts_per_round"], mine.accepted)
    agree(f"{where}.stranded_drafts", one["stranded_drafts"], mine.stranded(longer - block))
    for key, wanted in (("survival", mine.survival), ("conditional", mine.conditional)):
        for k, (share, its) in enumerate(zip(one[key], wanted, strict=True)):
            agree(f"{where}.{key}[{k}]", share, its)


Domains = Sequence[Mapping[str, Any]]


def _histogram(name: str, domains: Domains, legend: Sequence[svg.Series], block: int) -> Panel:
    counts = [
        svg.Counts(
            series=series,
            shares={n + 1: c / max(1, one["rounds"]) for n, c in enumerate(one["histogram"])},
            mean=1 + (one["accepted_drafts_per_round"] or 0.0),
        )
        for one, series in zip(domains, legend, strict=True)
    ]
    head = [str(n) for n in range(1, block + 1)]
    rows = [[c.series.label, *(percent(c.shares[n]) for n in range(1, block + 1))] for c in counts]
    about = f"Share of rounds by tokens committed; {block} is a whole block and the bonus token"
    return Panel(
        heading="Tokens committed in a round",
        chart=svg.histograms(name, alt(about, rows, head), counts, block),
        table=Table(head=["Domain", *head], rows=rows),
    )


def _slots(name: str, domains: Domains, legend: Sequence[svg.Series], block: int) -> Panel | None:
    """None where no domain had a round."""
    curves, rows = [], []
    for one, series in zip(domains, legend, strict=True):
        if one["rounds"]:
            chain = [1.0, *one["survival"][:-1]]
            curves.append(
                svg.Curve(
                    series=series,
                    unconditional=one["survival"],
                    conditional=one["conditional"],
                    reached=[round(one["rounds"] * share) for share in chain],
                )
            )
            rows.append([one["domain"], *map(number, one["conditional"])])
    if not curves:
        return None
    head = [str(k) for k in range(1, block)]
    about = "Share of drafts accepted by slot, of those that were reached"
    return Panel(
        heading="Drafts accepted by slot",
        chart=svg.slots(name, alt(about, rows, head), curves),
        table=Table(head=["Domain", *head], rows=rows),
    )
