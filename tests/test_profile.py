"""Costs and survival as the profile measures them, and the stage that reads them."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import new_row
from paceline.cli.profile import show
from paceline.core import Draft, DraftContext, SamplingParams
from paceline.decode.length import CostAware, Costs, Cut, Survival
from paceline.decode.pace import Sparing, SparingState
from paceline.evaluate import costs as grid
from paceline.evaluate import profile
from paceline.evaluate.methods import parse_method
from paceline.evaluate.profile import Seen, calibrate, calibration_error, cost_rule, profile_path
from paceline.pipeline import _RULES, Pipeline
from test_drafters import dflash
from tiny import tiny_target


@dataclass(frozen=True)
class Tiny:
    """A method that needs no files."""

    text: str = "dflash:x+cost"
    drafter: str = "dflash"
    stages: tuple[tuple[str, str | None], ...] = (("cost", None),)

    def weights(self, target: Any) -> str | None:
        return "abc"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(grid, "CONTEXTS", (4, 8, 16))
    monkeypatch.setattr(grid, "ROWS", (1, 2, 4))
    monkeypatch.setattr(grid, "REPEATS", 2)
    monkeypatch.setattr(profile, "TOKENS", 12)
    kinds = {"weights": "w", "tokenizer": None, "template": None}
    fingerprint = type("F", (), {"__dataclass_fields__": {}})
    monkeypatch.setattr(profile, "fingerprint_of", lambda name, tokenizer: fingerprint())
    monkeypatch.setattr(
        profile, "asdict", lambda v: kinds if isinstance(v, fingerprint) else _dict(v)
    )
    return tmp_path


_dict = profile.asdict


def test_a_profile_is_measured_kept_and_read(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target()
    target.name = "tiny"
    pipeline = Pipeline(target=target, drafter=dflash(target))
    prompts = [list(range(3, 8 + i)) for i in range(6)]
    monkeypatch.setattr(profile, "calibration_prompts", lambda pipeline, limit: prompts)
    key = profile.profile_key(target, Tiny(), "match")
    moves: list[str] = []
    with pytest.raises(ValueError, match="paceline profile --target tiny --method dflash:x"):
        cost_rule(target, Tiny(), "match")
    found = profile.measure(pipeline, key, lambda what, done, total: moves.append(what))
    path = profile.save(found)
    assert path.parent == here / "profile" and moves[-1] == "calibrated"
    assert json.loads(path.read_text())["key"] == key
    costs = found["costs"]
    assert costs["rows_B"] == (1, 2, 4) and costs["drafts_N"][-1] == 4
    assert all(s > 0 for line in costs["verify_BN"] for s in line)
    show(json.loads(path.read_text()))
    shown = " ".join(capsys.readouterr().out.split())
    assert "calibration error" in shown
    assert all(name in shown for name in ("greedy", "T 1"))  # headings may be folded
    for name in ("node_greedy", "node_warm"):
        assert f"{1e6 * costs[name]:.1f}" in shown
    assert "us per scored node" in shown

    rule = cost_rule(target, Tiny(), "match")
    staged = Pipeline(target=target, drafter=Sparing(dflash(target), rule), stages=(Cut(rule),))
    params = [SamplingParams(max_tokens=10, temperature=t, seed=1) for t in (0.0, 1.0, 0.0)]
    plain = pipeline.plain().generate(prompts[:3], params)
    quick = staged.generate(prompts[:3], params)
    for one, other in zip(plain, quick, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert cost_rule(target, Tiny(), "match").law == "chooses"

    other = profile.profile_key(target, Tiny(), "rejection")
    assert profile_path(other) != path
    path.write_text("{")
    with pytest.raises(ValueError, match=rf"{path.name} is damaged"):
        cost_rule(target, Tiny(), "match")


def test_calibration_finds_how_often_drafts_hold() -> None:
    """Confidence 0.9 holds 70 of 100 times, 0.2 holds 10; a slot that is never reached copies."""
    rng, found = np.random.default_rng(0), []
    for request in range(2000):
        sure = rng.random() < 0.5
        confidence = 0.9 if sure else 0.2
        first = rng.random() < (0.7 if sure else 0.1)
        second = first and rng.random() < 0.5
        accepted = int(first) + int(second)
        found.append(Seen(request=request, confidence=(confidence, 0.5, 0.5), accepted=accepted))
    survival = calibrate(found)
    got = survival(np.array([[0.9, 0.5, 0.5], [0.2, 0.5, 0.5]]))
    assert got[0, 0] == pytest.approx(0.7, abs=0.05) and got[1, 0] == pytest.approx(0.1, abs=0.05)
    assert got[0, 1] == pytest.approx(0.35, abs=0.05)
    assert (np.diff(got) <= 0).all()
    assert max(calibration_error(found)[:2]) < 0.05
    few = calibrate(found[:5])
    assert len(few.confidence) == 3 and few.accepted[0] == few.accepted[2]


def test_confidence_that_lies_gives_a_large_error() -> None:
    """Fitted on even requests, seen on odd ones, where the opposite holds."""
    found = [Seen(request=i, confidence=(0.9,), accepted=int(i % 2 == 0)) for i in range(400)]
    assert calibration_error(found)[0] > 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dflash+first", "first:N"),
        ("dflash+first:x", "no whole number"),
        ("dflash+first:-1", "at least 0"),
        ("dflash+cost:3", "takes nothing"),
        ("dflash+length", "no length head"),
        ("dflash+length:x", "no number"),
        ("dflash+xpress:0", "no xpress head"),
        ("dflash+first:2+first:3", "first twice"),
        ("dflash+xpress+markov", "xpress and markov refine the same block"),
        ("dflash+first:2+xpress", "name xpress first"),
        ("dflash+cost+first:2", "name it last"),
    ],
)
def test_wrong_stages_say_what_is_wrong(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.evaluate import methods

    target = tiny_target()
    target.name = "smollm2"
    monkeypatch.setattr(methods, "load_drafter", lambda *a, **k: dflash(target))
    with pytest.raises(ValueError, match=message):
        parse_method(text).pipeline(target)


class Spoken:
    """A drafter that says for whom it drafted, and may draft nothing."""

    def __init__(self, inner: Any, empty: bool = False) -> None:
        self.inner, self.empty, self.temperatures = inner, empty, set[float]()
        self.name, self.taps, self.samples, self.config = (
            inner.name,
            inner.taps,
            inner.samples,
            inner.config,
        )

    def new_state(self, slots: int) -> Any:
        return self.inner.new_state(slots)

    def release(self, state: Any, slot: int) -> None:
        self.inner.release(state, slot)

    def propose(self, ctx: DraftContext) -> Draft:
        self.temperatures |= {row.params.temperature for row in ctx.rows}
        draft: Draft = self.inner.propose(ctx)
        return Draft.empty(len(ctx.rows)) if self.empty else draft


def quiet(what: str, done: int, total: int | None) -> None:
    """No progress."""


COSTS: dict[str, Any] = {
    "rows_B": [1, 2],
    "drafts_N": [0, 4],
    "verify_BN": [[1.0, 2.0], [1.5, 3.0]],
    "draft_B": [0.1, 0.2],
    "draft_warm_B": [0.3, 0.6],
    "context": 8,
    "per_cached": 0.0,
    "per_waiting": 0.125,
    "node_greedy": 0.0,
    "node_warm": 0.5,
}
CURVE: dict[str, Any] = {
    "confidence": [[0.1, 0.9]],
    "accepted": [[0.2, 0.8]],
    "typical": [[0.5, 0.4, 0.3, 0.2]],
}


def kept(method: Tiny) -> tuple[Any, dict[str, Any], Path]:
    """A target, a profile as it is cached for the method, and where."""
    target = tiny_target()
    target.name = "tiny"
    key = profile.profile_key(target, method, "match")
    found = {"key": key, "costs": COSTS, "greedy": CURVE, "sampled": CURVE}
    found = json.loads(json.dumps(found))  # tests may damage their copy
    return target, found, profile.save(found)


@pytest.mark.parametrize(
    ("text", "stages", "bare"),
    [
        ("dflash+xpress:3+cost", (("xpress", "3"), ("cost", None)), "dflash+xpress:3"),
        ("dflash+markov+first:2+cost", (("markov", None), ("first", "2")), "dflash+markov"),
        ("dflash:/a b/c+length:2", (("length", "2"),), "dflash:/a b/c"),
    ],
)
def test_the_advice_measures_what_is_asked_for(
    here: Path, text: str, stages: tuple[tuple[str, str | None], ...], bare: str
) -> None:
    target = tiny_target()
    target.name = "my models/tiny"
    with pytest.raises(ValueError, match="measure it once: ") as caught:
        cost_rule(target, Tiny(text=text, stages=stages), "match")
    words = shlex.split(str(caught.value).split("measure it once: ")[1])
    assert words[:2] == ["paceline", "profile"]
    assert dict(zip(words[2::2], words[3::2], strict=True)) == {
        "--target": "my models/tiny",
        "--method": bare,
        "--accept": "match",
        "--dtype": "fp32",
        "--device": "cpu",
        "--threads": str(torch.get_num_threads()),
    }
    key = profile.profile_key(target, Tiny(text=text, stages=stages), "match")
    assert key["stages"] == bare.split("+")[1:]


def test_a_drafter_that_does_not_say_how_sure_it_is_is_refused_at_once(here: Path) -> None:
    with pytest.raises(ValueError, match=r"ngram\+cost: only block drafters say how sure"):
        cost_rule(tiny_target(), Tiny(text="ngram+cost", drafter="ngram"), "match")


@pytest.mark.parametrize("accept", ["match", "rejection"])
def test_sampling_rows_are_measured_with_the_rule_that_judges_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    target = tiny_target()
    drafter = Spoken(dflash(target, samples=accept == "rejection"))
    judged: list[tuple[float, list[int]]] = []
    rule = _RULES[accept]

    def spy(draft: Draft, law: Any, rows: Any) -> Any:
        judged.append((rows[0].params.temperature, draft.sizes_B))
        return rule(draft, law, rows)

    monkeypatch.setitem(_RULES, accept, spy)
    pipeline = Pipeline(target=target, drafter=drafter, accept=accept)
    costs, _ = grid.measure_costs(pipeline, quiet)
    assert drafter.temperatures == {0.0, 1.0}
    assert {t for t, _ in judged} == {0.0, 1.0}
    assert all(sizes == [4, 4] for _, sizes in judged)  # whole blocks at the middle of (1, 2, 4)
    assert costs.draft_warm_B is not None and len(costs.draft_warm_B) == 3
    assert min(*costs.draft_B, *costs.draft_warm_B, costs.node_greedy, costs.node_warm) > 0


def test_costs_of_a_mixed_batch_lie_between_and_dear_judging_stops_drafts() -> None:
    costs = Costs(**profile._tuples(COSTS))
    assert costs.draft(2) == pytest.approx(0.2)
    assert costs.draft(2, 1.0) == pytest.approx(0.6)
    assert costs.draft(2, 0.5) == pytest.approx(0.4)
    assert costs.node(0.5) == pytest.approx(0.25)
    sure = Survival(confidence=((0.0, 1.0),), accepted=((0.9, 0.9),))
    logits = torch.zeros(2, 4, 7)
    draft = Draft.chain(
        torch.zeros(2, 4, dtype=torch.int64), [4, 4], None, ready=[0, 1], logits_RNV=logits
    )
    free = replace(costs, verify_BN=((1.0, 1.0), (1.0, 1.0)), node_warm=100.0)
    rule = CostAware(costs=free, greedy=sure, sampled=sure)
    found = {}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=30)
        rows = [new_row([1, 2], params, request=i) for i in range(2)]
        state = SparingState(inner=None)
        found[temperature] = rule(draft, DraftContext(rows=rows, state=state))
        survival = np.cumsum(np.sort(np.tile(0.9 ** np.arange(1, 5), 2))[::-1])
        tokens = 2 + np.concatenate(([0.0], survival))
        seconds = 1 + 100.0 * temperature * (2 + np.arange(9))
        spent = (seconds + costs.draft(2, temperature) + 0.125 * tokens) / seconds[0]
        assert state.pace.off == pytest.approx(0.3 * (spent - tokens / 2).min())
    assert found == {0.0: [4, 4], 1.0: [0, 0]}


def test_contexts_fit_the_target_and_the_drafter() -> None:
    target = tiny_target()

    def of(limit: int) -> tuple[int, ...]:
        drafter = dflash(target, max_position_embeddings=limit)
        return grid.contexts(Pipeline(target=target, drafter=drafter))

    assert of(4096) == (30, 61, 123)  # 128 of the target less a block of 5
    assert of(21) == (4, 8, 16)
    with pytest.raises(ValueError, match="20 positions"):
        of(20)
    long = tiny_target(max_position_embeddings=2048)
    assert grid.contexts(Pipeline(target=long, drafter=dflash(long))) == (30, 61, 123)
    drafter = dflash(long, max_position_embeddings=4096)
    assert grid.contexts(Pipeline(target=long, drafter=drafter)) == grid.CONTEXTS


def test_a_short_drafter_is_measured_where_it_drafts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning that rows are too long would be an error here."""
    monkeypatch.setattr(grid, "CONTEXTS", (64, 256, 768))
    target = tiny_target()
    drafter = dflash(target, max_position_embeddings=21)
    costs, _ = grid.measure_costs(Pipeline(target=target, drafter=drafter), quiet)
    assert costs.context == 8


def test_not_drafting_is_not_measured_as_drafting(here: Path) -> None:
    target = tiny_target()
    pipeline = Pipeline(target=target, drafter=Spoken(dflash(target), empty=True))
    with pytest.raises(ValueError, match="nothing was drafted"):
        grid.measure_costs(pipeline, quiet)


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "another's key": lambda f: f["key"].update(weights="def"),
    "no key": lambda f: f.pop("key"),
    "no costs": lambda f: f.pop("costs"),
    "a figure short": lambda f: f["costs"].pop("node_warm"),
    "a figure too many": lambda f: f["costs"].update(more=1),
    "no rows": lambda f: f["costs"].update(rows_B=[], verify_BN=[], draft_B=[], draft_warm_B=[]),
    "rows fall": lambda f: f["costs"].update(rows_B=[2, 1]),
    "drafts repeat": lambda f: f["costs"].update(drafts_N=[4, 4]),
    "ragged": lambda f: f["costs"].update(verify_BN=[[1.0, 2.0], [1.0]]),
    "a line short": lambda f: f["costs"].update(verify_BN=[[1.0, 2.0]]),
    "a draft short": lambda f: f["costs"].update(draft_B=[1.0]),
    "a warm draft short": lambda f: f["costs"].update(draft_warm_B=[1.0]),
    "no warm drafts": lambda f: f["costs"].update(draft_warm_B=None),
    "a time of 0": lambda f: f["costs"].update(verify_BN=[[1.0, 2.0], [0.0, 3.0]]),
    "a negative time": lambda f: f["costs"].update(draft_B=[-1.0, 1.0]),
    "a negative node": lambda f: f["costs"].update(node_greedy=-1.0),
    "not finite": lambda f: f["costs"].update(per_cached=float("nan")),
    "infinite": lambda f: f["costs"].update(node_warm=float("inf")),
    "text": lambda f: f["costs"].update(draft_B=["0.1", "0.2"]),
    "null": lambda f: f["costs"].update(context=None),
    "no curves": lambda f: f["greedy"].update(confidence=[], accepted=[]),
    "an empty curve": lambda f: f["greedy"].update(confidence=[[]], accepted=[[]]),
    "a slot short": lambda f: f["sampled"].update(accepted=[]),
    "a point short": lambda f: f["sampled"].update(accepted=[[0.2]]),
    "confidence falls": lambda f: f["greedy"].update(confidence=[[0.9, 0.1]]),
    "above 1": lambda f: f["greedy"].update(accepted=[[0.2, 1.8]]),
    "no chance": lambda f: f["greedy"].update(accepted=[[float("nan"), 0.8]]),
    "no blocks": lambda f: f["greedy"].update(typical=[]),
    "ragged blocks": lambda f: f["sampled"].update(typical=[[0.1], [0.1, 0.2]]),
    "empty blocks": lambda f: f["sampled"].update(typical=[[], []]),
    "blocks of text": lambda f: f["sampled"].update(typical=[["a"]]),
    "a negative catching up": lambda f: f["costs"].update(per_waiting=-1.0),
    "a number for a curve": lambda f: f["greedy"].update(confidence=3),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_profile_that_is_damaged_inside_is_refused(here: Path, name: str) -> None:
    target, found, path = kept(Tiny())
    cost_rule(target, Tiny(), "match")
    DAMAGE[name](found)
    path.write_text(json.dumps(found))
    text = rf"{path.name} is damaged \(.+\); measure again: paceline profile --target tiny "
    with pytest.raises(ValueError, match=text):
        cost_rule(target, Tiny(), "match")


def test_what_cannot_be_saved_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, path = kept(Tiny())
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        profile.save({**found, "grid_error": float("nan")})

    def fails(*names: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no room"):
        profile.save({**found, "grid_error": 1.0})
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == before


def test_a_rule_names_the_profile_it_reads(here: Path) -> None:
    target, found, path = kept(Tiny())
    rule = cost_rule(target, Tiny(), "match")
    assert rule.profile == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert replace(rule, profile="").profile == ""
    found["costs"]["per_cached"] = 0.25
    profile.save(found)
    assert cost_rule(target, Tiny(), "match").profile != rule.profile
