"""Acceptance per position from an engine's metrics page, as vLLM exports it (Prometheus text).

Does not know verdicts. Counters run from the server's start: two scrapes give what lies between them.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.evaluate.preflight import Domain

_LINE = re.compile(
    r"""^(?P<name>[\w:]+)\s*(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(?P<value>\S+)"""
)
_LABEL = re.compile(r"""([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)\"""")
_ROUNDS = "vllm:spec_decode_num_drafts"
_SLOTS = "vllm:spec_decode_num_accepted_tokens_per_pos"
Counters = tuple[float, dict[int, float]]
"""(rounds that drafted, accepted drafts by 0-based position)."""


def read_counters(path: Path) -> Counters:
    """The counters of one scrape, the engines of one model summed up; lines of other metrics are skipped.

    Raises ValueError naming the file and line for what is no count, for missing counters, and for more
    models than one: their drafters are not the same.
    """
    rounds: float | None = None
    slots: dict[int, float] = {}
    models: set[str] = set()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # labels may hold any other line break
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        found = _LINE.match(line.strip())
        name = found["name"].removesuffix("_total") if found is not None else ""
        if found is None or name not in (_ROUNDS, _SLOTS):
            continue
        labels = dict(_LABEL.findall(found["labels"] or ""))
        models.add(labels.get("model_name", ""))
        value = _number(path, number, found["value"])
        if name == _ROUNDS:
            rounds = (rounds or 0.0) + value
            continue
        place = labels.get("position", "")
        if not place.isdecimal():
            raise ValueError(f"{path}, line {number}: {_SLOTS} without a position")
        slots[int(place)] = slots.get(int(place), 0.0) + value
    if rounds is None or not slots:
        raise ValueError(
            f"{path}: no {_ROUNDS if rounds is None else _SLOTS}; scrape /metrics of an engine that "
            "serves with a drafter"
        )
    if len(models) > 1:
        raise ValueError(
            f"{path}: several models ({', '.join(sorted(models))}); keep the lines of one model_name"
        )
    if sorted(slots) != list(range(len(slots))):
        raise ValueError(
            f"{path}: {_SLOTS} lacks positions below {max(slots)}: found {sorted(slots)}"
        )
    return rounds, slots


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{path}, line {line}: {text!r} is no count")
    return value


def domain_of_counters(name: str, last: Counters, first: Counters | None = None) -> Domain:
    """The histogram of all rounds, or of those behind an earlier scrape. Requests are not known.

    Raises ValueError for counters that run backwards, as after a restart, or that cannot be.
    """
    rounds, slots = last
    if first is not None:
        if set(first[1]) != set(slots):
            raise ValueError("the two scrapes have different numbers of positions")
        rounds -= first[0]
        slots = {k: value - first[1][k] for k, value in slots.items()}
    chain = [rounds, *(slots[k] for k in range(len(slots)))]
    if min(chain) < 0:
        raise ValueError(
            "a counter is smaller in the later scrape: the engine was restarted, or the files are swapped"
        )
    if any(a < b for a, b in zip(chain, chain[1:], strict=False)):
        raise ValueError(
            "more drafts were accepted at a position than reached it: not one drafter's"
        )
    kept = [round(a - b) for a, b in zip(chain, [*chain[1:], 0.0], strict=True)]
    return Domain(name=name, requests=0, looping=0, unfinished=0, kept_n=tuple(kept))
