"""Prompt files: what counts as a line, and errors that name file and line.

Does not know models.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data.prompts import read_prompts


def test_lines_end_at_line_feeds_only_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = '\ufeff{"prompt": "a\u2028b\u0085c"}\r\n\n{"question": "é"}'
    file.write_bytes(rows.encode())
    got = [chat[0]["content"] for chat in read_prompts(file)]
    assert got == ["a\u2028b\u0085c", "é"]


@pytest.mark.parametrize("bad", [b'{"prompt": "\xff"}', b"{", b"[]", b"{}", b'{"messages": "a"}'])
def test_errors_name_file_and_line(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + bad + b"\n")
    with pytest.raises(ValueError, match=r"p\.jsonl:2: "):
        read_prompts(file)
    assert len(read_prompts(file, limit=1)) == 1
