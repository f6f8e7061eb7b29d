"""Regenerated rows are the target's own replies: alone, batched, drafted, stopped and resumed.

Does not know HTTP or real models.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chat import babbling_target
from paceline.core import SamplingParams
from paceline.data.fingerprint import Fingerprint
from paceline.data.formats import Problems, RowError, parse_row
from paceline.data.loops import loop_start
from paceline.data.regenerate import Answer, Ask, InProcess, Settings, Walk, regenerate
from paceline.data.rows import RowFile
from paceline.data.selfwrite import fill, fold, user_prefix, write_prompts
from paceline.data.template import Template
from paceline.drafters.ngram import NgramDrafter
from paceline.pipeline import Pipeline

PRINT = Fingerprint(weights="w", tokenizer="t", template="c")
TARGET = babbling_target()
PIPELINE = Pipeline(target=TARGET)
TEMPLATE = Template(tokenizer=TARGET.tokenizer)
GREEDY = Settings(max_new_tokens=24)
SAMPLED = Settings(max_new_tokens=24, temperature=1.0, seed=5)

TWO_TURNS = {
    "messages": [
        {"role": "user", "content": "What now?"},
        {"role": "assistant", "content": "Not the target's words."},
        {"role": "user", "content": "And then?"},
    ]
}
CHATS = [{"prompt": text} for text in ("Hi", "abc def", "what?", "Hi", "a longer one")] + [
    TWO_TURNS
]


def conversations(*rows: Any) -> list[Any]:
    return [parse_row(row, place=f"in:{n}", source="in") for n, row in enumerate(rows, 1)]


def answer(
    path: Path, rows: Any = CHATS, settings: Settings = GREEDY, batch: int = 3, **parts: Any
) -> tuple[dict[str, int], Problems]:
    problems = Problems()
    made = parts.get("answerer") or InProcess(
        replace(PIPELINE, drafter=parts.get("drafter")), settings, batch_size=batch
    )
    with RowFile(path, PRINT, {}) as out:
        found = conversations(*rows)
        return regenerate(found, made, TEMPLATE, out, problems, settings), problems


def by_key(path: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(Counter(row["key"] for row in rows).values()) == 1
    return {row["key"]: row for row in rows}


def test_rows_are_what_plain_generation_answers(tmp_path: Path) -> None:
    counts, problems = answer(tmp_path / "rows.jsonl")
    rows = list(by_key(tmp_path / "rows.jsonl").values())
    params = SamplingParams(max_tokens=24)
    for row in rows:
        (want,) = PIPELINE.generate([row["prompt_ids"]], params)
        ids = want.outputs[0].token_ids
        assert row["response_ids"] == ids[: loop_start(ids)] and row["temperature"] == 0.0
    assert counts["rows"] == len(rows) == 6 and counts["repeated"] == 1 and not problems.rows
    assert counts["supervised"] == sum(len(row["response_ids"]) for row in rows)


def test_the_targets_reply_stands_in_the_history_in_place_of_the_files(tmp_path: Path) -> None:
    answer(tmp_path / "rows.jsonl", [TWO_TURNS])
    first, second = by_key(tmp_path / "rows.jsonl").values()
    asked = TEMPLATE.decode(second["prompt_ids"])
    assert "Not the target's words." not in asked and "And then?" in asked
    assert first["reply"]["content"] in asked and first["reply"]["content"].strip()


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_do_not_depend_on_the_batch_or_on_a_drafter(
    settings: Settings, tmp_path: Path
) -> None:
    answer(tmp_path / "one.jsonl", settings=settings, batch=1)
    alone = by_key(tmp_path / "one.jsonl")
    for batch in (2, 7):
        answer(tmp_path / f"{batch}.jsonl", settings=settings, batch=batch)
        assert by_key(tmp_path / f"{batch}.jsonl") == alone
    answer(tmp_path / "drafted.jsonl", settings=settings, drafter=NgramDrafter())
    assert by_key(tmp_path / "drafted.jsonl") == alone


class Counted(InProcess):
    """Counts its rounds."""

    rounds = 0

    def collect(self) -> list[tuple[Ask, Answer | RowError]]:
        self.rounds += 1
        return super().collect()


def test_loops_are_ended_early_and_cut_alike_with_and_without_a_drafter(tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=300)
    rows = [{"prompt": "Hi"}, {"prompt": "what?"}]
    counted = Counted(PIPELINE, settings, batch_size=2)
    counts, _ = answer(tmp_path / "plain.jsonl", rows, settings, answerer=counted)
    assert counted.rounds < 200
    plain = by_key(tmp_path / "plain.jsonl")
    looping = [row for row in plain.values() if row["finish"] == "loop"]
    assert counts["loops"] == len(looping) > 0
    for row in looping:
        assert loop_start(row["response_ids"]) == len(row["response_ids"])
        (whole,) = PIPELINE.generate([row["prompt_ids"]], SamplingParams(max_tokens=200))
        ids = whole.outputs[0].token_ids
        assert row["response_ids"] == ids[: loop_start(ids)]
    answer(tmp_path / "drafted.jsonl", rows, settings, drafter=NgramDrafter())
    assert by_key(tmp_path / "drafted.jsonl") == plain


def test_another_seed_or_temperature_adds_rows_and_the_same_adds_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "Hi"}, {"prompt": "what?"}]
    for settings, total in (
        (SAMPLED, 2),
        (SAMPLED, 2),
        (replace(SAMPLED, seed=6), 4),
        (replace(SAMPLED, temperature=0.7), 6),
    ):
        answer(path, rows, settings)
        assert len(by_key(path)) == total
    replies = {tuple(row["response_ids"]) for row in by_key(path).values()}
    assert len(replies) > 2


def test_another_seed_adds_nothing_to_greedy_rows(tmp_path: Path) -> None:
    path, greedy = tmp_path / "rows.jsonl", replace(SAMPLED, temperature=0.0)
    for settings in (greedy, replace(greedy, seed=6), replace(greedy, top_p=0.5)):
        answer(path, [{"prompt": "Hi"}, {"prompt": "what?"}], settings)
        assert len(by_key(path)) == 2


def test_a_call_behind_a_text_of_the_same_speaker_stays_with_its_result() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "Look it up"},
        {"role": "assistant", "content": "I will"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    walk = Walk(parse_row({"messages": turns}, place="", source=""))
    assert walk.question() is not None
    walk.answered({"role": "assistant", "content": "new"})
    found = walk.question()
    assert found is not None and [m["role"] for m in found] == ["user", "assistant", "tool"]
    assert found[1]["tool_calls"] == [call]


@pytest.mark.parametrize("torn", [False, True])
def test_a_stopped_run_resumes_without_repeats_and_ends_the_same(
    torn: bool, tmp_path: Path
) -> None:
    answer(tmp_path / "whole.jsonl")
    whole = by_key(tmp_path / "whole.jsonl")
    path = tmp_path / "stopped.jsonl"

    def stop(tokens: int) -> None:
        if path.read_text().count("\n") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), RowFile(path, PRINT, {}) as out:
        regenerate(
            conversations(*CHATS),
            InProcess(PIPELINE, GREEDY, batch_size=2),
            TEMPLATE,
            out,
            Problems(),
            GREEDY,
            progress=stop,
        )
    if torn:
        path.write_bytes(path.read_bytes()[:-9])
    kept = path.read_bytes().rpartition(b"\n")[0]
    counts, _ = answer(path)
    assert path.read_bytes().startswith(kept) and by_key(path) == whole
    assert counts["rows"] == len(whole) - (2 if torn else 3)


def test_a_prompt_beyond_the_context_is_named_and_the_others_are_answered(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 600}, {"prompt": "Hi"}, {"prompt": "x" * 600}]
    counts, problems = answer(tmp_path / "rows.jsonl", rows)
    assert counts["rows"] == 1
    assert [(p["place"], p["reason"]) for p in problems.rows] == [
        ("in:1", "too-long"),
        ("in:3", "too-long"),
    ]


class Fails:
    """Answers with an error to one question, at once, and with a fixed reply to the others."""

    slots = 4

    def __init__(self, bad: str) -> None:
        self.bad, self.open = bad, list[Ask]()

    def submit(self, ask: Ask) -> None:
        self.open.append(ask)

    def collect(self) -> list[tuple[Ask, Answer | RowError]]:
        done, self.open = self.open, []
        reply = Answer(
            response_ids=[1], finish="stop", message={"role": "assistant", "content": "ok"}
        )
        return [
            (
                a,
                RowError("endpoint-failed", "x")
                if a.messages[-1]["content"] == self.bad
                else reply,
            )
            for a in done
        ]

    def close(self) -> None:
        """Nothing."""


def test_every_conversation_that_waited_for_a_failed_reply_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi"}, {"prompt": "no"}, {"prompt": "no"}, {"turns": ["Hi", "no", "Hi"]}]
    counts, problems = answer(tmp_path / "rows.jsonl", rows, answerer=Fails("no"))
    assert counts["rows"] == 1
    assert sorted(p["place"] for p in problems.rows) == ["in:2", "in:3", "in:4"]


def test_a_walk_keeps_the_files_tool_calls_and_asks_behind_the_results() -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    row = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Thanks."},
        ]
    }
    (chat,) = conversations(row)
    walk, asked = Walk(chat), []
    while messages := walk.question():
        asked.append([m["role"][0] + m["content"] for m in messages])
        walk.answered({"role": "assistant", "content": f"own{len(asked)}"})
    head = ["ss", "uAdd."]
    assert asked == [head, [*head, "a", "t1", "t2"], [*head, "a", "t1", "t2", "aown2", "uThanks."]]


# Self-written prompts


def prompts(path: Path, count: int, **parts: Any) -> tuple[int, Counter[str], list[Any]]:
    dropped: Counter[str] = Counter()
    with RowFile(path, PRINT, {}) as out:
        written = fill(PIPELINE, TEMPLATE, out, count, dropped=dropped, max_new_tokens=48, **parts)
        return written, dropped, [out.row(key) for key in out.keys()]


def test_a_users_turn_begins_and_ends_where_the_template_says() -> None:
    before, ends, text = user_prefix(TEMPLATE)
    assert TEMPLATE.decode(before) == "<|im_start|>user\n"
    assert [TEMPLATE.decode([end]) for end in ends] == ["<|im_end|>"] and not text
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n###\n{% endfor %}"
    words = babbling_target(plain).tokenizer
    assert user_prefix(Template(tokenizer=words))[1:] == (frozenset(), "###")
    with pytest.raises(ValueError, match="does not show where"):
        user_prefix(Template(tokenizer=babbling_target("Hi").tokenizer))


def test_prompts_are_new_usable_texts_and_a_further_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    written, dropped, rows = prompts(path, 3, batch_size=4)
    assert written == 3 == len(rows)
    assert dropped["short"] + dropped["endless"] + dropped["garbled"] > 0
    first = path.read_bytes()
    assert prompts(path, 3, batch_size=4)[0] == 0 and path.read_bytes() == first
    written, _, rows = prompts(path, 5, batch_size=4)
    assert written == 2 and path.read_bytes().startswith(first)
    assert len({fold(row["prompt"]) for row in rows}) == 5 == len({row["seed"] for row in rows})
    for row in rows:
        assert len(row["prompt"].split()) >= 3
        assert "<|im_end|>" not in row["prompt"] and "\ufffd" not in row["prompt"]
        assert parse_row(row, place="", source="").question == row["prompt"]


def test_a_known_text_is_dropped_and_hopeless_models_end_the_search() -> None:
    _, text = next(write_prompts(PIPELINE, TEMPLATE, 1, known=set(), dropped=Counter()))
    dropped: Counter[str] = Counter()
    _, other = next(
        write_prompts(PIPELINE, TEMPLATE, 1, known={fold(text.upper())}, dropped=dropped)
    )
    assert other != text and dropped["repeated"] == 1
    none = list(
        write_prompts(PIPELINE, TEMPLATE, 2, known=set(), dropped=dropped, max_new_tokens=2)
    )
    assert not none and dropped["endless"] > 0


def test_a_text_written_twice_in_one_run_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["One two three four", "one  two three FOUR", "five six seven eight"] * 20)
    monkeypatch.setattr("paceline.data.selfwrite._text", lambda row, tokenizer: next(texts))
    dropped: Counter[str] = Counter()
    found = write_prompts(PIPELINE, TEMPLATE, 3, known=set(), dropped=dropped, max_new_tokens=48)
    assert sorted(fold(text) for _, text in found) == ["five six seven eight", "one two three four"]
    assert dropped["repeated"] > 0
