"""Law 6, second half: ends, limits, stop strings, log-probabilities and counts of a round.

Does not know any real model; tokens of the toy tokenizer are short strings.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import TableLM, decode, drafters, new_row, truths
from paceline.core import Row, SamplingParams
from paceline.decode.accept import match
from paceline.decode.text import Detokenizer

NAMES = list(drafters(17, 1))


class Letters:
    """A tokenizer whose ids are strings: ab, cd, ef, ..."""

    def decode(self, ids: list[int], **options: Any) -> str:
        """Two letters per id."""
        return "".join("abcdefghijklmnopqrstuvwxyzABCDEFGH"[2 * i : 2 * i + 2] for i in ids)


def _both(
    params: SamplingParams, name: str, block: int, model: TableLM, eos: list[int], tokenizer: Any
) -> tuple[Row, Any]:
    (gold,) = truths(model, [[0]], [params], eos=eos, tokenizer=tokenizer)
    # The drafter peeks past the end, so that rounds really overshoot what may be committed.
    (far,) = truths(model, [[0]], [SamplingParams(max_tokens=60)])
    drafter = drafters(model.vocab, block, eos=eos[0])[name]({0: far.token_ids})
    text = Detokenizer(tokenizer, params.stop) if tokenizer else None
    (row,) = decode(model, [new_row([0], params, eos=eos, text=text)], drafter, match)
    return row, gold


def _agree(row: Row, gold: Any) -> None:
    assert row.output == gold.token_ids
    assert (row.finish_reason, row.stop_reason) == (gold.finish_reason, gold.stop_reason)
    assert sum(r.committed for r in row.rounds) == len(row.output)
    assert all(r.accepted <= min(r.drafted, r.committed) for r in row.rounds)
    if row.text is not None:
        row.text.finish()
        assert row.text.text == gold.text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", range(12))
def test_eos_at_every_position_of_the_block(after: int, name: str) -> None:
    """Nothing after EOS, wherever in the block, also as the first token and as bonus."""
    row, gold = _both(SamplingParams(), name, 5, TableLM.cycle(17, eos_after=after), [16], None)
    _agree(row, gold)
    assert row.output == [*range(1, after + 1), 16]
    assert row.stop_reason == 16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", range(21))
def test_max_tokens_is_exact(most: int, name: str) -> None:
    """Delivered equals asked, 0 included; EOS exactly at the cap is a stop."""
    for after in (None, 3, 4):
        model = TableLM.cycle(17, eos_after=after)
        _agree(*_both(SamplingParams(max_tokens=most), name, 8, model, [16], None))


@pytest.mark.parametrize("ids, most, want", [
    ([3], 5, (3, "stop")), ([8], 5, (5, "length")), ([5], 5, (5, "stop")),
])  # fmt: skip
def test_stop_beats_the_cap(ids: list[int], most: int, want: tuple[int, str]) -> None:
    """A stop id before, beyond and exactly at the cap."""
    params = SamplingParams(max_tokens=most, stop_token_ids=tuple(ids))
    row, gold = _both(params, "oracle", 16, TableLM.cycle(17), [16], None)
    _agree(row, gold)
    assert (len(row.output), row.finish_reason) == want


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("least", [0, 4, 7])
@pytest.mark.parametrize("stop", [
    ("kl",), ("l",), ("lm",), ("jklmno",), ("k", "lm"), ("mno", "ijkl"), ("zz",), ("cde", "GH"),
])  # fmt: skip
def test_stop_strings(stop: tuple[str, ...], least: int, block: int, name: str) -> None:
    """Inside a token, across tokens and rounds, several at once, never, and before min_tokens."""
    params = SamplingParams(stop=stop, min_tokens=least, max_tokens=30)
    row, gold = _both(params, name, block, TableLM.cycle(17), [16], Letters())
    _agree(row, gold)
    if least == 0:
        assert not any(s in row.text.text for s in stop)


def test_stop_id_and_stop_string_in_one_token() -> None:
    """The id wins, and the text is then not cut."""
    params = SamplingParams(stop=("k",), stop_token_ids=(5,), max_tokens=30)
    _agree(*_both(params, "oracle", 8, TableLM.cycle(17), [16], Letters()))


@pytest.mark.parametrize("top", [0, 3, 30])
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_equal_golden(name: str, top: int) -> None:
    """Of the unmodified logits at the very node; more alternatives than tokens is all tokens."""
    model = TableLM.random(17, seed=4)
    params = SamplingParams(
        logprobs=top, repetition_penalty=1.4, temperature=0.9, seed=2, max_tokens=20
    )
    (gold,) = truths(model, [[0]], [params])
    drafter = drafters(17, 6)[name]({0: gold.token_ids})
    (row,) = decode(model, [new_row([0], params)], drafter, match)
    assert gold.logprobs is not None and len(row.logprobs) == len(row.output)
    assert [entry.token for entry in row.logprobs] == row.output
    for got, want in zip(row.logprobs, gold.logprobs, strict=True):
        assert got.logprob == pytest.approx(want.logprob, abs=1e-6)
        assert [i for i, _ in got.top] == [i for i, _ in want.top]
        assert len(got.top) == min(top, 17)
        values = torch.tensor([value for _, value in got.top])
        assert torch.allclose(values, torch.tensor([value for _, value in want.top]), atol=1e-6)
