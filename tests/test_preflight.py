"""Verdicts on traffic whose truth is planted; counters of an engine; the command's refusals.

Does not know trained drafters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core import Completion, Round
from paceline.evaluate.engine_counters import domain_of_counters, read_counters
from paceline.evaluate.preflight import (
    FEW_ROUNDS,
    Domain,
    RoundCosts,
    domain_of,
    judge_all,
    speed,
    verdict,
)
from paceline.evaluate.preflight_chart import draw
from paceline.evaluate.preflight_run import check_method

B = 8
CHEAP = RoundCosts(plain=1.0, draft=0.1, verify=((7, 1.4), (15, 1.9)))
FLAT = RoundCosts(plain=1.0, draft=0.02, verify=((7, 1.1), (15, 1.2)))
DEAR = RoundCosts(plain=1.0, draft=0.1, verify=((7, 4.5), (15, 8.5)))


def replies(
    accept: list[float], *, seed: int = 0, rounds: int = 40, of: int = 12
) -> list[Completion]:
    """Replies of a drafter that gets slot k right with chance ``accept[k - 1]``, if it gets there."""
    rng = random.Random(seed)
    found = []
    for i in range(of):
        lines = [Round(drafted=0, accepted=0, committed=1)]
        for _ in range(rounds):
            n = next((k for k, p in enumerate(accept) if rng.random() >= p), len(accept))
            lines.append(Round(drafted=len(accept), accepted=n, committed=n + 1))
        lines.append(Round(drafted=7, accepted=0, committed=1))
        tokens = [rng.randrange(5000) for _ in range(80)]
        found.append(
            Completion(
                index=i,
                text="",
                token_ids=tokens,
                finish_reason="stop",
                stop_reason=None,
                logprobs=None,
                rounds=lines,
            )
        )
    return found


def test_perfect_drafter_cut_at_eight_wants_longer_blocks() -> None:
    domain = domain_of("code", replies([1.0] * 7), B)
    assert domain.ceiling == 1.0 and domain.stranded(4) == pytest.approx(4)
    found = verdict(domain, None, CHEAP, 12)
    assert found.code == "train-longer-blocks" and "100%" in found.sentence
    assert found.numbers["longer_speed"] > found.numbers["speed"]


def test_drafter_weak_at_its_first_slot_wants_early_slots() -> None:
    domain = domain_of("chat", replies([0.5, 0.85, 0.85, 0.7, 0.4, 0.3, 0.3]), B)
    assert domain.ceiling < 0.1
    assert verdict(domain, None, CHEAP, 12).code == "train-early-slots"


def test_drafter_blind_to_one_language_wants_that_domain_and_no_other() -> None:
    good, blind = [0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3], [0.1] * 7
    domains = [
        domain_of("danish", replies(blind, seed=1), B),
        domain_of("english", replies(good, seed=2), B),
        domain_of("maths", replies(good, seed=3), B),
    ]
    for _ in range(2):  # the same traffic twice
        found = {domain.name: verdict.code for domain, verdict in judge_all(domains, CHEAP, 12)}
        assert found.pop("danish") == "train-this-domain"
        assert (
            "train-this-domain" not in found.values() and "stop-speculating" not in found.values()
        )
    assert (
        "do not speculate"
        in dict(
            (domain.name, verdict.sentence) for domain, verdict in judge_all(domains, DEAR, 12)
        )["danish"]
    )


def test_stop_reduce_and_leave() -> None:
    wrong = domain_of("all", replies([0.02] * 7), B)
    assert verdict(wrong, None, CHEAP, 12).code == "stop-speculating"
    assert verdict(wrong, None, None, 12).code == "stop-speculating"
    front = domain_of("all", replies([0.9, 0.8, 0.02, 0.02, 0.02, 0.02, 0.02]), B)
    found = verdict(front, None, RoundCosts(plain=1.0, draft=0.05, verify=((7, 2.2),)), 12)
    assert found.code == "reduce-the-block" and found.numbers["best_drafts"] == 2
    even = domain_of("all", replies([0.8, 0.7, 0.7, 0.65, 0.6, 0.6, 0.6]), B)
    assert verdict(even, None, FLAT, 12).code == "nothing-to-change"
    few = domain_of("all", replies([0.8] * 7, rounds=3), B)
    assert few.rounds < FEW_ROUNDS and verdict(few, None, CHEAP, 12).code == "too-few-rounds"


def test_a_longer_block_that_costs_more_than_it_brings_is_not_advised() -> None:
    domain = domain_of("code", replies([0.95, 0.9, 0.85, 0.8, 0.75, 0.75, 0.75]), B)
    assert domain.ceiling >= 0.1
    steep = RoundCosts(plain=1.0, draft=0.1, verify=((7, 1.2), (11, 4.0)))
    assert verdict(domain, None, steep, 12).code != "train-longer-blocks"
    assert verdict(domain, None, FLAT, 12).code == "train-longer-blocks"
    assert speed(domain, CHEAP, 0) == 1.0


def test_only_whole_rounds_of_finished_replies_count() -> None:
    finished, cut = replies([1.0] * 7, of=4), replies([0.0] * 7, of=4)
    unfinished = [
        Completion(
            index=0,
            text="",
            token_ids=[1] * 80,
            finish_reason="length",
            stop_reason=None,
            logprobs=None,
            rounds=one.rounds,
        )
        for one in cut
    ]
    found = domain_of("x", [*finished, *unfinished], B)
    assert found.kept_n == (0,) * 7 + (160,) and found.unfinished == found.looping == 4
    alone = domain_of("x", unfinished, B)
    assert alone.of_unfinished and alone.kept_n == (160,) + (0,) * 7


def scrape(kept: tuple[int, ...], engines: int = 1) -> str:
    total = sum(kept)
    lines = ["# HELP vllm:spec_decode_num_drafts_total rounds", "process_cpu_seconds_total 1.5e+01"]
    for engine in range(engines):
        label = f'engine="{engine}",model_name="m"'
        lines.append(
            f"vllm:spec_decode_num_drafts_total{{{label}}} {total:.1e}"
            if total == 400
            else f"vllm:spec_decode_num_drafts_total{{{label}}} {total}.0"
        )
        for k in range(1, len(kept)):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{label},position="{k - 1}"}} {sum(kept[k:])}.0')
    return "\n".join(lines) + "\n"


def test_counters_of_an_engine_are_the_histogram(tmp_path: Path) -> None:
    before, after = (100, 50, 50, 200), (300, 150, 90, 700)
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(scrape(before, 2)), b.write_text(scrape(after, 2))
    whole = domain_of_counters("engine", read_counters(b))
    assert whole.kept_n == tuple(2 * n for n in after)
    between = domain_of_counters("engine", read_counters(b), read_counters(a))
    assert between.kept_n == tuple(2 * (y - x) for x, y in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="restarted"):
        domain_of_counters("engine", read_counters(a), read_counters(b))
    for text, message in (
        ("no metric here\n", "line 1: no Prometheus metric"),
        ("up 1\n", "scrape /metrics"),
        (scrape(after).replace('position="1"', 'position="9"'), "lacks positions"),
        (scrape(after).replace("1240.0", "many"), "is no count"),
    ):
        a.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_counters(a)


def test_the_command_reads_an_engine_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    page, out, picture = tmp_path / "m.txt", tmp_path / "p.json", tmp_path / "p.png"
    page.write_text(scrape((10,) * 7 + (300,)))
    call = ["preflight", "--metrics", str(page), "--json", str(out), "--png", str(picture)]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["block_size"] == 8 and found["longer_block"] == 12
    assert found["domains"][0]["verdict"] == "train-longer-blocks"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    again = json.loads(out.read_text())
    assert CliRunner().invoke(app, call).exit_code == 0 and json.loads(out.read_text()) == again
    for extra, message in (
        (["--longer-block", "8"], "more than the drafter's 8"),
        (["--tasks", "gsm8k"], "not both"),
        (["--metrics", str(page), "--metrics", str(page)], "one scrape, or two"),
    ):
        failed = CliRunner().invoke(app, call + extra)
        assert isinstance(failed.exception, ValueError) and message in str(failed.exception)
    with pytest.raises(ValueError, match="block drafters"):
        check_method("ngram")
    with pytest.raises(ValueError, match="leave out first"):
        check_method("dflash+first:2")


def test_charts_are_whole_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    one = {"histogram": [1, 2], "rounds": 3, "domain": "a", "verdict": "stop-speculating"}
    with pytest.raises(ValueError, match="cannot be written"):
        draw(file / "p.png", {"domains": [one]})


def test_domains_need_the_same_block() -> None:
    short = Domain(name="a", requests=1, looping=0, unfinished=0, kept_n=(5, 5))
    assert short.survival == [0.5] and short.conditional == [0.5]
