"""Law 6, first half: every sampling parameter acts at every draft node, as in the golden loop.

Does not know any real model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import TableLM, decode, drafters, new_row, truths
from paceline.core import Draft, SamplingParams
from paceline.decode.accept import match
from paceline.decode.warp import inverse_cdf, shape_probs, top, warp


def _even_after_three(ids: Tensor, scores: Tensor) -> Tensor:
    """Only even tokens once a 3 was seen: a constraint that depends on the path."""
    if 3 in ids[0].tolist():
        scores = scores.clone()
        scores[:, 1::2] = float("-inf")
    return scores


EFFECTS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {4: -100.0, 6: 1.5}},
    "min_tokens": {"min_tokens": 9},
    "processor": {"logits_processors": (_even_after_three,)},
}
EFFECTS["all"] = {
    name: value for effect in list(EFFECTS.values()) for name, value in effect.items()
}
CUTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "cut": {"temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.03},
}


@pytest.mark.parametrize("name", list(drafters(11, 1)))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("effect", EFFECTS)
def test_parameters_agree_with_golden(effect: str, cut: str, name: str) -> None:
    """Separately and together, in a batch whose other row has no such parameter."""
    model = TableLM.random(11, seed=3)
    changed = SamplingParams(max_tokens=24, seed=5, **EFFECTS[effect], **CUTS[cut])
    params = [changed, SamplingParams(max_tokens=20, seed=6, **CUTS[cut])]
    prompts = [[1, 2, 4], [5]]
    gold = truths(model, prompts, params, eos=[10])
    drafter = drafters(11, 5, eos=10)[name]({b: g.token_ids for b, g in enumerate(gold)})
    rows = [new_row(prompts[b], params[b], eos=[10], request=b) for b in range(2)]
    decode(model, rows, drafter, match)
    assert [row.output for row in rows] == [g.token_ids for g in gold]


@pytest.mark.parametrize("least", range(11))
def test_min_tokens_lets_eos_through_exactly_then(least: int) -> None:
    """A model that wants EOS at once gets it as token ``least + 1``."""
    table = TableLM.random(7, seed=0).table_VVV.clone()
    table[..., 6] = 50.0
    params = SamplingParams(min_tokens=least, max_tokens=20)
    drafter = drafters(7, 4)["oracle"](
        {0: truths(TableLM(table), [[1]], [params], eos=[6])[0].token_ids}
    )
    (row,) = decode(TableLM(table), [new_row([1], params, eos=[6])], drafter, match)
    assert row.output.index(6) == least == len(row.output) - 1


def test_a_banned_token_never_appears_though_drafted() -> None:
    """logit_bias acts on draft nodes, not on the bonus only."""
    model = TableLM.cycle(9)
    params = SamplingParams(logit_bias={4: -100.0}, max_tokens=30)
    drafter = drafters(9, 6)["oracle"]({0: [(i + 1) % 8 for i in range(30)]})
    (row,) = decode(model, [new_row([0], params)], drafter, match)
    assert 4 not in row.output and len(row.output) == 30


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}]
)
def test_cuts_never_remove_all(options: dict[str, Any]) -> None:
    """The most probable token always stays, and the law sums to one."""
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(0)) * 1e3
    probs = shape_probs(logits, SamplingParams(**{"temperature": 0.7, **options}))
    assert torch.allclose(probs.sum(-1), torch.ones(6))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("cut", CUTS)
def test_shape_equals_transformers(cut: str) -> None:
    """The vectorised cuts against transformers' own, from the golden loop."""
    from paceline.decode.reference import _distribution

    params = SamplingParams(**{"temperature": 1.0, **CUTS[cut]})
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 2
    want = torch.stack([_distribution(row, [0], 1, params, set()) for row in logits])
    assert torch.allclose(shape_probs(logits, params), want, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "masked"])
def test_impossible_rows_are_refused_by_name(bad: str, temperature: float) -> None:
    """NaN logits and a row with nothing left; the message names the request."""
    logits = torch.zeros(2, 5)
    logits[1] = float("-inf")
    if bad == "nan":
        logits[1] = torch.tensor([0.0, float("nan"), 1.0, 2.0, 3.0])
    rows = [new_row([1], SamplingParams(temperature=temperature), request=r) for r in (8, 9)]
    with pytest.raises(ValueError, match="request 9"):
        warp(logits, Draft.empty(2), rows)


def test_inverse_cdf_never_draws_probability_zero() -> None:
    """At both ends of [0, 1) and in fp32 that does not sum to one."""
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.69, 0.0]]).expand(4, 5)
    assert inverse_cdf(probs, [0.0, 0.30303, 0.30304, 1 - 2**-53]) == [1, 1, 3, 3]


@pytest.mark.parametrize("vocab", [5, 97, 49152])
def test_greedy_takes_the_first_of_equals(vocab: int) -> None:
    """As argmax does, so that ties do not depend on the path taken."""
    logits = torch.zeros(3, vocab)
    logits[:, [2, 3, vocab - 1]] = 1.0
    rows = [new_row([1], SamplingParams()) for _ in range(3)]
    assert warp(logits, Draft.empty(3), rows).sample([0.0] * 3) == [2, 2, 2]


@pytest.mark.parametrize("name", list(drafters(9, 1)))
@pytest.mark.parametrize("raises", [False, True])
def test_a_constraint_without_continuation_behind_a_wrong_draft_is_no_error(
    name: str, raises: bool
) -> None:
    """Tokens must alternate in parity; a history that does not has no continuation at all."""

    def alternate(ids: Tensor, scores: Tensor) -> Tensor:
        history = ids[0].tolist()
        legal = all(a % 2 != b % 2 for a, b in zip(history, history[1:], strict=False))
        if not legal and raises:
            raise ValueError("the grammar has no such state")
        parity = torch.arange(scores.shape[-1]) % 2
        keep = (parity != history[-1] % 2) if legal else torch.zeros_like(parity).bool()
        return scores.masked_fill(~keep, float("-inf"))

    model = TableLM.random(9, seed=4)
    params = [SamplingParams(max_tokens=14, logits_processors=(alternate,))]
    gold = truths(model, [[2, 3]], params)
    drafter = drafters(9, 4)[name]({0: gold[0].token_ids})
    (row,) = decode(model, [new_row([2, 3], params[0])], drafter, match)
    assert row.output == gold[0].token_ids


def test_a_node_without_a_distribution_is_an_error_once_it_is_reached() -> None:
    """The draft is right, but the model is NaN behind it."""
    logits = torch.tensor([[0.0, 5.0, 0.0], [float("nan")] * 3])
    rows = [new_row([0], SamplingParams(), request=3)]
    law = warp(logits, Draft.chain(torch.tensor([[1]]), [1]), rows)
    with pytest.raises(ValueError, match="request 3"):
        match(Draft.chain(torch.tensor([[1]]), [1]), law, rows)
    wrong = Draft.chain(torch.tensor([[2]]), [1])
    assert match(wrong, warp(logits, wrong, rows), rows).tokens == [[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 256, 1000, 1024, 49152])
def test_top_is_max(width: int, dtype: torch.dtype) -> None:
    """With many equals, NaN in any place, nothing but minus infinity, and other axes."""
    scores = torch.randint(-9, 3, (2, 6, width), generator=torch.Generator().manual_seed(1))
    scores = scores.to(dtype)
    scores[0, 1] = -torch.inf
    scores[0, 2, width // 2 :] = torch.inf
    scores[1, 0, width - 1] = scores[1, 1, 0] = torch.nan
    scores[1, 2, [1, width - 2]] = torch.nan
    values, indices = top(scores)
    torch.testing.assert_close(values, scores.max(-1).values, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(indices, scores.max(-1).indices)
