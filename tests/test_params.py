"""Sampling parameters refuse what they cannot mean; noise uses every bit of its seed.

Does not test what the parameters do to logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core import Noise, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "min_tokens", "seed", "n", "logprobs"])
def test_whole_numbers_are_whole(name: str) -> None:
    for bad in (1.0, True, "1", 1.5, NAN, [1]):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number"):
            SamplingParams(**{name: bad})
    made = getattr(SamplingParams(**{name: np.int64(1)}), name)
    assert made == 1 and type(made) is int


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "min_tokens", "n"])
def test_only_seed_and_logprobs_may_be_none(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: None})


FLOATS = "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty".split()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_finite_numbers(name: str) -> None:
    for bad in (NAN, INF, -INF, "1", None, True, 1j):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: bad})
    assert type(getattr(SamplingParams(**{name: np.float32(1)}), name)) is float


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"logit_bias": {3: NAN}}, "logit_bias"),
        ({"logit_bias": {3: -INF}}, "logit_bias"),
        ({"logit_bias": {3.0: 1.0}}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logits_processors": 5}, "logits_processors"),
        ({"temperature": 9e-6}, "use 0 for greedy"),
        ({"temperature": 1e-300}, "use 0 for greedy"),
    ],
    ids=str,
)
def test_what_means_nothing_is_a_value_error(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**bad)


def test_ids_and_bias_become_plain_numbers() -> None:
    params = SamplingParams(
        temperature=1e-5, stop="x", stop_token_ids=np.array([3, 4]), logit_bias={np.int64(1): 2}
    )
    assert params.stop == ("x",) and params.stop_token_ids == (3, 4)
    assert params.logit_bias == {1: 2.0} and type(next(iter(params.logit_bias))) is int


def test_every_bit_of_a_seed_counts_and_it_may_be_negative() -> None:
    seeds = [0, 1, -1, 1 + 2**32, 1 + 2**62, 1 + 2**63, 1 + 2**64, 1_000_004]
    numbers = {Noise(seed).uniform(stream, 0) for seed in seeds for stream in ("target", "draft")}
    assert len(numbers) == 2 * len(seeds)


def test_a_number_depends_on_its_address_only() -> None:
    there, back = Noise(7), Noise(7)
    forward = [there.uniform("target", i) for i in range(600)]
    back.uniform("draft", 3)
    assert forward == [back.uniform("target", i) for i in reversed(range(600))][::-1]
    assert all(0 <= number < 1 for number in forward)
    assert abs(float(np.mean(forward)) - 0.5) < 0.05
