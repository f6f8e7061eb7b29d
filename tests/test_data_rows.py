"""The row file survives a kill at any byte, never holds a row twice and knows what it is for.

Does not know templates or models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat import byte_tokenizer
from paceline.data.fingerprint import Fingerprint, meta_path, read_meta, write_meta
from paceline.data.formats import Problems, parse_row
from paceline.data.rows import RowFile, is_row, read_rows, row_key
from paceline.data.template import Template
from paceline.data.tokenise import tokenise

PRINT = Fingerprint(weights="w", tokenizer="t", template="c")
FACTS = {"target": "somewhere", "kind": "test"}


def row(number: int) -> dict[str, Any]:
    return {"key": row_key(n=number), "prompt_ids": [number], "response_ids": [1, 2]}


def keep(path: Path, *numbers: int) -> None:
    with RowFile(path, PRINT, FACTS) as rows:
        for number in numbers:
            if row(number)["key"] not in rows:
                rows.append(row(number))


def test_rows_are_appended_looked_up_and_kept_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    keep(path, 1, 2)
    with RowFile(path, PRINT, FACTS) as rows:
        assert not rows.repaired and len(rows) == 2
        rows.append(row(3))
        assert rows.keys() == [row(n)["key"] for n in (1, 2, 3)]
        assert [rows.row(key) for key in rows.keys()] == [row(n) for n in (1, 2, 3)]
    assert [found for _, found in read_rows(path)] == [row(n) for n in (1, 2, 3)]
    assert [place for place, _ in read_rows(path)] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_a_row_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    with RowFile(tmp_path / "rows.jsonl", PRINT, FACTS) as rows:
        rows.append(row(1))
        assert (tmp_path / "rows.jsonl").read_bytes().endswith(b"\n")


def test_a_file_cut_at_any_byte_ends_like_an_unbroken_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, 1, 2, 3)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with RowFile(path, PRINT, FACTS) as rows:
            assert rows.repaired == (size > 0 and whole[size - 1 : size] != b"\n")
        keep(path, 1, 2, 3)
        assert path.read_bytes() == whole, size


def test_the_sidecar_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    write_meta(path, PRINT, FACTS)
    before = meta_path(path).read_text()

    def killed(self: Path, text: str, **_: Any) -> int:
        with self.open("w") as stream:
            stream.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_meta(path, PRINT, {"kind": "other"})
    assert meta_path(path).read_text() == before


def test_a_file_for_other_weights_or_by_another_command_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, 1)
    held = path.read_bytes()
    other = Fingerprint(weights="x", tokenizer="t", template="c")
    with pytest.raises(ValueError, match="is stale: .*weights"):
        RowFile(path, other, FACTS)
    with pytest.raises(ValueError, match="begun with kind 'test', now 'tokenize'; name a new file"):
        RowFile(path, PRINT, {**FACTS, "kind": "tokenize"})
    RowFile(path, PRINT, {**FACTS, "target": "moved"}).__exit__(None, None, None)
    assert path.read_bytes() == held and (read_meta(path) or {})["target"] == "somewhere"


def test_what_is_no_row_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ValueError, match="does not say what it was written for"):
        RowFile(path, PRINT, FACTS)
    write_meta(path, PRINT, FACTS)
    for text in ("mine\n", '{"key": 1}\n[1]\n'):
        path.write_text(text)
        with pytest.raises(
            ValueError, match=rf"{path}:{text.count(chr(10))}: not a row with a key"
        ):
            RowFile(path, PRINT, FACTS)
        assert path.read_text() == text
    with pytest.raises(ValueError, match="gzip the file later"):
        RowFile(tmp_path / "rows.jsonl.gz", PRINT, FACTS)


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": "Hi"}', '{"prompt_ids": 1, "response_ids": [2]}']
)
def test_reading_rows_names_the_line_that_is_none(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(1)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"{path}:2: "):
        list(read_rows(path))


def test_keys_tell_all_parts_apart() -> None:
    keys = {row_key(**parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": [1]})}
    assert len(keys) == 5
    assert row_key(a=1, b=2) == row_key(b=2, a=1)


CHAT = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And a longer one? " * 3},
        {"role": "assistant", "content": "Six."},
    ]
}


def tokenised(path: Path, max_tokens: int, *rows: Any) -> tuple[dict[str, int], Problems]:
    problems = Problems()
    found = [parse_row(row, place=f"in:{n}", source="in") for n, row in enumerate(rows, 1)]
    with RowFile(path, PRINT, FACTS) as out:
        template = Template(tokenizer=byte_tokenizer())
        counts = tokenise(found, template, out, problems, max_tokens=max_tokens)
    return counts, problems


def test_conversations_become_one_row_per_reply_and_counts_add_up(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    counts, problems = tokenised(path, 400, CHAT, {"prompt": "Hi"}, CHAT)
    rows = [found for _, found in read_rows(path)]
    template = Template(tokenizer=byte_tokenizer())
    assert [template.decode(r["response_ids"]) for r in rows] == [
        "Four.<|im_end|>",
        "Six.<|im_end|>",
    ]
    assert [r["finish"] for r in rows] == ["stop", "stop"]
    assert rows[1]["prompt_ids"] == template.prompt(CHAT["messages"][:3])
    assert [(r["source"], r["prompt"], r["temperature"]) for r in rows] == [("in", "2+2?", 1.0)] * 2
    supervised = sum(len(r["response_ids"]) for r in rows)
    tokens = supervised + sum(len(r["prompt_ids"]) for r in rows)
    assert counts == {
        "rows": 2, "tokens": tokens, "supervised": supervised, "cut": 0, "repeated": 2
    }  # fmt: skip
    assert [(p["place"], p["reason"]) for p in problems.rows] == [("in:2", "no-reply")]
    again, _ = tokenised(path, 400, CHAT)
    assert (again["rows"], again["repeated"]) == (0, 2)
    assert [found for _, found in read_rows(path)] == rows


def test_a_long_row_is_cut_and_one_without_room_for_a_reply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prompt = len(Template(tokenizer=byte_tokenizer()).prompt(CHAT["messages"][:1]))
    counts, problems = tokenised(path, prompt + 3, CHAT)
    ((_, short),) = read_rows(path)
    assert len(short["response_ids"]) == 3 and short["finish"] == "length"
    assert (counts["rows"], counts["cut"]) == (1, 1)
    assert [(p["place"], p["reason"]) for p in problems.rows] == [("in:1", "too-long")]


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowFile(path, PRINT, {}) as first:
        first.append({"key": "a"})
        with path.open("ab") as stream:
            stream.write(b'{"half')  # what the first is writing
        with pytest.raises(ValueError, match="another process writes there"):
            RowFile(path, PRINT, {})
        assert path.read_bytes().endswith(b'{"half'), "the other's line was not cut"
    with RowFile(path, PRINT, {}) as again:
        assert "a" in again and again.repaired


@pytest.mark.parametrize("ids", [[-1], ["a"], [2**40], [1.5], [True]])
def test_ids_that_are_none_are_no_row(ids: list[Any]) -> None:
    assert not is_row({"prompt_ids": [1], "response_ids": ids})
