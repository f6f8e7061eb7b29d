"""On-policy losses against autograd on dense logits, recorded blocks, and teachers of rejected suffixes.

Does not know fit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core import SamplingParams
from paceline.train import suffixes
from paceline.train.losses import frozen_head_loss
from paceline.train.policy_losses import (
    Clipped,
    TokenStream,
    adaflash_rule,
    directed_rule,
    tokens_rule,
)
from paceline.train.records import Judged, Record
from paceline.train.rounds import recorded_blocks
from paceline.train.suffixes import Branch, teacher_states
from tiny import tiny_target

T, D, V = 14, 6, 23


@pytest.fixture
def given() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "states": torch.randn(T, D, generator=generator) * 1.5,
        "head": torch.randn(V, D, generator=generator),
        "teacher": torch.randn(T, D, generator=generator) * 1.5,
        "weights": torch.rand(T, generator=generator),
    }
    made["weights"][5] = 0
    made["states"].requires_grad_()
    return made


def compare(loss: Tensor, plain: Tensor, states: Tensor) -> None:
    torch.testing.assert_close(loss, plain)
    (grad,) = torch.autograd.grad(3 * loss, states)
    (expected,) = torch.autograd.grad(3 * plain, states)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-4)
    assert expected.abs().max() > 1e-3


def dense_adaflash(given: dict[str, Tensor], how: dict[str, Any], raw: Tensor) -> tuple[Any, ...]:
    """The published code's own order: divide by the sum of weights, clip, weigh by raw weights."""
    z, z_teacher = given["states"] @ given["head"].T, given["teacher"] @ given["head"].T
    heat, clip, alpha = how["temperature"], how["clip"], how["alpha"]
    ce = torch.nn.functional.cross_entropy(z, z_teacher.argmax(-1), reduction="none")
    log_q, log_p = (z / heat).log_softmax(-1), (z_teacher / heat).log_softmax(-1)
    entries = log_q.exp() * (log_q - log_p)
    W = raw.sum()
    cut = torch.zeros(())
    if how["clip_mode"] == "vocab_entry":
        cut = (entries > clip)[raw > 0].float().mean()
        entries = entries.clamp(max=clip)
    rkl = heat**2 * entries.sum(-1) / W
    if how["clip_mode"] == "repo":
        cut = (rkl > clip)[raw > 0].float().mean()
        rkl = rkl.clamp(max=clip)
    return alpha * (raw * ce).sum() / W + (1 - alpha) * (raw * rkl).sum(), float(cut)


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize(
    ("clip_mode", "clip"), [("none", 0.01), ("repo", 0.35), ("repo", 0.01), ("vocab_entry", 0.2)]
)
@pytest.mark.parametrize("alpha", [0.8, 0.0])
def test_adaflash_equals_autograd(
    given: dict[str, Tensor],
    clip_mode: str,
    clip: float,
    temperature: float,
    alpha: float,
    chunk: int,
) -> None:
    if alpha == 0 and clip == 0.01 and clip_mode == "repo":
        alpha = 0.5  # all divergences are cut: without the other part there is no slope at all
    raw, clipped = given["weights"] * 0.9, Clipped()
    how: dict[str, Any] = {"alpha": alpha, "temperature": temperature, "clip": clip}
    how["clip_mode"] = clip_mode
    rule = adaflash_rule(
        given["teacher"],
        given["head"],
        weight_sum=float(raw.sum()),
        counted_T=raw > 0,
        clipped=clipped,
        **how,
    )
    loss = frozen_head_loss(given["states"], given["head"], raw / raw.sum(), rule, chunk)
    plain, cut = dense_adaflash(given, how, raw)
    compare(loss, plain, given["states"])
    assert clipped.ratio == pytest.approx(cut)
    assert (clip_mode == "none") == (clipped.ratio == 0)
    assert clipped.total == (0 if clip_mode == "none" else 13 * (23 if "vocab" in clip_mode else 1))


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("chunk", [3, 512])
def test_draft_opd_equals_autograd(given: dict[str, Tensor], chunk: int) -> None:
    rejected = torch.arange(T) % 3 == 0
    rule = directed_rule(given["teacher"], given["head"], rejected)
    loss = frozen_head_loss(given["states"], given["head"], given["weights"], rule, chunk)
    p = (given["teacher"] @ given["head"].T).softmax(-1)
    q = (given["states"] @ given["head"].T).softmax(-1)
    each = torch.where(rejected, kl(q, p), kl(p, q))
    compare(loss, (each * given["weights"]).sum(), given["states"])


@pytest.mark.parametrize("chunk", [3, 512])
def test_draft_opd_as_coded_equals_autograd(given: dict[str, Tensor], chunk: int) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, V, (2, T), generator=generator)
    ids[0, 4] = ids[1, 7] = -100
    said = -torch.rand(2, T, generator=generator) * 6
    said[0, 2], said[1, 3], said[1, 1], said[0, 8] = -30.0, -0.0001, -40.0, 0.0
    weights = torch.rand(2, T, generator=generator)
    # Position 3: a draft the drafter does not believe and the target does: k3 beyond its bound.
    # Position 9: a committed token that the drafter rules out: its log-probability is clamped.
    with torch.no_grad():
        for at, stream in ((3, 1), (9, 0)):
            given["states"][at] = -given["head"][ids[stream, at]] * 6
    streams = [
        TokenStream(ids_T=ids[i], logprobs_T=said[i], weights_T=weights[i], kind=kind)
        for i, kind in enumerate(("bernoulli", "k3"))
    ]
    rule = tokens_rule(streams)
    loss = frozen_head_loss(given["states"], given["head"], torch.ones(T), rule, chunk)
    log_q = (given["states"] @ given["head"].T).log_softmax(-1)
    s0, s1 = (log_q.gather(1, ids[i].clamp_min(0)[:, None])[:, 0] for i in range(2))
    low, high = -10.0, math.log1p(-1e-6)
    assert bool((s0 < low).any()), "a bound is at work"
    t, s = said[0].clamp(low, high), s0.clamp(low, high)
    first = t.exp() * (t - s) + (1 - t.exp()) * (torch.log1p(-t.exp()) - torch.log1p(-s.exp()))
    gap = said[1] - s1
    second = gap.exp() - gap - 1
    assert bool((second > 10).any())
    known = ids >= 0
    plain = (weights[0] * known[0] * first.clamp(max=10)).sum()
    plain = plain + (weights[1] * known[1] * second.clamp(max=10)).sum()
    compare(loss, plain, given["states"])


def test_bf16_losses_stay_finite_where_probabilities_underflow() -> None:
    states = torch.tensor([[90.0, 0.0], [0.0, 90.0]]).bfloat16().requires_grad_()
    head, teacher = torch.eye(2).bfloat16(), torch.tensor([[0.0, 90.0], [0.0, 90.0]]).bfloat16()
    both = torch.ones(2, dtype=torch.bool)
    ids, said = torch.tensor([1, 0]), torch.tensor([-1e-5, -90.0])
    rules = [directed_rule(teacher, head, flag) for flag in (both, ~both)]
    for mode in ("none", "repo", "vocab_entry"):
        how: dict[str, Any] = {"alpha": 0.8, "temperature": 2.0, "clip": 0.01, "clip_mode": mode}
        counted = {"weight_sum": 2.0, "counted_T": both, "clipped": Clipped()}
        rules.append(adaflash_rule(teacher, head, **how, **counted))
    for kind in ("bernoulli", "k3"):
        stream = TokenStream(ids_T=ids, logprobs_T=said, weights_T=torch.ones(2), kind=kind)
        rules.append(tokens_rule([stream]))
    for rule in rules:
        loss = frozen_head_loss(states, head, torch.ones(2), rule)
        (grad,) = torch.autograd.grad(loss, states)
        assert loss.isfinite() and grad.isfinite().all()


# --- recorded blocks ---------------------------------------------------------------------------


def judged(anchor: int, proposals: list[int], accepted: int, correction: bool = True) -> Judged:
    return Judged(
        anchor=anchor,
        proposals=tuple(proposals),
        logprobs=tuple(-0.1 * (i + 1) - anchor for i in range(len(proposals))),
        accepted=accepted,
        correction=-50.0 - anchor if correction else None,
        version=0,
    )


def reply() -> Record:
    """Prompt of 3; rounds accept 2 of 4 (anchor 3), 4 of 4 (6), 0 of 3 (11), then 1, the end (12)."""
    tokens = np.arange(100, 114).astype(np.int32)
    return Record(
        id=0,
        tokens=tokens,
        start=3,
        source="",
        temperature=0.0,
        features=torch.zeros(13, 4).bfloat16(),
        rounds=(
            judged(2, [], 0),
            judged(3, [104, 105, 7, 8], 2),
            judged(6, [107, 108, 109, 110], 4),
            judged(11, [9, 10, 11], 0),
            judged(12, [113], 1, correction=False),
        ),
    )


def test_blocks_stand_where_the_rounds_were() -> None:
    how: dict[str, Any] = {"block_size": 5, "anchors": 9, "limit": 99, "seeds": [(0,)]}
    blocks, rounds = recorded_blocks([reply()], **how)
    assert blocks.anchors_RA.tolist() == [[3, 6, 11, 12]] and bool(blocks.keep_RA.all())
    assert blocks.anchor_ids_RA.tolist() == [[103, 106, 111, 112]]
    assert blocks.labels_RAk[0, 0].tolist() == [104, 105, 106, 107]
    assert blocks.labels_RAk[0, 3].tolist() == [113, -100, -100, -100]
    assert rounds.proposals_RAk[0, 2].tolist() == [9, 10, 11, -1]
    y, n = True, False
    assert rounds.accepted_RAk[0].tolist() == [[y, y, n, n], [y] * 4, [n] * 4, [y, n, n, n]]
    assert rounds.corrected_RAk[0].tolist() == [[n, n, y, n], [n] * 4, [y, n, n, n], [n] * 4]
    assert rounds.rejected_RAk[0].tolist() == [[n, n, y, y], [n] * 4, [y, y, y, n], [n] * 4]
    said = torch.tensor([[-3.1, -3.2, -3.3, -3.4], [-11.1, -11.2, -11.3, 0.0]])
    torch.testing.assert_close(rounds.proposal_logprobs_RAk[0, [0, 2]], said)
    # The committed tokens' own: two accepted, the correction, then the next round's first draft.
    torch.testing.assert_close(
        rounds.committed_logprobs_RAk[0, 0], torch.tensor([-3.1, -3.2, -53.0, -6.1])
    )
    small, few = recorded_blocks([reply()], **(how | {"block_size": 3}))
    assert small.labels_RAk.shape == (1, 4, 2) and not few.corrected_RAk[0, 0].any()
    near, _ = recorded_blocks([reply()], **(how | {"limit": 12}))
    assert near.anchors_RA.tolist() == [[3, 6]], "no block reaches a position that is not there"
    drawn = [
        recorded_blocks([reply()], **(how | {"anchors": 2, "seeds": [(s,)]}))[0]
        for s in (1, 1, 2, 3, 4)
    ]
    places = [tuple(one.anchors_RA[0].tolist()) for one in drawn]
    assert places[0] == places[1] and len(set(places)) > 1
    assert all(len(set(place)) == 2 and list(place) == sorted(place) for place in places)
    pair, both = recorded_blocks([reply(), reply()], **(how | {"seeds": [(0,), (1,)]}))
    assert torch.equal(both.take([1]).proposals_RAk, rounds.proposals_RAk)
    assert pair.labels_RAk.shape[0] == 2


def test_the_ablation_shuffles_places_and_keeps_counts() -> None:
    how: dict[str, Any] = {"block_size": 5, "anchors": 99, "limit": 99}
    real, said = recorded_blocks([reply()], seeds=[(0,)], **how)
    orders = set()
    for seed in range(12):
        blocks, rounds = recorded_blocks([reply()], seeds=[(seed,)], shuffled=True, **how)
        again, _ = recorded_blocks([reply()], seeds=[(seed,)], shuffled=True, **how)
        assert torch.equal(blocks.anchors_RA, again.anchors_RA)
        assert sorted(rounds.accepted_RAk[0].sum(-1).tolist())[-4:] == [0, 1, 2, 4]
        for stream in ("accepted_RAk", "corrected_RAk", "rejected_RAk"):
            assert getattr(rounds, stream).sum() == getattr(said, stream).sum()
        moved = [a for a in range(4) if rounds.accepted_RAk[0, a].any()]
        orders.add(tuple(blocks.anchors_RA[0, moved].tolist()))
        rejected = rounds.rejected_RAk[0].any(-1)
        assert blocks.anchors_RA[0, rejected].tolist() == [3, 11], "rejected drafts stay in place"
        supervised = rounds.accepted_RAk | rounds.corrected_RAk
        assert bool((blocks.labels_RAk[supervised] >= 0).all())
        assert bool((rounds.committed_logprobs_RAk[supervised] < 0).all())
    assert len(orders) > 3
    assert real.anchors_RA.tolist() == [[3, 6, 11, 12]]


# --- the target behind rejected drafts ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt-oss"])
@pytest.mark.parametrize("nodes", [1024, 9])
def test_teacher_states_equal_plain_forwards(
    kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every proposal's law from its own prefix, in one forward or in several; windows included."""
    monkeypatch.setattr(suffixes, "_NODES", nodes)
    target = tiny_target(kind)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 97, 40).tolist()
    branches, anchor = [], 4
    for accepted, count in ((2, 5), (0, 5), (5, 5), (1, 2), (0, 1), (3, 5), (0, 0), (4, 5)):
        wrong = [(tokens[anchor + accepted + 1] + 1) % 97, *rng.integers(0, 97, 9).tolist()]
        drafts = tokens[anchor + 1 : anchor + 1 + accepted] + wrong
        branches.append(Branch(anchor=anchor, accepted=accepted, proposals=drafts[:count]))
        anchor += accepted + (1 if len(branches) != 5 else 6)  # once with rounds left out between
    calls = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    states = teacher_states(target, tokens, branches, 5)
    assert (len(calls) == 1) == (nodes == 1024)
    for a, branch in enumerate(branches):
        for j in range(5):
            if j >= len(branch.proposals):
                assert not states[a, j].any()
                continue
            prefix = [*tokens[: branch.anchor + 1], *branch.proposals[:j]]
            plain = target.next_logits(prefix)
            torch.testing.assert_close(
                states[a, j] @ target.head.weight.T, plain, atol=1e-3, rtol=1e-3
            )


def test_teacher_states_agree_with_what_the_rollout_saw() -> None:
    from paceline.pipeline import Pipeline
    from paceline.train.rollout import Job, roll_out
    from test_rollout import dflash

    target = tiny_target("llama")
    pipeline = Pipeline(target=target, drafter=dflash(target, 0))
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    (record,) = roll_out(pipeline, [Job(id=0, prompt=[3, 4, 5], params=params)], slots=1)
    drafted = [one for one in record.rounds if one.proposals]
    branches = [
        Branch(anchor=one.anchor, accepted=one.accepted, proposals=one.proposals) for one in drafted
    ]
    states = teacher_states(target, record.tokens.tolist(), branches, 4)
    laws = (states @ target.head.weight.T).log_softmax(-1)
    for a, one in enumerate(drafted):
        mine = [float(laws[a, j, token]) for j, token in enumerate(one.proposals)]
        assert mine == pytest.approx(one.logprobs, abs=1e-4)
