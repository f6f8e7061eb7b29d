"""The bench on a table LM: known traces give known figures, and what must not change does not.

Does not measure real time: the loop's clock is a counter, one second a reading.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import paceline
from bench_example import example_bench
from harness import TableCache, TableDrafter, TableLM, TableTarget
from paceline import pipeline as pipelines
from paceline.cli import app
from paceline.cli.bench import show
from paceline.core import Draft, DraftContext, Noise, SamplingParams, Verdict
from paceline.decode import loop
from paceline.decode.accept import match
from paceline.decode.warp import inverse_cdf, shape_probs
from paceline.drafters.ngram import NgramDrafter
from paceline.evaluate import bench as benches
from paceline.evaluate import methods
from paceline.evaluate.bench import Bench, BenchArguments, document, header
from paceline.evaluate.entries import Entry, summarise
from paceline.evaluate.methods import parse_method, parse_methods
from paceline.evaluate.results import _check_run
from paceline.evaluate.side import SideFile, side_path
from paceline.evaluate.tasks import load_tasks
from paceline.evaluate.verify import ExactArithmetic, judge, sampling_margin
from paceline.pipeline import Pipeline

TOKENS = 16


class Letters:
    """Id i is the i-th letter; a conversation is its contents in a row."""

    chat_template = "letters"
    eos_token_id = None
    all_special_ids = ()

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i) for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + i): i for i in range(11)}


class TableModel(torch.nn.Module):
    """The table as a module, as the umpire of differences calls it."""

    def __init__(self, table: TableLM) -> None:
        super().__init__()
        self.table = table

    def forward(self, input_ids: Any, **_: Any) -> Any:
        return SimpleNamespace(logits=self.table.next_logits(input_ids[0].tolist())[None, None])


class World:
    """A target around a table LM with all that a pipeline and a bench ask for."""

    name, num_layers, dtype, device = "table", 1, torch.float32, torch.device("cpu")
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, table: TableLM, context: int = 100) -> None:
        self.table, self.vocab_size, self.max_length = table, table.vocab, context
        self.model, self.tokenizer = TableModel(table), Letters()

    def new_cache(self, slots: int) -> TableCache:
        return TableCache([0] * slots)

    def score(self, draft: Draft, rows: Any, cache: Any, taps: Any) -> Any:
        return TableTarget(self.table).score(draft, rows, cache, taps)

    def next_logits(self, ids: Any) -> Any:
        return self.table.next_logits(ids)


@dataclass
class Cyclic:
    """Drafts four tokens of the cycle 0 .. 9, of which ``pattern[round]`` are right."""

    pattern: tuple[int, ...]
    name: str = "cyclic"
    taps: tuple[int, ...] = ()
    samples: bool = False

    def new_state(self, slots: int) -> None:
        """Nothing to remember."""

    def release(self, state: Any, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, ctx: DraftContext) -> Draft:
        drafts = []
        for row in ctx.rows:
            tokens = [(row.tokens[-1] + 1 + i) % 10 for i in range(4)]
            right = self.pattern[len(row.rounds) % len(self.pattern)]
            drafts.append([t if i < right else (t + 1) % 10 for i, t in enumerate(tokens)])
        return Draft.chain(torch.tensor(drafts), [4] * len(drafts))


CYCLE = TableLM.cycle(11)
ROWS = [
    {"turns": ["a"], "category": "one"},
    {"turns": ["c", "d"], "category": "two"},
    {"turns": ["e"], "category": "two"},
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "letters.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return file


def arguments(prompts: Path, **changes: Any) -> BenchArguments:
    given = {"target": "table", "methods": ("x",), "tasks": (str(prompts),)}
    return BenchArguments(**{**given, "max_new_tokens": TOKENS, **changes})


def measure(
    given: BenchArguments,
    out: Path | None = None,
    table: TableLM = CYCLE,
    tell: Any = lambda line: None,
    **drafters: Any,
) -> tuple[dict[str, Any], list[Entry]]:
    """The document of a bench with these drafters, and its replies."""
    plain = Pipeline(target=World(table))
    made = {
        name: Pipeline(target=plain.target, drafter=d, accept=given.accept)
        for name, d in drafters.items()
    }
    tasks = load_tasks(given.tasks, None, given.limit)
    named = [{"name": name, "drafter": name, "stages": [], "weights": None} for name in made]
    head = header(
        given, plain.target, [parse_method("plain").describe(plain.target), *named], tasks
    )
    side = SideFile(path=None if out is None else side_path(out), header=head)
    bench = Bench(
        pipelines={"plain": plain, **made}, tasks=tasks, arguments=given, side=side, tell=tell
    )
    entries = bench.run()
    return document(head, entries, bench.ended), entries


def run_of(found: dict[str, Any], method: str, category: str | None = None, **of: Any) -> Any:
    named = {"method": method, "category": category, **of}
    (run,) = [r for r in found["runs"] if all(r[key] == named[key] for key in named)]
    return run


def test_a_drafter_that_contributes_nothing_is_told_of_once(prompts: Path, tmp_path: Path) -> None:
    told: list[str] = []
    blind, lookup = Cyclic((0,), taps=(0,)), Cyclic((0,))
    given, out = arguments(prompts, limit=3), tmp_path / "bench.json"
    measure(
        given, out, tell=told.append, blind=blind, seeing=Cyclic((1,), taps=(0,)), lookup=lookup
    )
    (warning,) = [line for line in told if "contributes nothing" in line]
    assert warning.startswith("warning: blind: ")


def test_a_known_trace_gives_known_figures(clock: None, prompts: Path) -> None:
    found, _ = measure(arguments(prompts), x=Cyclic((0, 3, 1)))
    run = run_of(found, "x")
    # A reply's rounds after the prefill accept 3, 1, 0, 3, 1, 0, 0; the last has no room to draft.
    assert run["requests"] == 4 and run["verify_rounds"] == 4 * 7
    assert run["drafted_tokens"] == 4 * (4 + 4 + 4 + 4 + 3 + 1 + 0)
    assert run["verified_tokens"] == run["drafted_tokens"] + run["verify_rounds"]
    assert run["accepted_drafts"] == 4 * 8 and run["committed_tokens"] == 4 * 15
    assert run["output_tokens"] == 4 * TOKENS
    assert run["acceptance_length_pooled"] == run["acceptance_length_request_mean"] == 15 / 7
    assert run["histogram"] == {"1": 12, "2": 8, "4": 8}
    assert [slot["drafted"] for slot in run["slot_acceptance"]] == [24, 20, 20, 16]
    assert [slot["accepted"] for slot in run["slot_acceptance"]] == [16, 8, 8, 0]
    # Four readings a pass: draft, verify, accept and commit take a second each.
    phases = dict.fromkeys(("draft", "verify", "accept", "commit"), 28.0)
    assert run["seconds"] == {**phases, "refine": 0.0, "total": 112.0}
    assert run["prefill_seconds"] == 4 * 4 and run["forward_passes"] == 28
    assert run["tokens_per_second"] == 60 / 112
    assert run["speedup_vs_plain"] == run["speedup_median"] == pytest.approx(15 / 7)
    assert run["speedup_end_to_end"] == pytest.approx(16 / 8)
    assert run["chunks"] == run["measurements"] == 3 and run["unfilled_requests"] == 0
    assert run["rows_per_pass"] == 1
    assert (run["identical_to_plain"], run["near_ties"], run["bugs"]) == (4, 0, 0)
    plain = run_of(found, "plain")
    assert plain["acceptance_length_pooled"] == 1 and plain["drafted_tokens"] == 0
    assert plain["seconds"]["total"] == 60 * 4 and plain["speedup_vs_plain"] == 1


def test_a_batch_shares_its_passes_and_categories_sum_to_the_total(
    clock: None, prompts: Path
) -> None:
    found, _ = measure(arguments(prompts, batch_sizes=(2,)), x=Cyclic((0, 3, 1)))
    total = run_of(found, "x")
    # Rows 0 and 1 together, the second turn of row 1 alone, row 2 alone: 3 times 7 passes.
    assert total["forward_passes"] == 21 and total["seconds"]["total"] == 84
    parts = [run_of(found, "x", category) for category in ("one", "two")]
    assert [part["forward_passes"] for part in parts] == [3.5, 17.5]
    sums = ("requests", "verify_rounds", "drafted_tokens", "verified_tokens", "accepted_drafts")
    sums += ("committed_tokens", "output_tokens", "prefill_seconds", "forward_passes")
    sums += ("identical_to_plain", "near_ties", "bugs")
    for method, name in itertools.product(("plain", "x"), sums):
        parts = [run_of(found, method, category)[name] for category in ("one", "two")]
        assert sum(parts) == run_of(found, method)[name], name
    for phase in run_of(found, "x")["seconds"]:
        parts = [run_of(found, "x", category)["seconds"][phase] for category in ("one", "two")]
        assert sum(parts) == run_of(found, "x")["seconds"][phase]


def test_stages_are_timed_as_refine_and_may_change_nothing(clock: None, prompts: Path) -> None:
    def lies(draft: Draft, ctx: DraftContext) -> Draft:
        return Draft.chain((draft.tokens_BN + 1) % 10, draft.sizes_B)

    plain = Pipeline(target=World(CYCLE))
    staged = Pipeline(target=plain.target, drafter=Cyclic((4,)), stages=(lies,))
    given = arguments(prompts)
    tasks = load_tasks(given.tasks, None, None)
    side = SideFile(path=None, header={})
    entries = Bench(
        pipelines={"plain": plain, "x": staged}, tasks=tasks, arguments=given, side=side
    ).run()
    found = document({"tasks": []}, entries, {})
    run = run_of(found, "x")
    assert run["seconds"]["refine"] == run["seconds"]["draft"] == run["forward_passes"] == 60
    assert run["accepted_drafts"] == 0 and run["identical_to_plain"] == 4


def test_replies_under_rejection_are_other_draws_and_no_bugs(prompts: Path) -> None:
    table = TableLM.random(11, seed=3)
    given = arguments(prompts, accept="rejection", temperatures=(1.0,))
    sampled = TableDrafter(TableLM.random(11, seed=4), 3)
    found, _ = measure(given, table=table, x=sampled)
    drawn = run_of(found, "x")
    assert drawn["other_draws"] > 0 and not drawn["bugs"]
    assert drawn["other_draws"] + drawn["identical_to_plain"] == drawn["requests"]
    replies = [r for r in found["replies"] if r["verdict"] == "draw"]
    assert len(replies) == drawn["other_draws"] and replies[0]["difference"]["margin"] is None
    run = {**drawn, "other_draws": 0}
    with pytest.raises(ValueError, match="other_draws"):
        _check_run(run, "runs[0]")
    _check_run(drawn, "runs[0]")
    with pytest.raises(ValueError, match="not match or rejection"):
        arguments(prompts, accept="typical")


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, SamplingParams]]:
    """Every batch that will be decoded: drafter, first prompt as text, first parameters."""
    order: list[tuple[str, str, SamplingParams]] = []

    def spy(pipeline: Pipeline, asked: Any, params: Any) -> Any:
        name = "plain" if pipeline.drafter is None else pipeline.drafter.name
        first = params if isinstance(params, SamplingParams) else params[0]
        order.append((name, "".join(chr(97 + i) for i in asked[0]), first))
        return real(pipeline, asked, params)

    real = benches.traced
    monkeypatch.setattr(benches, "traced", spy)
    return order


def test_later_turns_follow_plains_own_reply_and_every_method_is_first_in_turn(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = spied(monkeypatch)
    drafters = {name: Cyclic((0,), name=name) for name in ("x", "y")}
    _, entries = measure(arguments(prompts), **drafters)
    second = "c" + "defghijabcdefghi" + "d"  # question, plain's reply, question
    measured = [(name, text) for name, text, _ in order[3:]]
    assert [text for _, text in measured[::3]] == ["a", "c", second, "e"]
    names = [name for name, _ in measured]
    assert [names[at : at + 3] for at in (0, 3, 6, 9)] == [
        ["plain", "x", "y"],
        ["x", "y", "plain"],
        ["y", "plain", "x"],
        ["y", "plain", "x"],
    ]
    assert [len(e.prompt_ids) for e in entries if e.method == "x"] == [1, 1, 18, 1]


def test_every_batch_size_and_temperature_is_warmed_up(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = spied(monkeypatch)
    given = arguments(prompts, temperatures=(0.0, 1.0), batch_sizes=(1, 2), max_new_tokens=17)
    measure(given, x=Cyclic((0,)))
    warm = [(name, p.temperature) for name, _, p in order if p.max_tokens < 17]
    assert warm == [(name, t) for t in (0.0, 0.0, 1.0, 1.0) for name in ("plain", "cyclic")]


def test_few_chunks_are_measured_three_times_and_counted_once(
    clock: None, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = spied(monkeypatch)
    counted, _ = measure(arguments(prompts), x=Cyclic((0, 3, 1)))
    del order[:]
    found, entries = measure(arguments(prompts, batch_sizes=(8,)), x=Cyclic((0, 3, 1)))
    run, alone = run_of(found, "x"), run_of(counted, "x")
    assert (run["chunks"], run["measurements"]) == (1, 3)
    assert [name for name, *_ in order[2::2]] == [*("plain", "cyclic"), *("cyclic", "plain")] + [
        *("plain", "cyclic")
    ]
    for name in ("requests", "verify_rounds", "committed_tokens", "histogram", "output_tokens"):
        assert run[name] == alone[name], name
    assert len(found["replies"]) == len(counted["replies"]) < len(entries)
    # Three rows of 7 passes, then one of 7: the clock of one pass through the task, not of three.
    assert run["forward_passes"] == pytest.approx(14)
    assert run["seconds"]["total"] == pytest.approx(14 * 4)
    assert run["rows_per_pass"] == pytest.approx(28 / 14) and run["unfilled_requests"] == 4
    two, _ = measure(arguments(prompts, batch_sizes=(2,)), x=Cyclic((0, 3, 1)))
    run = run_of(two, "x")
    assert (run["chunks"], run["measurements"], run["unfilled_requests"]) == (2, 6, 2)


def test_the_mean_of_the_clocks_and_the_median_of_the_ratios_are_of_all_repeats() -> None:
    """One prompt, plain 4 s and the drafter 1, 2 and 4 s for 5 tokens; the first pass counts."""
    place = {"task": "t", "category": None, "batch_size": 1, "temperature": 0.0, "chunk": 0}
    place |= {"row": 0, "turn": 0, "together": 1, "prompt_ids": [0], "token_ids": [1] * 6}
    place |= {"finish_reason": "length", "prefill": 1.0, "passes": 2.0}
    entries = [
        Entry(
            method=method,
            repeat=repeat,
            rounds=[[0, 0, 1], [4, 3, 4], [1, 0, 1]],
            seconds=dict.fromkeys(("draft", "refine", "accept", "commit"), 0.0) | {"verify": took},
            **place,
        )
        for repeat, seconds in enumerate(((4.0, 1.0), (4.0, 2.0), (4.0, 4.0)))
        for method, took in zip(("plain", "x"), seconds, strict=True)
    ]
    run = summarise(entries)[1]
    assert run["speedup_median"] == 2 and run["speedup_vs_plain"] == pytest.approx(12 / 7)
    assert run["seconds"]["verify"] == pytest.approx(7 / 3)
    assert run["tokens_per_second"] == pytest.approx(5 / (7 / 3))
    assert (run["verify_rounds"], run["committed_tokens"], run["requests"]) == (2, 5, 1)


def test_a_template_that_refuses_a_later_turn_ends_that_question_only(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Letters.apply_chat_template

    def refuses(self: Letters, messages: Any, **more: Any) -> str:
        if len(messages) == 3 and messages[1]["content"] != "-":
            raise ValueError("a reply may not hold an e")
        return real(self, messages, **more)

    monkeypatch.setattr(Letters, "apply_chat_template", refuses)
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, ROWS[1]]))
    given, told = arguments(prompts, temperatures=(0.0, 1.0)), list[str]()
    found, _ = measure(given, tmp_path / "out", tell=told.append, x=Cyclic((0,)))
    (task,) = found["tasks"]
    assert task["left_out"] == {"turn-2-template-refused": 2} and task["requests"] == 6
    assert run_of(found, "x", temperature=0.0)["requests"] == 4
    assert sum("ended early" in line for line in told) == 1
    again, _ = measure(given, tmp_path / "out", x=Cyclic((0,)))
    assert again == found, "from the side file"


def test_a_later_turn_that_outgrows_the_context_ends_that_question(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply's text may be longer in tokens than the reply was."""

    def longer(self: Letters, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text] * (9 if len(text) > 9 else 1)}

    monkeypatch.setattr(Letters, "__call__", longer)
    found, _ = measure(arguments(prompts), x=Cyclic((0,)))
    assert found["tasks"][0]["left_out"] == {"turn-2-too-long": 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_reply(prompts: Path, temperature: float) -> None:
    given = arguments(prompts, temperatures=(temperature,), batch_sizes=(1, 2))
    liar, table = Cyclic((0,)), TableLM.random(11, seed=3)
    found, entries = measure(given, table=table, liar=liar, ngram=NgramDrafter(3))
    for run in found["runs"]:
        assert run["identical_to_plain"] == run["requests"]
    replies = {(e.row, e.turn): e.token_ids for e in entries if e.method == "plain"}
    assert all(e.token_ids == replies[e.row, e.turn] for e in entries)
    assert len({tuple(ids) for ids in replies.values()}) > 2


def test_loops_are_reported_and_left_out(prompts: Path) -> None:
    found, _ = measure(arguments(prompts, max_new_tokens=60), x=Cyclic((2,)))
    run = run_of(found, "x")
    assert run["looping_share"] == 1.0 and run["without_loops"]["requests"] == 0
    assert run["without_loops"]["speedup_vs_plain"] is None
    found, _ = measure(arguments(prompts), x=Cyclic((2,)))
    run = run_of(found, "x")
    assert run["looping_share"] == 0.0
    assert {name: run[name] for name in run["without_loops"]} == run["without_loops"]


def trusting(draft: Any, law: Any, rows: Any) -> Verdict:
    """The planted bug: whatever was drafted is taken."""
    verdict = match(draft, law, rows)
    tokens = [
        draft.tokens_BN[b].tolist()[:size] + verdict.tokens[b][-1:]
        for b, size in enumerate(draft.sizes_B)
    ]
    return Verdict(tokens=tokens, paths=[list(range(size)) for size in draft.sizes_B])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_planted_bug_is_found(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setitem(pipelines._RULES, "match", trusting)
    found, _ = measure(arguments(prompts, temperatures=(temperature,)), x=Cyclic((0, 3, 1)))
    run = run_of(found, "x")
    assert run["bugs"] == 4 and run["identical_to_plain"] == run["near_ties"] == 0
    assert {r["verdict"] for r in found["replies"] if r["method"] == "x"} == {"bug"}
    assert run_of(found, "plain")["identical_to_plain"] == 4


def figures_without_time(found: dict[str, Any]) -> list[dict[str, Any]]:
    timed = re.compile("second|speedup|passes|without")
    return [{k: v for k, v in run.items() if not timed.search(k)} for run in found["runs"]]


def test_a_killed_bench_goes_on_and_repeats_nothing(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, given = tmp_path / "out.json", arguments(prompts, temperatures=(0.0, 1.0))
    whole, _ = measure(given, x=Cyclic((0, 3, 1)))
    real, calls = Bench._measure, 0

    def counted(self: Bench, *place: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(self, *place)

    monkeypatch.setattr(Bench, "_measure", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(given, out, x=Cyclic((0, 3, 1)))
    assert [path.name for path in tmp_path.glob("out*")] == ["out.json.partial"]
    resumed, _ = measure(given, out, x=Cyclic((0, 3, 1)))
    assert calls == 4 + 3  # three of six chunks were done
    assert figures_without_time(resumed) == figures_without_time(whole)
    with pytest.raises(ValueError, match="another bench .*max_new_tokens was 16, is now 8"):
        measure(arguments(prompts, temperatures=(0.0, 1.0), max_new_tokens=8), out, x=Cyclic((0,)))
    with pytest.raises(ValueError, match="methods was"):
        measure(given, out, x=Cyclic((0,)), y=Cyclic((0,)))
    prompts.write_text('{"prompt": "b"}\n')
    with pytest.raises(ValueError, match="tasks letters rows was 3, is now 1.* more"):
        measure(given, out, x=Cyclic((0,)))
    with pytest.raises(ValueError, match="environment commit was"):
        monkeypatch.setattr("paceline.evaluate.machine.source_commit", lambda: "another")
        measure(given, out, x=Cyclic((0,)))


def test_the_side_file_is_appended_to_and_damage_is_named(tmp_path: Path) -> None:
    path, header = tmp_path / "out.partial", {"a": 1}
    side = SideFile(path=path, header=header)
    sizes = []
    for key in ("one", "two"):
        before = path.read_bytes() if path.exists() else b""
        side.add(key, {"x": [1.5, None]})
        assert path.read_bytes().startswith(before)
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    assert SideFile(path=path, header=header).parts == side.parts
    path.write_bytes(whole[:-3])  # killed while it wrote: the part is measured again
    side = SideFile(path=path, header=header)
    assert list(side.parts) == ["one"]
    side.add("two", {"x": [1.5, None]})
    assert path.read_bytes() == whole
    path.write_bytes(whole[:5])
    assert SideFile(path=path, header=header).parts == {} and not path.exists()
    for text, message in (
        (whole.replace(b"1.5", b"2.5", 1), "line 2 is damaged or edited"),
        (b"{}\n" + whole, "line 1 is damaged or edited"),
        (b'{"header": 1, "chunks": {}}', "line 1 is damaged or edited"),
        (whole + whole[sizes[0] :], "line 4 repeats two: two benches"),
    ):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            SideFile(path=path, header=header)
        assert path.read_bytes() == text


def test_differences_are_judged_after_the_clocks_of_a_setting_and_once(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pipelines._RULES, "match", trusting)
    events: list[str] = []
    real_judge, real_traced = benches.judge, benches.traced

    def judging(*a: Any) -> Any:
        events.append("judge")
        return real_judge(*a)

    def tracing(*a: Any) -> Any:
        events.append("trace")
        return real_traced(*a)

    monkeypatch.setattr(benches, "judge", judging)
    monkeypatch.setattr(benches, "traced", tracing)
    given = arguments(prompts, temperatures=(0.0, 1.0))
    found, _ = measure(given, tmp_path / "out", x=Cyclic((0, 3, 1)))
    assert "".join(event[0] for event in events) == 2 * ("t" * 10 + "j" * 4)
    del events[:]
    again, _ = measure(given, tmp_path / "out", x=Cyclic((0, 3, 1)))
    assert events == [] and again == found


def test_a_drafters_config_is_part_of_its_hash(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    hashes = []
    for config in ('{"block_size": 8}', '{"block_size": 16}'):
        (tmp_path / "config.json").write_text(config)
        for text in (f"dflash:{tmp_path}", f"model:{tmp_path}"):
            hashes.append(parse_method(text).weights(World(CYCLE)))
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3] and None not in hashes


def test_a_sampled_difference_is_a_tie_as_far_as_logits_must_move() -> None:
    generator = torch.Generator().manual_seed(1)
    for temperature, u in itertools.product((0.7, 1.0, 2.0), (0.05, 0.4, 0.93)):
        logits = torch.randn(12, generator=generator)
        params = SamplingParams(temperature=temperature)

        def draw(moved: torch.Tensor, u: float = u, params: SamplingParams = params) -> int:
            return inverse_cdf(shape_probs(moved[None], params), [u])[0]

        drawn = draw(logits)
        assert sampling_margin(logits, (drawn,), u, temperature) == 0
        for token in range(12):
            if token == drawn:
                continue
            margin = sampling_margin(logits, (drawn, token), u, temperature)
            # The cheapest way: tokens on the side of the drawn one lose, those behind gain.
            first = token if token > drawn else token + 1
            side = torch.where(torch.arange(12) < first, -0.5, 0.5) * (1 if token > drawn else -1)
            assert draw(logits + side * (margin + 1e-3)) == token
            assert draw(logits + side * (margin - 1e-3)) != token


def test_a_sampled_difference_is_judged_by_its_random_number() -> None:
    params = SamplingParams(temperature=1.0, seed=4)
    u = Noise(4).uniform("target", 1)
    assert 0.05 < u < 0.95 and abs(u - 0.5) > 0.1
    verdicts = []
    for first in (u - 1e-6, 0.5):  # the probability of token 0; token 1 has the rest
        table = torch.full((11, 11, 11), -40.0)
        table[..., 0], table[..., 1] = math.log(first), math.log(1 - first)
        pipeline = Pipeline(target=World(TableLM(table)))
        exact = ExactArithmetic(pipeline.target)
        verdicts.append(judge(pipeline, exact, 0, [2], [0], [1], params).verdict)
    # The greedy margin says the opposite: wide at the border, none between equals.
    assert verdicts == ["near-tie", "bug"]


def command(monkeypatch: pytest.MonkeyPatch, *given: str, loads: bool = True) -> Any:
    def load(*_: Any, **options: Any) -> Pipeline:
        assert loads, "the model is loaded"
        assert options["device"] == "cpu"
        return Pipeline(target=World(CYCLE))

    monkeypatch.setattr(paceline, "load", load)
    return CliRunner().invoke(app, ["bench", "--target", "table", *given])


def test_the_command_writes_the_documented_file(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    given = ("--methods", "ngram", "--tasks", str(prompts), "--batch-size", "1,2")
    given += ("--temperature", "0,1", "--max-new-tokens", "8", "--limit", "9", "--json", str(out))
    done = command(monkeypatch, *given)
    assert done.exit_code == 0, done.output
    assert "letters has 3 prompts, fewer than the limit 9" in done.stderr
    assert "speed-up" in done.stdout and not side_path(out).exists()
    found, example = json.loads(out.read_text()), example_bench()
    assert found["arguments"]["methods"] == ["plain", "ngram"]
    for part in ("schema", "environment", "target", "arguments"):
        assert found[part].keys() == example[part].keys(), part
    for part in ("methods", "tasks", "runs", "replies"):
        assert found[part][0].keys() == example[part][0].keys(), part
    for name in ("seconds", "without_loops"):
        assert found["runs"][0][name].keys() == example["runs"][0][name].keys()
    documented = set(re.findall(r"`(\w+)`", Path("docs/bench.md").read_text()))
    keys = {*found, *found["runs"][0], *found["replies"][0], *found["tasks"][0]}
    keys |= {*found["target"], *found["environment"], *found["runs"][0]["seconds"]}
    assert not keys - documented
    assert str(tmp_path) not in out.read_text()


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(example_bench())
    names = {"builtin": "[/red]", "dflash": "[bold]d:smile:", "code": "[x] c", "smollm2": "[/b]s"}
    for old, new in names.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    show(json.loads(text))
    shown = capsys.readouterr().out
    assert all(name in shown for name in names.values())


def test_the_command_exits_1_on_a_bug_and_names_it(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--methods", "ngram", "--tasks", str(prompts), "--max-new-tokens", "40")
    assert command(monkeypatch, *given).exit_code == 0
    monkeypatch.setitem(pipelines._RULES, "match", trusting)
    monkeypatch.setattr(NgramDrafter, "_lookup", lambda self, tokens: [7, 7])
    done = command(monkeypatch, *given)
    assert done.exit_code == 1
    assert "bug: ngram, letters row 0 turn 0, batch 1, T 0.0: token 1 is 7" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--batch-size", "x"), "--batch-size: 'x' is not a number"),
        (("--batch-size", "0"), "batch size must be at least 1"),
        (("--batch-size", "1,1"), "batch_sizes must name each value once"),
        (("--temperature", "-1"), "temperature must be >= 0"),
        (("--tasks", ""), "tasks must name each value once"),
        (("--tasks", "builtim"), "did you mean 'builtin'"),
        (("--methods", "dflash"), "no drafter is packaged for target 'table'"),
        (("--max-new-tokens", "1"), "at least 2"),
        (("--methods", ","), "methods is empty"),
        (("--methods", "dflash:a,b"), "'+' parts stages: a path with either must be renamed"),
        (("--methods", "dflash:a+b"), "'+' parts stages: a path with either must be renamed"),
        (("--tasks", "my,file.jsonl"), "a path given here may not contain ','"),
        (("--device", "warp"), "device 'warp' cannot be used"),
        (("--limit", "0"), "limit must be at least 1"),
        (("--tasks", "EMPTY"), "no usable prompt"),
        (("--json", "/proc/nowhere/out.json"), "cannot be written"),
    ],
)
def test_mistakes_in_the_command_are_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], message: str
) -> None:
    (tmp_path / "EMPTY").touch()
    monkeypatch.chdir(tmp_path)
    done = command(monkeypatch, *given, loads="packaged" in message)
    assert isinstance(done.exception, ValueError) and message in str(done.exception)


def test_ctrl_c_says_how_to_go_on(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = tmp_path / "new" / "out.json", Bench._measure, itertools.count()

    def stopped(self: Bench, *place: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(self, *place)

    monkeypatch.setattr(Bench, "_measure", stopped)
    given = ("--methods", "ngram", "--tasks", str(prompts), "--json", str(out))
    given += ("--max-new-tokens", "8")
    done = command(monkeypatch, *given)
    assert done.exit_code == 130 and "the same command goes on" in done.stderr
    done = command(monkeypatch, *given)
    assert done.exit_code == 0 and "going on after 1 finished parts" in done.stderr
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.json"]


def test_what_a_table_rests_on_is_said_below_it(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--methods", "ngram", "--tasks", str(prompts), "--max-new-tokens", "8")
    done = command(monkeypatch, *given)
    assert "decoded in batches of fewer" not in done.stdout
    done = command(monkeypatch, *given, "--batch-size", "3", "--tasks-dir", str(prompts.parent))
    assert "* letters: 1 of 4 requests were decoded in batches of fewer than 3" in done.stdout
    assert "1 x 3~" in done.stdout and "~ fewer than 3 chunks" in done.stdout
    assert "--tasks-dir is not used" in done.stderr


def test_questions_beyond_the_context_are_left_out(prompts: Path) -> None:
    pipeline = Pipeline(target=World(CYCLE, context=20))
    (task,) = load_tasks([str(prompts)], None, None)
    # One turn: 1 + 8 tokens. Two turns: 1 + 1 and a reply each, 1 + 1 + 2 * 8 and a place holder.
    for tokens, reasons in ((8, [None, None, None]), (9, [None, "too-long", None])):
        found = [benches.refusal(pipeline, question, tokens) for question in task.questions]
        assert found == reasons
    assert benches.refusal(pipeline, task.questions[0], 20) == "too-long"
    pipeline.target.tokenizer.chat_template = None
    found = [benches.refusal(pipeline, question, 4) for question in task.questions]
    assert found == [None, "no-chat-template", None]


def test_methods_are_parsed_and_mistakes_name_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(methods.STAGES, "refiner", lambda argument, pipeline: lambda d, ctx: d)
    folder = tmp_path / "run" / "drafter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    texts = ["ngram", "ngram+refiner:2", f"dflash:{folder}", "plain", "model:small"]
    parsed = parse_methods(texts)
    assert [m.name for m in parsed] == [
        "plain",
        "ngram",
        "ngram+refiner:2",
        "dflash:run/drafter",
        "model:small",
    ]
    made = parsed[2].pipeline(World(CYCLE))
    assert isinstance(made.drafter, NgramDrafter) and len(made.stages) == 1
    for text, message in (
        ("dflsh", "did you mean 'dflash'"),
        ("ngram+refine", "no stage 'refine'.*did you mean 'refiner'"),
        ("ngram:3", "takes nothing"),
        ("plain+refiner", "no stages"),
        ("model", "model:NAME"),
        ("dflash:", "write drafter"),
        ("+refiner", "write drafter"),
        ("dflash:ngram", "neither a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_method(text)
    with pytest.raises(ValueError, match="called ngram"):
        parse_methods(["ngram", "ngram"])
