"""The names of `--methods`: a drafter, what picks it, and stages, as one pipeline each.

Knows nothing about tasks or measuring.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.api import DEFAULT_DRAFTERS, load_drafter, packaged_drafters, packaged_with
from paceline.core import Drafter, Stage
from paceline.data.fingerprint import fingerprint_of, target_folder
from paceline.decode.length import CostAware, Cut, First
from paceline.decode.pace import Sparing
from paceline.drafters.length import AdaLength
from paceline.drafters.refine import Refine
from paceline.evaluate.profile import cost_rule
from paceline.pipeline import Pipeline, check_accept


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a stage is made for: the pipeline so far."""

    target: Any
    drafter: Drafter | None
    accept: str
    method: Method
    stages: tuple[Stage, ...] = ()


StageFactory = Callable[[str | None, Parts], Stage]


def _refine(kind: str) -> StageFactory:
    def make(argument: str | None, parts: Parts) -> Stage:
        sweeps = None if argument is None else _count(f"{kind}:{argument}", argument)
        samples = parts.accept == "rejection"
        return Refine(parts.drafter, kind, sweeps=sweeps, samples=samples)

    return make


def _count(text: str, argument: str) -> int:
    try:
        return int(argument)
    except ValueError:
        raise ValueError(f"{text}: {argument!r} is no whole number") from None


def _first(argument: str | None, parts: Parts) -> Stage:
    if argument is None:
        raise ValueError("first needs a number of drafts: first:N")
    return Cut(First(_count(f"first:{argument}", argument)))


def _length(argument: str | None, parts: Parts) -> Stage:
    try:
        rate = 1.3 if argument is None else float(argument)
    except ValueError:
        raise ValueError(f"length:{argument}: {argument!r} is no number") from None
    return Cut(AdaLength(parts.drafter, rate))


def _cost(argument: str | None, parts: Parts) -> Stage:
    if argument is not None:
        raise ValueError(f"cost takes nothing after ':'; got {argument!r}")
    return Cut(cost_rule(parts.target, parts.method, parts.accept))


def _block(argument: str | None, parts: Parts) -> Stage:
    """No stage: `Method.pipeline` loads the drafter with it and takes it out."""
    raise AssertionError("block is the drafter's")


REFINERS = ("xpress", "markov")
STAGES: dict[str, StageFactory] = {
    **{kind: _refine(kind) for kind in REFINERS},
    "block": _block,
    "first": _first,
    "length": _length,
    "cost": _cost,
}
"""Stages by name: ``factory(argument, parts)``."""

DRAFTERS = ("plain", "ngram", "dflash", "model")
SEPARATORS = "(',' parts methods and '+' parts stages: a path with either must be renamed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """``drafter[:choice][+stage[:argument]]...``, as the user wrote it."""

    text: str
    drafter: str
    choice: str | None
    stages: tuple[tuple[str, str | None], ...]

    @property
    def name(self) -> str:
        """What tables call it: of an absolute path only the last two folders."""
        choice = self.choice
        if choice is not None and Path(choice).is_absolute():
            choice = "/".join(Path(choice).parts[-2:])
        parts = [(self.drafter, choice), *self.stages]
        return "+".join(name if of is None else f"{name}:{of}" for name, of in parts)

    @property
    def block_size(self) -> int | None:
        """Another block than the drafter's folder says: ``+block:N``."""
        return next((int(str(of)) for name, of in self.stages if name == "block"), None)

    def source(self, target: Any) -> str:
        """What ``api.load_drafter`` calls this drafter."""
        if self.drafter == "plain":
            return "none"
        if self.drafter == "model":
            return f"model:{self.choice}"
        if self.drafter == "dflash" and self.choice is None:
            if target.name not in DEFAULT_DRAFTERS:
                raise ValueError(
                    f"no drafter is packaged for target {target.name!r}; use dflash:FOLDER"
                )
            heads = [name for name, _ in self.stages if name in REFINERS]
            return packaged_with(DEFAULT_DRAFTERS[target.name], heads)
        if self.choice is not None and self.choice not in packaged_drafters():
            return str(
                Path(self.choice).absolute()
            )  # a folder called ngram is not the ngram drafter
        return self.choice or self.drafter

    def weights(self, target: Any) -> str | None:
        """Short hash of the drafter's weights and its config.json; None for a drafter without any.

        The config counts: the same tensors draft otherwise with another block size or other taps.
        """
        source = self.source(target).removeprefix("model:")
        if self.drafter in ("plain", "ngram"):
            return None
        source = str(packaged_drafters().get(source, source))
        folder = target_folder(source)
        if folder is None:
            raise ValueError(f"{self.text}: the drafter's files are not found, so it has no hash")
        digest = hashlib.sha256(f"{fingerprint_of(source, None).weights}".encode())
        digest.update((folder / "config.json").read_bytes())
        return digest.hexdigest()[:16]

    def describe(self, target: Any, accept: str = "match") -> dict[str, Any]:
        """The method as it stands in the bench's JSON; `cost` with a hash of what was measured."""
        stages = [name for name, _ in self.stages]
        found: dict[str, Any] = {
            "name": self.name,
            "drafter": self.drafter,
            "stages": stages,
            "weights": self.weights(target),
            "accept": "match" if self.drafter == "plain" else accept,
        }
        if "cost" in stages:
            found["profile"] = cost_rule(target, self, accept).profile
        return found

    def pipeline(self, target: Any, accept: str = "match") -> Pipeline:
        """Load the drafter and the stages.

        With ``accept="rejection"`` drafts are sampled: by the first stage if that draws anew.
        """
        if self.drafter == "plain":
            check_accept(accept)
            return Pipeline(target=target)
        real = [stage for stage in self.stages if stage[0] != "block"]
        anew = bool(real) and real[0][0] in REFINERS
        samples = accept == "rejection" and not anew
        drafter: Drafter | None = load_drafter(
            self.source(target), target, samples=samples, block_size=self.block_size
        )
        parts = Parts(target=target, drafter=drafter, accept=accept, method=self)
        for name, argument in real:
            stage = STAGES[name](argument, parts)
            parts = replace(parts, stages=(*parts.stages, stage))
        for stage in parts.stages:
            if drafter is not None and isinstance(stage, Cut) and isinstance(stage.rule, CostAware):
                drafter = Sparing(drafter, stage.rule)  # perhaps nothing should be drafted
        return Pipeline(target=target, drafter=drafter, accept=accept, stages=parts.stages)


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Methods in the order given, ``plain`` always first: it is the baseline.

    Raises:
        ValueError: an unknown drafter or stage (with the nearest name), a drafter without or with a
            choice it cannot have, a method named twice.
    """
    methods = [parse_method("plain"), *(parse_method(text) for text in texts if text != "plain")]
    names = [method.name for method in methods]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"two methods would be called {', '.join(twice)}; name each once, or rename a folder"
        )
    return methods


def parse_method(text: str) -> Method:
    """One method; ValueError says what is wrong with it."""
    first, *rest = text.split("+")
    drafter, choice = _pair(text, first)
    if drafter not in DRAFTERS:
        raise ValueError(f"no method {drafter!r}; {_nearest(drafter, DRAFTERS)} {SEPARATORS}")
    stages = tuple(_pair(text, part) for part in rest)
    for name, _ in stages:
        if name not in STAGES:
            hint = "" if choice is None else f" {SEPARATORS}"
            raise ValueError(f"no stage {name!r} in {text!r}; {_nearest(name, STAGES)}{hint}")
    if choice is None and drafter == "model":
        raise ValueError("model needs the smaller model: model:NAME")
    if choice is not None and drafter in ("plain", "ngram"):
        raise ValueError(f"{drafter} takes nothing after ':'; got {text!r}")
    for name, of in stages:
        if name == "block" and (of is None or not of.isdecimal() or int(of) < 2):
            raise ValueError(
                f"{text!r}: block needs its size, the anchor included and at least 2: block:N"
            )
    _check_order(text, [name for name, _ in stages if name != "block"])
    if [name for name, _ in stages].count("block") > 1 or "block" in [n for n, _ in stages[1:]]:
        raise ValueError(f"{text!r}: block belongs to the drafter: name it once and first")
    if drafter != "dflash" and stages and stages[0][0] == "block":
        raise ValueError(f"{drafter} drafts no blocks, so it has no block size; got {text!r}")
    if drafter == "plain" and stages:
        raise ValueError(f"plain decoding has no stages; got {text!r}")
    if drafter == "dflash" and choice is not None:
        if choice not in packaged_drafters() and not (Path(choice) / "config.json").is_file():
            known = ", ".join(packaged_drafters()) or "none"
            raise ValueError(
                f"{text!r}: neither a folder with config.json nor a packaged drafter ({known}) "
                f"{SEPARATORS}"
            )
    return Method(text=text, drafter=drafter, choice=choice, stages=stages)


def _check_order(text: str, names: Sequence[str]) -> None:
    """ValueError for stages that would undo or repeat each other: a refiner, cuts, `cost` at last."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{text!r} has {', '.join(twice)} twice; name each stage once")
    if len(refiners := [name for name in names if name in REFINERS]) > 1:
        raise ValueError(f"{text!r}: {' and '.join(refiners)} refine the same block; take one")
    if refiners and names[0] != refiners[0]:
        raise ValueError(f"{text!r}: {names[0]} judges the refined block; name {refiners[0]} first")
    if "cost" in names and names[-1] != "cost":
        raise ValueError(f"{text!r}: cost chooses among what the others leave; name it last")


def _pair(text: str, part: str) -> tuple[str, str | None]:
    name, colon, argument = part.partition(":")
    if not name or (colon and not argument):
        raise ValueError(f"method {text!r}: write drafter[:choice][+stage[:argument]]")
    return name, argument if colon else None


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none yet'}"
