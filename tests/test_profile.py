"""Costs and survival as the profile measures them, and the stage that reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.profile import show
from paceline.core import SamplingParams
from paceline.decode.length import Cut, Sparing
from paceline.evaluate import profile
from paceline.evaluate.methods import parse_method
from paceline.evaluate.profile import Seen, calibrate, calibration_error, cost_rule, profile_path
from paceline.pipeline import Pipeline
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
    monkeypatch.setattr(profile, "CONTEXTS", (4, 8, 16))
    monkeypatch.setattr(profile, "ROWS", (1, 2, 4))
    monkeypatch.setattr(profile, "REPEATS", 2)
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
    assert "calibration error" in capsys.readouterr().out

    rule = cost_rule(target, Tiny(), "match")
    staged = Pipeline(target=target, drafter=Sparing(dflash(target)), stages=(Cut(rule),))
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
