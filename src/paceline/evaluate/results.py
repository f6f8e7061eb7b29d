"""Reads the files that `paceline bench` writes, and refuses what does not match their schema.

Does not know how the figures were measured, nor what becomes of them. What follows from other figures
is computed again: a number that was changed by hand does not get onto a page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.evaluate.metrics import quotient, ratio

NAME, VERSION = "paceline-bench", 2
LONGEST = 4096  # tokens in one round; nothing drafts more, and a chart must end somewhere
TOLERANCE = 1e-6  # of a figure that follows from others
PHASES = ("draft", "refine", "verify", "accept", "commit")
SHARES = ("unconditional", "conditional")
BASELINE = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Maybe:
    """A value of this kind, or null where nothing was measured."""

    kind: Any


# Kinds: str, int (a count), float (any finite number from 0 on), a dict of required keys, a list
# with the kind of its entries, Mapping[str, kind] as {str: kind}. Other keys may stand beside them.
_RATIO = Maybe(kind=float)
_SLOT = ("position", "drafted", "reached", "accepted")
_RUN = {
    "method": str,
    "task": str,
    "category": Maybe(kind=str),
    "batch_size": int,
    "temperature": float,
    "requests": int,
    "verify_rounds": int,
    "drafted_tokens": int,
    "accepted_drafts": int,
    "committed_tokens": int,
    "acceptance_length_pooled": _RATIO,
    "acceptance_length_request_mean": _RATIO,
    "acceptance_length_full_bonus": _RATIO,
    "verified_per_committed": _RATIO,
    "histogram": {str: int},
    "slot_acceptance": [dict.fromkeys(_SLOT, int) | dict.fromkeys(SHARES, _RATIO)],
    "seconds": {name: float for name in (*PHASES, "total")},
    "forward_passes": float,
    "rows_per_pass": _RATIO,
    "unfilled_requests": int,
    "tokens_per_second": _RATIO,
    "speedup_vs_plain": _RATIO,
    "speedup_median": _RATIO,
    "speedup_end_to_end": _RATIO,
    "chunks": int,
    "measurements": int,
    "identical_to_plain": int,
    "near_ties": int,
    "bugs": int,
    "looping_share": _RATIO,
    "without_loops": {
        "requests": int,
        "verify_rounds": int,
        "committed_tokens": int,
        "acceptance_length_pooled": _RATIO,
        "speedup_vs_plain": _RATIO,
    },
}
_FILE = {
    "environment": {
        **dict.fromkeys(("device", "device_name", "machine", "torch", "dtype"), str),
        "threads": int,
        "commit": Maybe(kind=str),
    },
    "target": {"name": str},
    "arguments": {"max_new_tokens": int},
    "methods": [{"name": str, "weights": Maybe(kind=str)}],
    "tasks": [{"name": str, "requests": int, "fingerprint": str}],
    "runs": [_RUN],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One entry of ``runs``; names and units are those of docs/bench.md."""

    method: str
    task: str
    category: str | None
    batch_size: int
    temperature: float
    requests: int
    verify_rounds: int
    drafted_tokens: int
    committed_tokens: int
    acceptance_length_pooled: float | None
    acceptance_length_request_mean: float | None
    acceptance_length_full_bonus: float | None
    verified_per_committed: float | None
    histogram: Mapping[str, int]
    slot_acceptance: Sequence[Mapping[str, Any]]
    seconds: Mapping[str, float]
    forward_passes: float
    rows_per_pass: float | None
    unfilled_requests: int
    tokens_per_second: float | None
    speedup_vs_plain: float | None
    speedup_median: float | None
    speedup_end_to_end: float | None
    chunks: int
    measurements: int
    identical_to_plain: int
    near_ties: int
    bugs: int
    looping_share: float | None
    without_loops: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One bench file. ``weights`` and ``prompts`` map method and task names to short hashes."""

    file: str  # its name without folders: pages are sent to other people
    environment: Mapping[str, Any]
    target: Mapping[str, Any]
    arguments: Mapping[str, Any]
    tasks: Sequence[Mapping[str, Any]]
    weights: Mapping[str, str | None]
    prompts: Mapping[str, str]
    runs: Sequence[Run]


def read_bench(path: Path) -> Bench:
    """Read and check one file; ValueError names the file and the key, OSError where unreadable."""
    raw = read_schema(path, {NAME: VERSION})
    try:
        check(raw, _FILE, "")
        _check_sums(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    names = [field.name for field in fields(Run)]
    return Bench(
        file=path.name,
        environment=raw["environment"],
        target=raw["target"],
        arguments=raw["arguments"],
        tasks=raw["tasks"],
        weights={method["name"]: method["weights"] for method in raw["methods"]},
        prompts={task["name"]: task["fingerprint"] for task in raw["tasks"]},
        runs=[Run(**{name: run[name] for name in names}) for run in raw["runs"]],
    )


def read_schema(path: Path, known: Mapping[str, int]) -> dict[str, Any]:
    """A JSON file of one of these schemas (name -> version); ValueError names the file otherwise."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    name = str(schema.get("name")) if isinstance(schema, dict) else ""
    if not isinstance(raw, dict) or not isinstance(schema, dict) or name not in known:
        commands = " or ".join(each.replace("-", " ") for each in known)
        raise ValueError(
            f"{path}: schema.name is not {' or '.join(map(repr, known))}; give files that {commands} "
            "wrote (--json)"
        )
    if schema.get("version") != known[name]:
        raise ValueError(
            f"{path}: schema.version is {schema.get('version')!r}, and this paceline reads "
            f"{known[name]}; run the command again, or use the paceline that wrote the file"
        )
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def check(value: Any, kind: Any, where: str) -> None:
    """Raise ValueError with the key's path where ``value`` is not of ``kind``."""
    if isinstance(kind, Maybe):
        if value is not None:
            check(value, kind.kind, where)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, found {_found(value)}")
        for i, entry in enumerate(value):
            check(entry, kind[0], f"{where}[{i}]")
    elif isinstance(kind, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, found {_found(value)}")
        wanted = dict.fromkeys(value, kind[str]) if str in kind else kind
        for key, inner in wanted.items():
            path = f"{where}.{key}" if where else key
            if key not in value:
                raise ValueError(f"{path}: missing")
            check(value[key], inner, path)
    elif kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{where}: expected text, found {_found(value)}")
    else:
        number = isinstance(value, int if kind is int else int | float)
        if not number or isinstance(value, bool) or value < 0 or not math.isfinite(value):
            name = "a count" if kind is int else "a number from 0 on"
            raise ValueError(f"{where}: expected {name}, found {_found(value)}")


def _found(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _check_sums(raw: dict[str, Any]) -> None:
    """What adds up in every honest file; a file edited by hand, or mixed from two, fails here."""
    if not raw["runs"]:
        raise ValueError("runs: empty, nothing was measured")
    names = {key: {entry["name"] for entry in raw[key]} for key in ("methods", "tasks")}
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    for i, run in enumerate(raw["runs"]):
        for singular, known in (("method", names["methods"]), ("task", names["tasks"])):
            if run[singular] not in known:
                raise ValueError(f"runs[{i}].{singular}: {run[singular]!r} is not in {singular}s")
        key = (run["method"], *_place(run))
        if key in runs:
            raise ValueError(f"runs[{i}]: a second run of {', '.join(map(str, key))}")
        runs[key] = run
        _check_run(run, f"runs[{i}]")
    for i, run in enumerate(raw["runs"]):
        plain = runs.get((BASELINE, *_place(run)))
        if plain is None:
            raise ValueError(f"runs[{i}]: {BASELINE} was not measured beside it")
        faster = quotient(run["tokens_per_second"], plain["tokens_per_second"])
        agree(f"runs[{i}].speedup_vs_plain", run["speedup_vs_plain"], faster)


def _place(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("task", "category", "batch_size", "temperature"))


def agree(where: str, found: float | None, wanted: float | None) -> None:
    """Raise ValueError where a figure is not what the sums beside it make."""
    same = found is None if wanted is None else found is not None
    if not same or (
        found is not None and wanted is not None and abs(found - wanted) > TOLERANCE * abs(wanted)
    ):
        raise ValueError(f"{where}: {_found(found)}, but the sums beside it make {_found(wanted)}")


def _check_run(run: Mapping[str, Any], where: str) -> None:
    """One run's sums and the ratios that follow from them."""
    if not all(key.isdecimal() and key == str(int(key)) != "0" for key in run["histogram"]):
        raise ValueError(f"{where}.histogram: keys must be counts from 1 on")
    rounds = {int(length): count for length, count in run["histogram"].items()}
    if max(rounds, default=0) > LONGEST:
        raise ValueError(f"{where}.histogram: {max(rounds)} tokens in a round; at most {LONGEST}")
    slots = run["slot_acceptance"]
    if [slot["position"] for slot in slots] != list(range(1, len(slots) + 1)):
        raise ValueError(f"{where}.slot_acceptance: positions must be 1, 2, ... without gaps")
    for name, total, of in (
        ("verify_rounds", sum(rounds.values()), "histogram"),
        ("committed_tokens", sum(n * count for n, count in rounds.items()), "histogram"),
        ("drafted_tokens", sum(slot["drafted"] for slot in slots), "slot_acceptance"),
        ("accepted_drafts", sum(slot["accepted"] for slot in slots), "slot_acceptance"),
    ):
        if run[name] != total:
            raise ValueError(f"{where}.{name}: {run[name]}, but the {of} has {total}")
    kinds = ("identical_to_plain", "near_ties", "bugs", "other_draws")
    if sum(run.get(kind, 0) for kind in kinds) != run["requests"]:
        raise ValueError(f"{where}.requests: not the sum of {', '.join(kinds)}")
    shares = [slot[name] for slot in slots for name in SHARES]
    if any(share is not None and share > 1 for share in [*shares, run["looping_share"]]):
        raise ValueError(f"{where}: slot_acceptance or looping_share is a share above 1")
    seconds, kept = run["seconds"], run["without_loops"]
    tokens, count = run["committed_tokens"], run["verify_rounds"]
    for name, found, wanted in (
        ("acceptance_length_pooled", run["acceptance_length_pooled"], ratio(tokens, count)),
        (
            "acceptance_length_full_bonus",
            run["acceptance_length_full_bonus"],
            ratio(run["accepted_drafts"] + count, count),
        ),
        ("seconds.total", seconds["total"], sum(seconds[phase] for phase in PHASES)),
        ("tokens_per_second", run["tokens_per_second"], quotient(tokens, seconds["total"])),
        (
            "without_loops.acceptance_length_pooled",
            kept["acceptance_length_pooled"],
            ratio(kept["committed_tokens"], kept["verify_rounds"]),
        ),
    ):
        agree(f"{where}.{name}", found, wanted)
