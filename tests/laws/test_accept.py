"""Laws 1 to 3: speculation changes neither greedy ids, nor sampled ids, nor the distribution.

Does not know any real model.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from harness import FreshNoise, Scripted, TableDrafter, TableLM, decode, drafters, new_row, truths
from paceline.core import AcceptRule, Draft, Drafter, Law, Round, Row, SamplingParams, Verdict
from paceline.decode.accept import match, rejection
from paceline.decode.warp import TargetLaw, inverse_cdf, shape_probs, warp

PROMPTS = [[1, 2], [3], [5, 0, 4], [2, 2, 7, 1]]
DRAFTERS = list(drafters(11, 1))


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("block", range(1, 9))
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_match_equals_plain_decoding(temperature: float, name: str, block: int, batch: int) -> None:
    """Greedy and seeded sampled ids equal the golden loop's, alone or in a ragged batch."""
    model = TableLM.random(11, seed=block)
    params = [
        SamplingParams(temperature=temperature, max_tokens=14 + b, seed=b) for b in range(batch)
    ]
    gold = truths(model, PROMPTS[:batch], params, eos=[10])
    drafter = drafters(11, block, eos=10)[name]({b: g.token_ids for b, g in enumerate(gold)})
    rows = [new_row(PROMPTS[b], params[b], eos=[10], request=b) for b in range(batch)]
    decode(model, rows, drafter, match, slots=3)
    assert [row.output for row in rows] == [g.token_ids for g in gold]
    assert [row.finish_reason for row in rows] == [g.finish_reason for g in gold]
    assert all(row.rounds[-1].committed > 0 for row in rows)


def test_scripted_pattern_is_what_gets_accepted() -> None:
    """The harness drafts what it says, else the laws above prove little."""
    model = TableLM.cycle(17)
    params = [SamplingParams(max_tokens=40)]
    gold = truths(model, [[0]], params)
    drafter = Scripted(truth={0: gold[0].token_ids}, vocab=17, block=8, pattern=(0, 3, 7, 1))
    (row,) = decode(model, [new_row([0], params[0])], drafter, match)
    assert [r.accepted for r in row.rounds[:4]] == [0, 3, 7, 1]


PREFILL = Round(drafted=0, accepted=0, committed=1)  # behind it, else the first is not drafted
EXACT = SamplingParams(temperature=0.7, max_tokens=2)
CUT = SamplingParams(temperature=0.7, top_k=4, max_tokens=2)
CUTS = SamplingParams(temperature=1.3, top_p=0.9, min_p=0.05, max_tokens=2)


def p_value(
    accept: AcceptRule, drafter: Drafter, params: SamplingParams, rows: int, model: TableLM
) -> float:
    """Chi-square p-value of the joint counts of the first two tokens against the exact product."""
    source, counts = random.Random(7), Counter[tuple[int, ...]]()
    left = rows
    while left > 0:
        size = min(left, 4000)
        batch = [new_row([1, 2], params, noise=FreshNoise(source)) for _ in range(size)]
        for row in batch:
            row.rounds.append(PREFILL)
        decode(model, batch, drafter, accept, slots=size)
        counts.update(tuple(row.output) for row in batch)
        left -= size
    first = shape_probs(model.table_VVV[1, 2][None], params)[0].double()
    expected, seen = [], []
    for a, b in itertools.product(range(model.vocab), repeat=2):
        second = shape_probs(model.table_VVV[2, a][None], params)[0].double()
        mass = float(first[a] * second[b])
        assert mass > 0 or counts[a, b] == 0, "a token of probability 0 was emitted"
        if mass > 0:
            expected.append(mass)
            seen.append(counts[a, b])
    scale = sum(seen) / sum(expected)
    return float(chisquare(seen, [mass * scale for mass in expected]).pvalue)


TARGET = TableLM.random(5, seed=1)
OTHER = TableLM.random(5, seed=2)


@pytest.mark.parametrize("params", [EXACT, CUT, CUTS], ids=["plain", "top_k", "top_p,min_p"])
def test_match_keeps_the_distribution(params: SamplingParams) -> None:
    """Match, with drafts sampled from quite another table."""
    assert p_value(match, TableDrafter(OTHER, block=2), params, 80_000, TARGET) > 1e-6


@pytest.mark.parametrize("params", [EXACT, CUT, CUTS], ids=["plain", "top_k", "top_p,min_p"])
def test_rejection_keeps_the_distribution(params: SamplingParams) -> None:
    """Rejection, same drafts; fewer rows, since the rule works row by row."""
    assert p_value(rejection, TableDrafter(OTHER, block=2), params, 50_000, TARGET) > 1e-6


def _raw_q(draft: Draft, law: Law, rows: Sequence[Row]) -> Verdict:
    """Judges with the drafter's law before temperature and cuts."""
    raw = torch.stack([OTHER.table_VVV[row.tokens[-2], row.tokens[-1]] for row in rows])
    q = raw.softmax(-1)[:, None].expand(-1, draft.tokens_BN.shape[1], -1)
    wrong = Draft.chain(draft.tokens_BN, draft.sizes_B, q)
    return rejection(wrong, law, rows)


def _p_as_residual(draft: Draft, law: Law, rows: Sequence[Row]) -> Verdict:
    """Accepts rightly, but on a miss draws from p instead of (p - q)+."""
    assert draft.probs_BNV is not None
    tokens, paths = [], []
    first = 0
    for b, (row, size) in enumerate(zip(rows, draft.sizes_B, strict=True)):
        said, kept = draft.tokens_BN[b].tolist(), 0
        laws = [law.probs(first + node) for node in range(size + 1)]
        first += size + 1
        while kept < size and row.noise.uniform("accept", kept) * float(
            draft.probs_BNV[b, kept, said[kept]]
        ) < float(laws[kept][said[kept]]):
            kept += 1
        bonus = inverse_cdf(laws[kept][None], [row.noise.uniform("target", kept)])
        tokens.append(said[:kept] + bonus)
        paths.append(list(range(kept)))
    return Verdict(tokens=tokens, paths=paths)


@pytest.mark.parametrize("rule", [_raw_q, _p_as_residual], ids=["raw q", "p as residual"])
def test_negative_controls_fail(rule: AcceptRule) -> None:
    """The two classic mistakes must be caught, or the tests above have no power."""
    assert p_value(rule, TableDrafter(OTHER, block=2), CUT, 50_000, TARGET) < 1e-6


def _law(probs_TV: Tensor) -> TargetLaw:
    """A law of exactly these distributions."""
    rows = [new_row([1], SamplingParams(temperature=1.0)) for _ in probs_TV]
    return warp(probs_TV.log(), Draft.empty(len(rows)), rows)


def test_rejected_token_is_never_emitted_and_equal_laws_always_accept() -> None:
    """One-hot q that misses is rejected and cannot return; p == q leaves no residual at all."""
    p = torch.tensor([0.2, 0.0, 0.5, 0.3])
    for seed in range(300):
        row = new_row([1], SamplingParams(temperature=1.0, seed=seed))
        one_hot = torch.tensor([[[0.0, 0.0, 1.0, 0.0]]])
        draft = Draft.chain(torch.tensor([[2]]), [1], one_hot)
        verdict = rejection(draft, _law(p.expand(2, 4)), [row])
        assert verdict.tokens[0][0] == 2 if verdict.paths[0] else verdict.tokens[0][0] in (0, 3)
        same = Draft.chain(torch.tensor([[2]]), [1], p.expand(1, 1, 4).clone())
        assert rejection(same, _law(p.expand(2, 4)), [row]).paths == [[0]]


def test_bonus_after_full_acceptance_follows_the_last_draft() -> None:
    """Not the last accepted node's own law."""
    laws = torch.eye(4)[[1, 2, 3]]
    draft = Draft.chain(torch.tensor([[1, 2]]), [2], torch.eye(4)[[1, 2]][None])
    row = new_row([0], SamplingParams(temperature=1.0, seed=1))
    for rule in (match, rejection):
        assert rule(draft, _law(laws), [row]).tokens == [[1, 2, 3]]


def test_rejection_at_temperature_zero_is_greedy() -> None:
    """A one-hot target law needs no branch, whatever law the draft was sampled from."""
    q = torch.tensor([0.2, 0.3, 0.4, 0.1])
    for seed, said in itertools.product(range(20), range(4)):
        row = new_row([1], SamplingParams(seed=seed))
        draft = Draft.chain(torch.tensor([[said]]), [1], q.expand(1, 1, 4))
        law = warp(torch.eye(4)[[2, 3]], draft, [row])
        want = [2, 3] if said == 2 else [2]
        assert rejection(draft, law, [row]).tokens == [want]


def test_rejection_refuses_what_it_cannot_judge() -> None:
    """No law, a tree, or a NaN law."""
    row = new_row([1], SamplingParams(temperature=1.0, seed=0))
    law = _law(torch.full((3, 4), 0.25))
    with pytest.raises(ValueError, match="use accept='match'"):
        rejection(Draft.chain(torch.tensor([[1, 2]]), [2]), law, [row])
    tree = Draft(
        tokens_BN=torch.tensor([[1, 2]]),
        parents_BN=torch.tensor([[-1, -1]]),
        sizes_B=[2],
        probs_BNV=torch.full((1, 2, 4), 0.25),
    )
    with pytest.raises(ValueError, match="chain"):
        rejection(tree, law, [row])
    broken = Draft.chain(torch.tensor([[1]]), [1], torch.full((1, 1, 4), float("nan")))
    with pytest.raises(ValueError, match="NaN"):
        rejection(broken, law, [row])


def test_tree_takes_the_second_sibling_at_temperature() -> None:
    """Chi-square on a tree of width 2 whose children are chosen freely."""
    wide = Scripted(truth={0: [3, 1]}, vocab=5, block=2, siblings=True)
    assert p_value(match, wide, EXACT, 40_000, TARGET) > 1e-6
