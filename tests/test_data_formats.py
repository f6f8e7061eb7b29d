"""Conversations of every shape are read; every kind of malformed row is named and passed over.

Does not know tokenizers.
"""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from paceline.data.formats import Conversation, Problems, RowError, parse_row, read_conversations

U = {"role": "user", "content": "Hi"}
A = {"role": "assistant", "content": "Hello."}

MALFORMED: list[tuple[str, Any]] = [
    ("broken-json", b'{"prompt": "cut off'),
    ("not-utf-8", b'{"prompt": "\xff\xfe"}'),
    ("not-an-object", [1, 2]),
    ("not-an-object", {"messages": ["Hi"]}),
    ("not-a-list", {"messages": "Hi"}),
    ("no-known-field", {"id": 7}),
    ("empty", {"messages": []}),
    ("empty", {"conversations": []}),
    ("assistant-first", {"messages": [A, U, A]}),
    ("assistant-first", {"conversations": [{"from": "gpt", "value": "Hello."}]}),
    ("tool-first", {"messages": [{"role": "tool", "content": "1"}, A]}),
    ("system-only", {"messages": [{"role": "system", "content": "Be brief."}]}),
    ("unknown-role", {"messages": [U, {"role": "llama-3", "content": "Hello."}]}),
    ("unknown-role", {"messages": [U, {"content": "Hello."}]}),
    ("null-content", {"messages": [U, {"role": "assistant", "content": None}]}),
    ("null-content", {"conversations": [{"from": "human", "value": None}]}),
    ("empty-content", {"messages": [U, {"role": "assistant", "content": "  "}]}),
    ("empty-content", {"prompt": ""}),
    ("not-text", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}),
    ("not-text", {"prompt": 5}),
    ("not-unicode", b'{"prompt": "half \\ud83d"}'),
    ("not-unicode", b'{"prompt": "Hi", "tools": [{"name": "\\udc00"}]}'),
    ("already-tokens", {"prompt": "Hi", "prompt_ids": [1], "response_ids": [2]}),
    ("bad-tools", {"messages": [U, A], "tools": "not json"}),
    ("bad-tools", {"messages": [U, A], "tools": [1]}),
    ("bad-tool-call", {"messages": [U, {"role": "assistant", "tool_calls": [{}]}]}),
]


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def read(path: Path | str, problems: Problems | None = None) -> list[Conversation]:
    return list(read_conversations(path, problems or Problems()))


@pytest.mark.parametrize("reason, row", MALFORMED)
def test_a_malformed_row_is_named_and_the_next_row_is_read(
    reason: str, row: Any, tmp_path: Path
) -> None:
    said: list[str] = []
    problems = Problems(report=said.append)
    path = write(tmp_path / "data.jsonl", [{"prompt": "one"}, row, {"prompt": "two"}])
    assert [c.question for c in read(path, problems)] == ["one", "two"]
    assert dict(problems.counts) == {reason: 1}
    assert said[0].startswith(f"{path}:2: {reason}")
    assert problems.rows[0]["place"] == f"{path}:2"


@pytest.mark.parametrize(
    "row, roles",
    [
        ({"messages": [{"role": "system", "content": "s"}, U, A]}, "system user assistant"),
        (
            {"conversations": [{"from": f, "value": "x"} for f in ("system", "human", "gpt")]},
            "system user assistant",
        ),
        (
            {"conversations": [{"from": f, "value": "x"} for f in ("human", "gpt", "tool", "gpt")]},
            "user assistant tool assistant",
        ),
        ({"prompt": "p", "completion": "c"}, "user assistant"),
        ({"prompt": "p", "response": "c"}, "user assistant"),
        ({"prompt": [U], "completion": [A]}, "user assistant"),
        ({"prompt": "p"}, "user"),
        ({"question": "p"}, "user"),
        ({"text": "p"}, "user"),
        ({"turns": ["p", "q"]}, "user user"),
    ],
)
def test_every_shape_is_read(row: Any, roles: str, tmp_path: Path) -> None:
    (found,) = read(write(tmp_path / "data.jsonl", [row]))
    assert " ".join(m["role"] for m in found.messages) == roles
    assert all(isinstance(m["content"], str) for m in found.messages)


def test_tools_reasoning_and_calls_are_kept_and_arguments_become_objects(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        U,
        {"role": "assistant", "content": None, "reasoning_content": "Sum.", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        A | {"weight": 1},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": messages, "tools": json.dumps(tools)}
    (found,) = read(write(tmp_path / "data.jsonl", [row]))
    assert found.tools == tools
    said = found.messages[1]
    assert said["reasoning_content"] == "Sum." and said["content"] == ""
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert found.messages[2]["tool_call_id"] == "1"
    assert found.messages[3] == A


def test_arrays_gzip_marks_and_line_separators_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"messages": []}, {"prompt": "a\u2028b"}]
    array = tmp_path / "dump.json"
    array.write_text(json.dumps(rows), encoding="utf-8-sig")
    problems = Problems()
    assert [c.place for c in read(array, problems)] == [f"{array}[0]", f"{array}[2]"]
    assert problems.rows[0]["place"] == f"{array}[1]"
    packed = tmp_path / "lines.jsonl.gz"
    text = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    packed.write_bytes(gzip.compress(text.encode()))
    assert [c.question for c in read(packed)] == ["one", "a\u2028b"]


def test_limit_counts_usable_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [b"{", {"prompt": "one"}, {"prompt": "two"}])
    assert len(list(read_conversations(path, Problems(), limit=1))) == 1


def test_a_missing_file_and_a_broken_array_are_users_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "half.json").write_text('[{"prompt": "one"},')
    with pytest.raises(ValueError, match="half.json: not one JSON array"):
        read(tmp_path / "half.json")
    whole = gzip.compress(b'{"prompt": "one"}\n' * 1000)
    for name, data in {"cut.jsonl.gz": whole[:-12], "not.jsonl.gz": b"plain text"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}: not a whole gzip file"):
            read(tmp_path / name)


def test_a_data_set_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[Any]:
        asked.append((name, config, split))
        # Arrow fills what other rows have with null.
        message = {"role": "user", "content": "Hi", "tool_calls": None}
        return [{"messages": [message], "prompt": None, "tools": None}, {"messages": None}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    problems = Problems()
    assert [c.place for c in read("owner/chats:test", problems)] == ["owner/chats:test[0]"]
    assert [c.place for c in read("owner/chats:en:dev", problems)] == ["owner/chats:en:dev[0]"]
    assert asked == [("owner/chats", None, "test"), ("owner/chats", "en", "dev")]
    assert dict(problems.counts) == {"no-known-field": 2}


def test_a_broken_line_does_not_make_a_folder_useless(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n{broken\n')
    (tmp_path / "b.json").write_text('[{"question": "two"}]')
    (tmp_path / "README.md").write_text("about")
    problems = Problems()
    assert [c.question for c in read(tmp_path, problems)] == ["one", "two"]
    assert dict(problems.counts) == {"broken-json": 1}


def test_a_folder_with_splits_is_left_to_the_library(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "learn"}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "never"}\n')
    import datasets

    datasets.disable_progress_bars()
    assert [c.question for c in read(tmp_path)] == ["learn"]
    assert [c.question for c in read(f"{tmp_path}:test")] == ["never"]


def test_system_text_beside_the_messages_and_calls_of_their_own_role() -> None:
    turns = [{"from": "human", "value": "2 + 2?"}]
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    row = {"conversations": [*turns, call, {"from": "observation", "value": "4"}]}
    found = parse_row(row | {"system": "Be brief."}, place="", source="").messages
    assert [m["role"] for m in found] == ["system", "user", "assistant", "tool"]
    assert found[0]["content"] == "Be brief."
    assert found[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    told = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    found = parse_row({"messages": told, "system_prompt": "Theirs."}, place="", source="").messages
    assert found == told
    with pytest.raises(RowError, match="bad-tool-call"):
        parse_row({"conversations": [*turns, call | {"value": "add"}]}, place="", source="")
    deep = "[" * 100_000
    for extra in ({"tools": deep}, {"conversations": [*turns, call | {"value": deep}]}):
        with pytest.raises(RowError, match="bad-tool"):
            parse_row({"conversations": turns} | extra, place="", source="")


def test_tables_and_saved_data_sets_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    turns = [
        [{"role": "user", "content": "Hi", "name": "Ann"}],
        [{"role": "user", "content": "Ho"}],
    ]
    chats = datasets.Dataset.from_list([{"messages": turn} for turn in turns])
    (tmp_path / "folder").mkdir()
    chats.to_parquet(tmp_path / "one.parquet")
    chats.to_parquet(tmp_path / "folder" / "train.parquet")
    chats.save_to_disk(tmp_path / "saved")
    for name in ("one.parquet", "folder", "folder:train", "saved"):
        found = read(f"{tmp_path}/{name}")
        assert [c.messages for c in found] == turns, "no nulls that other rows' fields bring"
    datasets.Dataset.from_dict({"prompt": ["one", "two, three"]}).to_csv(tmp_path / "t.csv")
    assert [c.messages[0]["content"] for c in read(tmp_path / "t.csv")] == ["one", "two, three"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"bad\.parquet: neither a file nor a data set"):
        read(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"none\.csv: neither a file nor a data set"):
        read(tmp_path / "none.csv")


def test_without_the_datasets_library_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"paceline\[train\]"):
        read("owner/chats")
