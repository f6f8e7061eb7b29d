"""Self-written corpus rows: one per prompt, resumed without repeats, readable by the corpus.

Does not know real models.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.pipeline import Pipeline
from paceline.train.corpus import read_corpus
from paceline.train.selftext import write_replies
from tiny import tiny_target


def test_rows_are_written_once_and_read_back(tmp_path: Path) -> None:
    out, pipeline = tmp_path / "text.jsonl", Pipeline(target=tiny_target())
    prompts = [[3, 4, i] for i in range(6)]
    options = {"source": "test", "max_new_tokens": 5, "batch_size": 2}
    write_replies(pipeline, prompts[:4], out, **options)  # type: ignore[arg-type]
    first = out.read_text()
    write_replies(pipeline, prompts, out, **options)  # type: ignore[arg-type]
    assert out.read_text().startswith(first)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt_ids"] for row in rows] == prompts
    assert [row["temperature"] for row in rows] == [0.0, 0.0, 0.6, 0.6, 0.0, 0.0]
    assert len(read_corpus([out], max_tokens=64, min_reply=4, held_out_share=0.0)) == 6


def test_a_run_killed_at_any_byte_goes_on_as_it_would_have(tmp_path: Path) -> None:
    out, pipeline = tmp_path / "text.jsonl", Pipeline(target=tiny_target())
    prompts = [[3, 4, i] for i in range(5)]
    options = {"source": "test", "max_new_tokens": 5, "batch_size": 2}
    write_replies(pipeline, prompts, out, **options)  # type: ignore[arg-type]
    whole = out.read_bytes()
    for size in (0, 9, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1):
        out.write_bytes(whole[:size])
        write_replies(pipeline, prompts, out, **options)  # type: ignore[arg-type]
        assert out.read_bytes() == whole, size
