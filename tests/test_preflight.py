"""Verdicts on traffic whose truth is planted; counters of an engine; the command's refusals.

Does not know trained drafters.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench_example import example_bench
from harness import TableLM, TableTarget
from paceline.cli import app
from paceline.cli.preflight import show
from paceline.core import Completion, Draft, DraftContext, Round, Row, SamplingParams
from paceline.evaluate.engine_counters import domain_of_counters, read_counters
from paceline.evaluate.preflight import (
    FEW_ROUNDS,
    Domain,
    RoundCosts,
    document,
    domain_of,
    judge_all,
    speed,
    verdict,
)
from paceline.evaluate.preflight_chart import draw
from paceline.evaluate.preflight_run import check_method, decoded, domains_of
from paceline.evaluate.report import render
from paceline.pipeline import Pipeline

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


LANGUAGES = {"english": range(20), "danish": range(20, 40)}


class TwoLanguages(TableTarget):
    """A table LM of two languages that never mix, with all that a pipeline asks of a target."""

    name, tokenizer, num_layers, max_length, vocab_size = "table", None, 1, 4096, 40
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        logits = 3 * torch.randn(40, 40, 40, generator=torch.Generator().manual_seed(0))
        for tokens in LANGUAGES.values():
            foreign = [token for token in range(40) if token not in tokens]
            logits[:, tokens.start : tokens.stop, foreign] = -99.0
        super().__init__(TableLM(logits))


@dataclass
class Knowing:
    """Drafts seven tokens; knows slot k of a language with chance ``chances[language][k - 1]``."""

    model: TableLM
    chances: dict[str, list[float]]
    name: str = "knowing"
    taps: tuple[int, ...] = ()
    samples: bool = False

    def new_state(self, slots: int) -> None:
        """It remembers nothing."""

    def release(self, state: Any, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, ctx: DraftContext) -> Draft:
        return Draft.chain(torch.tensor([self.draft(row) for row in ctx.rows]), [7] * len(ctx.rows))

    def draft(self, row: Row) -> list[int]:
        """What the target says next where it knows, another token where it does not."""
        language = next(name for name, ids in LANGUAGES.items() if row.tokens[-1] in ids)
        rng, ids = random.Random(hash(tuple(row.tokens))), list(row.tokens)
        for chance in self.chances[language]:
            true = int(self.model.next_logits(ids).argmax())
            ids.append(true if rng.random() < chance else (true + 1) % 40)
        return ids[-7:]


GOOD, WEAK_AT_ONE = [0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3], [0.5, 0.9, 0.85, 0.7, 0.4, 0.3, 0.3]


@pytest.mark.parametrize(
    ("english", "danish", "wanted"),
    [
        ([1.0] * 7, [1.0] * 7, ["train-longer-blocks"] * 3),  # perfect, cut at eight
        (WEAK_AT_ONE, WEAK_AT_ONE, ["train-early-slots"] * 3),
        (
            GOOD,
            [0.1] * 7,
            ["train-this-domain", "nothing-to-change", None],
        ),  # blind to one language
    ],
)
def test_decoded_traffic_with_a_planted_truth_is_judged_right_twice(
    english: list[float], danish: list[float], wanted: list[str | None]
) -> None:
    target = TwoLanguages()
    drafter = Knowing(target.model, {"english": english, "danish": danish})
    pipeline = Pipeline(target=target, drafter=drafter)
    prompts = [(name, [ids[0], ids[i]]) for name, ids in LANGUAGES.items() for i in range(1, 9)]
    params = SamplingParams(max_tokens=120)
    found = []
    for batch_size in (8, 3):
        replies = decoded(pipeline, prompts, params, batch_size, lambda done, total: None)
        found.append(document(domains_of(replies, B), FLAT, 12, {}))
    assert found[0] == found[1]
    verdicts = [one["verdict"] for one in found[0]["domains"]]
    assert [one["domain"] for one in found[0]["domains"]] == ["danish", "english", "all"]
    assert all(was == should for was, should in zip(verdicts, wanted, strict=True) if should)


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
    odd = 'foo{x="a}b"} 1\n  # comment\nbar 1 -5\nbaz{x="\u2028"} 3 # {trace_id="a"} 0.5\n'
    for text in (
        odd + scrape(after, 2),
        scrape(after, 2).replace('position="', 'my_position="9",position = "'),
        scrape(after, 2).replace('model_name="m"', 'model_name="a}\\"b"'),
        scrape(after, 2).replace("\n", " -1700000000\r\n"),
    ):
        b.write_text(text)
        assert domain_of_counters("engine", read_counters(b)) == whole
    b.write_text(scrape(after, 2))
    with pytest.raises(ValueError, match="restarted"):
        domain_of_counters("engine", read_counters(a), read_counters(b))
    for text, message in (
        ("no metric here\n", "scrape /metrics"),
        (scrape(after) + scrape(after).replace('"m"', '"n"'), r"several models \(m, n\)"),
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
        (["--tasks", "builtin"], "leave out --tasks"),
        (["--limit", "3"], "leave out --limit"),
        (["--method", "dflash+block:4"], "leave out --method"),
        (["--target", "smollm2"], "leave out --target"),
        (["--max-new-tokens", "9"], "leave out --max-new-tokens"),
        (["--png", str(out)], "both name"),
        (["--metrics", str(page), "--metrics", str(page)], "one scrape, or two"),
    ):
        failed = CliRunner().invoke(app, call + extra)
        assert isinstance(failed.exception, ValueError) and message in str(failed.exception)
    with pytest.raises(ValueError, match="block drafters"):
        check_method("ngram")
    with pytest.raises(ValueError, match="leave out first"):
        check_method("dflash+first:2")


def test_the_report_has_a_page_of_it(tmp_path: Path) -> None:
    page, out = tmp_path / "m.txt", tmp_path / "p.json"
    page.write_text(scrape((10, 20, 30, 40, 50, 60, 70, 300)))
    result = CliRunner().invoke(app, ["preflight", "--metrics", str(page), "--json", str(out)])
    assert result.exit_code == 0, result.output
    text = render([out])
    assert text == render([out]) and "train longer blocks" in text and "m.txt" in text
    targets = set(re.findall(r'href="#(\w+)"', text))
    assert targets == {"preflight"} and 'id="preflight"' in text
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(example_bench()))
    both = render([bench, out])
    assert 'id="preflight"' in both and 'id="results"' in both and "m.txt" in both
    found = json.loads(out.read_text())
    for change, message in (
        ({"domains": []}, "nothing was counted"),
        ({"domains": [found["domains"][0] | {"ceiling": 0.9}]}, r"domains\[0\]\.ceiling"),
        ({"domains": [found["domains"][0] | {"histogram": [580]}]}, "a block of 8 has 8"),
        ({"schema": {"name": "other", "version": 1}}, "give files that paceline bench"),
        ({"schema": {"name": "paceline-preflight", "version": 9}}, "reads 1"),
        ({"arguments": 3}, "arguments: expected an object"),
        ({"arguments": {"target": ["a"]}}, r"arguments\.target: expected text"),
        ({"arguments": {"target": None}}, r"arguments\.target: expected text"),
        ({"longer_block": 8}, "is not longer"),
        ({"domains": [found["domains"][0] | {"conditional": [9] * 7}]}, r"conditional\[0\]"),
        ({"domains": [found["domains"][0] | {"stranded_drafts": 99}]}, "stranded_drafts"),
        ({"domains": [found["domains"][0] | {"looping_share": 5}]}, "a share above 1"),
        ({"domains": [found["domains"][0] | {"domain": "\ud800"}]}, "not a JSON file"),
    ):
        out.write_text(json.dumps(found | change))
        with pytest.raises(ValueError, match=message):
            render([out])
    out.write_text(json.dumps(found | {"arguments": {"target": "another"}}))
    with pytest.raises(ValueError, match="different targets"):
        render([bench, out])


def test_charts_are_whole_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    one = {"histogram": [1, 2], "rounds": 3, "domain": "a", "verdict": "stop-speculating"}
    draw(tmp_path / "p.png", {"domains": [one | {"domain": r"$\frac{$"}]})
    with pytest.raises(ValueError, match="cannot be written"):
        draw(file / "p.png", {"domains": [one]})


def test_names_of_domains_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    domain = Domain(name="[/oops]", requests=1, looping=0, unfinished=0, kept_n=(90, 60, 50))
    show(document([domain], None, 4, {}))
    assert capsys.readouterr().out.count("[/oops]") == 2


def test_domains_need_the_same_block() -> None:
    short = Domain(name="a", requests=1, looping=0, unfinished=0, kept_n=(5, 5))
    assert short.survival == [0.5] and short.conditional == [0.5]
