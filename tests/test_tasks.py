"""Tasks: every file shape becomes questions, a limit chooses by size and place, mistakes are named.

Does not run any model.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.evaluate.tasks import FILES, find_task, load_tasks, read_task


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def asked(turns: Any) -> list[list[str]]:
    return [[f"{m['role']}: {m['content']}" for m in turn] for turn in turns]


def test_the_built_in_task_has_six_kinds_of_four_and_more() -> None:
    (task,) = load_tasks(["builtin"], None, None)
    kinds = Counter(question.category for question in task.questions)
    assert set(kinds) == {"code", "maths", "chat", "summary", "translation", "extraction"}
    assert min(kinds.values()) >= 4 and len(task.questions) == task.rows >= 24
    assert task.requests == sum(task.categories.values()) > task.rows  # some have two turns
    texts = [str(question.turns[0][0]["content"]) for question in task.questions]
    assert len(set(texts)) == len(texts) and task.left_out == {}


def test_public_files_by_name(tmp_path: Path) -> None:
    write(tmp_path / FILES["gsm8k"], [{"question": "How many?", "answer": "#### 3"}])
    write(tmp_path / FILES["humaneval"], [{"task_id": "X/0", "prompt": "def f():\n"}])
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["Compose.", "Again."]},
        {"question_id": 2, "category": "coding", "turns": ["Code.", "More."]},
        {"question_id": 3, "category": "qa", "turns": ["Who?"]},
    ]
    write(tmp_path / FILES["spec_bench"], rows)
    gsm8k, code, spec = load_tasks(["gsm8k", "humaneval", "spec_bench"], tmp_path, None)
    assert asked(gsm8k.questions[0].turns) == [["user: How many?"]]
    assert asked(code.questions[0].turns) == [["user: def f():\n"]]
    assert gsm8k.categories == code.categories == {}
    assert spec.categories == {"mt_bench": 4, "qa": 1} and spec.requests == 5
    assert asked(spec.questions[0].turns) == [["user: Compose."], ["user: Again."]]


def test_a_users_file_keeps_its_history_and_leaves_out_the_reply(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    reply, more = {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}
    tool = {"role": "tool", "content": "T"}
    rows = [
        {"prompt": "P", "completion": "C", "category": "mine"},
        {"messages": [system, user, reply]},
        {"messages": [system, user, reply, more]},
        {"messages": [system, user, more]},
        {"messages": [user, reply, tool, more]},
        {"messages": [user, reply, tool]},
    ]
    task = read_task("mine", write(tmp_path / "mine.jsonl", rows))
    assert [asked(question.turns) for question in task.questions] == [
        [["user: P"]],
        [["system: S", "user: U"]],
        [["system: S", "user: U", "assistant: A", "user: V"]],
        [["system: S", "user: U"], ["user: V"]],
        [["user: U", "assistant: A", "tool: T", "user: V"]],
        [["user: U", "assistant: A", "tool: T"]],
    ]
    assert task.categories == {"mine": 1}


def test_malformed_rows_are_counted_and_keep_the_row_numbers(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{broken\n{"prompt": "b", "category": true}\n{"prompt": "c"}\n'
    )
    told: list[str] = []
    (task,) = load_tasks([str(file)], None, None, tell=told.append)
    assert task.name == "mine" and task.rows == 4
    assert [question.row for question in task.questions] == [0, 3]
    assert task.left_out == {"broken-json": 1, "bad-category": 1}
    assert told == ["task mine: rows left out: 1 broken-json, 1 bad-category"]


def test_integer_categories_are_names(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "category": 7}, {"prompt": "b", "category": 0}]
    assert read_task("mine", write(tmp_path / "mine.jsonl", rows)).categories == {"7": 1, "0": 1}


def spread(tmp_path: Path, sizes: dict[str, int], limit: int) -> list[tuple[int, str | None]]:
    rows = [
        {"prompt": f"{kind} {i}", "category": kind} for kind in sizes for i in range(sizes[kind])
    ]
    (task,) = load_tasks([str(write(tmp_path / "mine.jsonl", rows))], None, limit)
    return [(question.row, question.category) for question in task.questions]


def test_a_limit_takes_each_category_by_its_size_and_spreads_over_the_file(tmp_path: Path) -> None:
    chosen = spread(tmp_path, {"a": 60, "b": 30, "c": 10}, 10)
    assert Counter(kind for _, kind in chosen) == {"a": 6, "b": 3, "c": 1}
    assert [row for row, _ in chosen] == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert spread(tmp_path, {"a": 60, "b": 30, "c": 10}, 10) == chosen
    assert Counter(k for _, k in spread(tmp_path, {"a": 5, "b": 5, "c": 5}, 7)) == {
        "a": 3,
        "b": 2,
        "c": 2,
    }
    assert len(spread(tmp_path, {"a": 2, "b": 1}, 3)) == 3


def test_a_limit_above_the_file_is_told_once(tmp_path: Path) -> None:
    file, told = write(tmp_path / "mine.jsonl", [{"prompt": "a"}]), list[str]()
    (task,) = load_tasks([str(file)], None, 9, tell=told.append)
    assert len(task.questions) == 1
    assert told == ["task mine has 1 prompts, fewer than the limit 9"]


def test_what_does_not_fit_a_target_does_not_change_what_was_chosen(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", [{"prompt": "x" * n} for n in (1, 9, 2, 9, 3)])

    def fits(question: Any) -> str | None:
        return "too-long" if len(question.turns[0][0]["content"]) > 5 else None

    (chosen,) = load_tasks([str(file)], None, 3)
    told: list[str] = []
    task = chosen.keep(fits, told.append)
    assert [question.row for question in chosen.questions] == [0, 2, 4]
    (chosen,) = load_tasks([str(file)], None, 4)
    task = chosen.keep(fits, told.append)
    assert [question.row for question in chosen.questions] == [0, 1, 3, 4]
    assert [question.row for question in task.questions] == [0, 4]
    assert task.left_out == {"too-long": 2}
    assert told == ["task mine: prompts left out: 2 too-long"]
    with pytest.raises(ValueError, match="mine: no usable prompt .*too-long"):
        chosen.keep(lambda question: "too-long")


def test_a_folder_that_no_task_needs_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    load_tasks(["builtin"], tmp_path, None, tell=told.append)
    assert told == [
        "--tasks-dir is not used: none of the tasks is one of gsm8k, humaneval, spec_bench"
    ]


def test_the_fingerprint_is_of_the_chosen_prompts(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    prints = [load_tasks([str(file)], None, n)[0].describe()["fingerprint"] for n in (1, 2, 2)]
    write(file, [{"prompt": "a"}, {"prompt": "c"}])
    prints.append(load_tasks([str(file)], None, 2)[0].describe()["fingerprint"])
    assert prints[1] == prints[2] and len(set(prints)) == 3


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        find_task("gsm8kk", tmp_path)
    with pytest.raises(ValueError, match="needs --tasks-dir.*humaneval.jsonl"):
        find_task("humaneval", None)
    with pytest.raises(ValueError, match="spec_bench.jsonl does not exist"):
        find_task("spec_bench", tmp_path)
    with pytest.raises(ValueError, match="once each"):
        load_tasks(["builtin", "builtin"], None, None)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_tasks(["builtin"], None, 0)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty.jsonl: no usable prompt"):
        load_tasks([str(tmp_path / "empty.jsonl")], None, None)
