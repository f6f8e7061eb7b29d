"""What a round costs on this machine and how far drafts survive: measured once, kept in the user's cache.

Does not know how lengths are chosen from it (decode/length.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.core import Draft, DraftContext, SamplingParams
from paceline.data.fingerprint import fingerprint_of
from paceline.decode.length import (
    CostAware,
    Costs,
    Floats,
    Survival,
    confidences,
    isotonic,
    looked_at,
)
from paceline.decode.loop import run
from paceline.evaluate.costs import Progress, measure_costs
from paceline.evaluate.machine import environment
from paceline.evaluate.tasks import load_tasks
from paceline.gguf import cache_root
from paceline.pipeline import Pipeline

FORMAT = 3
TOKENS = 64  # of a calibration reply
BINS = 16
TYPICAL = 64  # blocks whose confidences are kept
_KEPT = ("paceline", "torch", "device", "device_name", "threads", "dtype")


class Named(Protocol):
    """A method as `evaluate.methods` parses it."""

    @property
    def text(self) -> str:
        """As the user wrote it."""

    @property
    def drafter(self) -> str:
        """Its kind."""

    @property
    def stages(self) -> tuple[tuple[str, str | None], ...]:
        """Names with their arguments."""

    def weights(self, target: Any) -> str | None:
        """A hash of the drafter's weights."""


def profile_key(target: Any, method: Named, accept: str) -> dict[str, Any]:
    """Everything that the figures depend on; stages that choose lengths do not count."""
    found = environment(target)
    stages = [":".join(filter(None, pair)) for pair in method.stages if pair[0] not in _LENGTHS]
    return {
        "format": FORMAT,
        **{name: found[name] for name in _KEPT},
        "target": asdict(fingerprint_of(target.name, target.tokenizer))["weights"],
        "drafter": method.drafter,
        "weights": method.weights(target),
        "stages": stages,
        "accept": accept,
    }


_LENGTHS = ("first", "length", "cost")


def profile_path(key: dict[str, Any]) -> Path:
    """Where the profile of a key lies."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "profile" / f"{name}.json"


def check_drafter(method: Named) -> None:
    """ValueError for a drafter whose drafts carry no logits: there is nothing to calibrate."""
    if method.drafter != "dflash":
        raise ValueError(
            f"{method.text}: only block drafters say how sure they are; name dflash[:FOLDER]"
        )


def cost_rule(target: Any, method: Named, accept: str) -> CostAware:
    """The cost-aware rule from the cached profile.

    Raises ValueError where there is none, naming the command that measures it, or it is damaged, and
    for a drafter that cannot have one.
    """
    check_drafter(method)
    key = profile_key(target, method, accept)
    path = profile_path(key)
    bare = "+".join([method.text.split("+")[0], *key["stages"]])
    command = _command(target, bare, accept)
    try:
        data = path.read_bytes()
        found = json.loads(data)
        if found["key"] != key:
            raise ValueError("its key is another one")
        if set(found["costs"]) != {field.name for field in fields(Costs)}:
            raise ValueError("its costs have other names")
        costs = Costs(**_tuples(found["costs"]))
        if costs.draft_warm_B is None:
            raise ValueError("draft_warm_B is missing")
        greedy, sampled = (Survival(**_tuples(found[name])) for name in ("greedy", "sampled"))
        if not (greedy.typical and sampled.typical):
            raise ValueError("typical is empty")
    except FileNotFoundError:
        raise ValueError(
            f"nothing is known of {bare} on this machine; measure it once: {command}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); measure again: {command}") from None
    return CostAware(
        costs=costs,
        greedy=greedy,
        sampled=sampled,
        base=accept == "rejection",
        profile=hashlib.sha256(data).hexdigest()[:16],
    )


def _command(target: Any, bare: str, accept: str) -> str:
    """What measures this method on this target as it runs, for a shell."""
    here = environment(target)
    options = {
        "target": target.name,
        "method": bare,
        "accept": accept,
        "dtype": here["dtype"],
        "device": target.device,  # with its number: another one may be another model
        "threads": here["threads"],
    }
    said = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in options.items())
    return f"paceline profile {said}"


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


def measure(
    pipeline: Pipeline, key: dict[str, Any], progress: Progress, *, limit: int | None = None
) -> dict[str, Any]:
    """Measure costs and calibrate survival; returns the profile as it is cached.

    ``pipeline`` has a drafter and no length stage; ``limit`` is the number of calibration prompts.
    """
    costs, spread = measure_costs(pipeline, progress)
    prompts = calibration_prompts(pipeline, limit)
    tables: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for at, (name, temperature) in enumerate((("greedy", 0.0), ("sampled", 1.0))):
        progress(f"calibrating, T {temperature:g}", at, 2)
        found = observe(pipeline, prompts, temperature)
        tables[name] = asdict(calibrate(found))
        errors[name] = calibration_error(found)
    progress("calibrated", 2, 2)
    figures = {"costs": asdict(costs), **tables, "calibration_error": errors}
    return {"key": key, **figures, "grid_error": spread}


def save(found: dict[str, Any]) -> Path:
    """Write a profile to the cache; it appears whole or not at all."""
    path = profile_path(found["key"])
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        work.write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")
        os.replace(work, path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise
    return path


def calibration_prompts(pipeline: Pipeline, limit: int | None) -> list[list[int]]:
    """The built-in prompts' first turns as the target's chat template has them."""
    (task,) = load_tasks(("builtin",), None, limit)
    prompts = []
    for question in task.questions:
        ids = pipeline.encode([dict(message) for message in question.turns[0]])
        if len(ids) + TOKENS <= pipeline.target.max_length:
            prompts.append(ids)
    return prompts


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One judged draft: the confidence of each of its slots, and how many were accepted."""

    request: int
    confidence: tuple[float, ...]
    accepted: int


class _Recorder:
    """A stage that changes nothing and writes down confidences."""

    name, law = "recorder", "keeps"

    def __init__(self, base: bool) -> None:
        self.base = base
        self.seen: dict[tuple[int, int], list[float]] = {}

    def __call__(self, draft: Draft, ctx: DraftContext) -> Draft:
        """The same draft."""
        if "ready" in draft.hints:
            found = confidences(looked_at(draft, self.base)).tolist()
            for i, b in enumerate(draft.hints["ready"]):
                row = ctx.rows[b]
                self.seen[row.request, len(row.rounds)] = found[i][: draft.sizes_B[b]]
        return draft


def observe(pipeline: Pipeline, prompts: Sequence[list[int]], temperature: float) -> list[Seen]:
    """Decode the prompts with whole blocks; what was judged in each round, last rounds left out."""
    recorder = _Recorder(base=pipeline.accept == "rejection")
    watched = replace(pipeline, stages=(*pipeline.stages, recorder))
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i)
        for i in range(len(prompts))
    ]
    rows = watched.rows(prompts, params)
    for _ in run(watched.session(8), rows):
        pass
    found = []
    for row in rows:
        for at, done in enumerate(row.rounds[:-1]):  # the last one may be trimmed
            line = recorder.seen.get((row.request, at), [])[: done.drafted]
            if line:
                seen = Seen(request=row.request, confidence=tuple(line), accepted=done.accepted)
                found.append(seen)
    if not found:
        raise ValueError("no draft was judged on the calibration prompts: nothing to calibrate")
    return found


def calibrate(found: Iterable[Seen]) -> Survival:
    """Chance of acceptance by confidence, slot by slot; a slot seldom reached has the one before's."""
    some = list(found)
    slots = max(len(seen.confidence) for seen in some)
    xs: list[tuple[float, ...]] = []
    ys: list[tuple[float, ...]] = []
    for k in range(slots):
        reached = [s for s in some if len(s.confidence) > k and s.accepted >= k]
        if len(reached) < 2 * BINS:
            if not xs:  # too little of everything: one curve through all there is
                reached = reached or some
            else:
                xs.append(xs[-1])
                ys.append(ys[-1])
                continue
        x, y, count = _binned(
            np.array([s.confidence[k] for s in reached]),
            np.array([float(s.accepted > k) for s in reached]),
        )
        xs.append(tuple(x.tolist()))
        ys.append(tuple(isotonic(x, y, count).clip(0.01, 0.99).tolist()))
    whole = [seen.confidence for seen in some if len(seen.confidence) == slots]
    at = np.linspace(0, len(whole) - 1, min(TYPICAL, len(whole))).round().astype(int)
    return Survival(confidence=tuple(xs), accepted=tuple(ys), typical=tuple(whole[i] for i in at))


def _binned(confidence: Floats, accepted: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean confidence, mean acceptance and size of bins of about equal size; ties share a bin."""
    order = np.argsort(confidence, kind="stable")
    edges = np.quantile(confidence, np.linspace(0, 1, BINS + 1)[1:-1])
    at = np.searchsorted(np.unique(edges), confidence[order], side="left")
    _, starts = np.unique(at, return_index=True)
    counts = np.diff([*starts, len(order)]).astype(float)
    x, y = (np.add.reduceat(v[order], starts) / counts for v in (confidence, accepted))
    return x, y, counts


def calibration_error(found: Sequence[Seen]) -> list[float]:
    """Expected calibration error of survival, slot by slot: fitted on half of the requests, seen on
    the others."""
    fitted = calibrate([s for s in found if s.request % 2 == 0] or found)
    others = [s for s in found if s.request % 2 == 1] or list(found)
    slots = max(len(s.confidence) for s in others)
    whole = [s for s in others if len(s.confidence) == slots]
    survival: Floats = fitted(np.array([s.confidence for s in whole]))
    errors = []
    for k in range(slots):
        truth = np.array([float(s.accepted > k) for s in whole])
        order = np.argsort(survival[:, k], kind="stable")
        parts = np.array_split(order, min(10, len(order)))
        gaps = [abs(survival[p, k].mean() - truth[p].mean()) * len(p) for p in parts if len(p)]
        errors.append(float(sum(gaps) / len(whole)))
    return errors
