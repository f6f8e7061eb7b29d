"""Estimates add up, rates are measured on the machine, and files are looked at as they are.

Does not know commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chat import babbling_target
from paceline.data.estimate import estimate, measure_capture, measure_generation
from paceline.data.formats import Problems, read_conversations
from paceline.data.template import Template
from paceline.data.view import is_row_file, open_rows, plan, shape_counts
from paceline.pipeline import Pipeline

TARGET = babbling_target()
TEMPLATE = Template(tokenizer=TARGET.tokenizer)
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "3+3?"},
    ]
}
ROWS = [
    {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "key": "a"},
    {"prompt_ids": [1], "response_ids": [2, 3, 4], "key": "b"},
]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_totals_bytes_and_hours() -> None:
    total = estimate([(100, 50), (20, 30)], taps=5, hidden_size=64)
    assert (total.rows, total.tokens, total.supervised) == (2, 200, 80)
    assert total.feature_bytes == 200 * 5 * 64 * 2
    assert total.capture_hours is None and total.generate_hours is None
    assert total.lines() == [
        "2 rows, 200 tokens, 80 of them replies",
        "features: 128.0 KB (tokens x taps x hidden x 2 bytes)",
    ]
    timed = total.at(capture_rate=0.05, generate_rate=0.001)
    assert timed.capture_hours == pytest.approx(200 / 0.05 / 3600)
    assert timed.generate_hours == pytest.approx(80 / 0.001 / 3600)
    assert timed.lines()[2:] == [
        "capture: 67 minutes at 0 tokens/s",
        "generation: 22.2 hours at 0 tokens/s",
    ]
    assert timed.figures()["generate_hours"] == timed.generate_hours
    json.dumps(timed.figures(), allow_nan=False)


def test_speed_is_tokens_over_the_time_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("paceline.data.estimate.time.perf_counter", lambda: clock[0])
    calls: list[int] = []

    def tick(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(kwargs["input_ids"].shape[1])
        clock[0] += 0.5

    hook = TARGET.model.get_decoder().register_forward_pre_hook(tick, with_kwargs=True)
    try:
        assert measure_capture(TARGET, [[1] * 10, [2] * 30], seconds=1.0) == (30 + 10) / 1.0
        assert calls == [10, 30, 10]  # the first builds kernels and does not count
        long = measure_capture(TARGET, [[1] * 9999], seconds=0.1)
        assert long == TARGET.max_length / 0.5
    finally:
        hook.remove()


def test_generation_is_measured_with_a_full_batch_and_leaves_the_target_as_it_was() -> None:
    pipeline = Pipeline(target=TARGET)
    before = pipeline.generate("Hi").pop().outputs[0].token_ids
    rate = measure_generation(pipeline, [[1, 2, 3], [7] * 9999], batch_size=4, seconds=0.05)
    assert rate > 0 and torch.isfinite(torch.tensor(rate))
    assert pipeline.generate("Hi").pop().outputs[0].token_ids == before
    total = estimate([(3, 2)], taps=1, hidden_size=8).measured(pipeline, [[1, 2]], 2, 0.02)
    assert total.generate_rate and total.capture_rate is None
    total = total.measured(pipeline, [[1, 2]], 2, 0.02, capture=True)
    assert total.capture_rate


def test_rows_count_as_they_are_and_conversations_as_they_would_be_answered(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", *ROWS)
    total, sample = plan(rows, TEMPLATE, None, 100, taps=2, hidden_size=8)
    assert (total.rows, total.tokens, total.supervised) == (2, 9, 5)
    assert sample == [[1, 2, 3], [1]]
    chats = write(tmp_path / "chats.jsonl", CHAT, {"messages": []}, {"prompt": "Hi"})
    total, sample = plan(chats, TEMPLATE, None, 100, taps=2, hidden_size=8)
    assert (total.rows, total.supervised) == (3, 300)
    first = len(TEMPLATE.prompt(CHAT["messages"][:2]))
    history = [*CHAT["messages"][:2], {"role": "assistant", "content": "."}, CHAT["messages"][3]]
    second = len(TEMPLATE.prompt(history)) + 100  # its history holds a reply of 100 tokens
    assert (
        total.tokens
        == first + second + len(TEMPLATE.prompt([{"role": "user", "content": "Hi"}])) + 300
    )
    assert plan(chats, TEMPLATE, 1, 100, taps=2, hidden_size=8)[0].rows == 2
    with pytest.raises(ValueError, match="no usable row; `paceline data check` says why"):
        plan(write(tmp_path / "none.jsonl", {"messages": []}), TEMPLATE, None, 9, 1, 8)


def test_a_tool_call_of_the_file_adds_no_reply_to_the_history(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    path = write(tmp_path / "tools.jsonl", {"messages": messages})
    total, sample = plan(path, TEMPLATE, None, 100, taps=1, hidden_size=8)
    assert total.tokens == sum(map(len, sample)) + 200


def test_counts_of_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", CHAT, {"prompt": "Hi"}, {"prompt": "a", "response": "b"})
    problems = Problems()
    counts = shape_counts(read_conversations(path, problems), TEMPLATE, problems)
    assert counts == {
        "usable": 3, "with_replies": 2, "multi_turn": 1, "with_system": 1, "with_tools": 0,
        "replies": 2, "rows": 2,
    }  # fmt: skip
    assert "rows" not in shape_counts(read_conversations(path, problems), None, problems)


def test_rows_and_conversations_are_opened_alike(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", *ROWS)
    chats = write(tmp_path / "chats.jsonl", {"prompt": "a", "response": "b"}, [1], {"prompt": "Hi"})
    assert is_row_file(rows) and not is_row_file(chats)
    problems = Problems()
    assert [row["finish"] for _, row in open_rows(rows, TEMPLATE, problems)] == ["?", "?"]
    found = list(open_rows(chats, TEMPLATE, problems))
    assert [(place, row["finish"]) for place, row in found] == [
        (f"{chats}:1", "stop"),
        (f"{chats}:3", "not answered yet"),
    ]
    assert TEMPLATE.decode(found[0][1]["response_ids"]) == "b<|im_end|>"
    assert [p["place"] for p in problems.rows] == [f"{chats}:2"]
    broken = write(tmp_path / "broken.jsonl", ROWS[0], {"prompt": "Hi"})
    with pytest.raises(ValueError, match=f"{broken}:2: no token row"):
        list(open_rows(broken, TEMPLATE, problems))
