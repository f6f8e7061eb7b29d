"""Refined drafts leave the target's distribution as it is, for any number of sweeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn

from harness import FreshNoise, TableLM, TableTarget, new_row
from paceline.core import Draft, DraftContext, Row, SamplingParams
from paceline.decode import loop
from paceline.decode.accept import rejection
from paceline.decode.warp import shape_probs
from paceline.drafters.heads import MarkovHead, XPressHead, init_head
from paceline.drafters.refine import Refine

VOCAB, WIDTH, BLOCK, RANK = 5, 6, 4, 4
TARGET = TableLM.random(VOCAB, seed=1)
PLAIN = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
CUT = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4, ignore_eos=True)


class RowNoise(FreshNoise):
    """Fresh uniform numbers, and exponential ones that stay with their address as a row's do."""

    def __init__(self, source: random.Random, numbers: np.random.Generator) -> None:
        super().__init__(source)
        self._numbers = numbers
        self._kept: dict[tuple[str, int], Any] = {}

    def exponentials(self, stream: str, position: int, count: int) -> Any:
        """The same for the same address."""
        address = (stream, position)
        if address not in self._kept:
            self._kept[address] = self._numbers.standard_exponential(count, dtype=np.float32)
        return self._kept[address]


def random_head(kind: str, words: int) -> Any:
    head: Any = MarkovHead(VOCAB, words, RANK)
    if kind == "xpress":
        head = XPressHead(VOCAB, words, WIDTH, BLOCK, RANK, 2)
    init_head(head, torch.Generator().manual_seed(5), std=1.2)
    if kind == "xpress":
        nn.init.normal_(head.mix_l, std=0.8, generator=torch.Generator().manual_seed(6))
    return head.requires_grad_(False)


@dataclass
class Blocks:
    """Hands out hints as a block drafter does: states and logits are functions of the last token."""

    kind: str
    words: Sequence[int] | None = None
    name: str = "blocks"
    taps: tuple[int, ...] = ()
    samples: bool = False

    def __post_init__(self) -> None:
        size = VOCAB if self.words is None else len(self.words)
        generator = torch.Generator().manual_seed(7)
        self.states = torch.randn(VOCAB, BLOCK, WIDTH, generator=generator)
        self.logits = torch.randn(VOCAB, BLOCK - 1, size, generator=generator)
        self.module = SimpleNamespace(**{f"{self.kind}_head": random_head(self.kind, size)})
        self.config = SimpleNamespace(num_jacobi_passes=2, vocab_size=VOCAB)
        self.target = SimpleNamespace(dtype=torch.float32)

    def to_target(self, ids: Tensor) -> Tensor:
        """Target ids of draft vocabulary ids."""
        return ids if self.words is None else torch.tensor(self.words)[ids]

    def spread(self, probs_NV: Tensor, law_NV: Tensor) -> None:
        """Laws over the draft vocabulary into those over the target's."""
        law_NV[:, slice(None) if self.words is None else list(self.words)] = probs_NV

    def new_state(self, slots: int) -> None:
        """It remembers nothing."""

    def release(self, state: Any, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, ctx: DraftContext) -> Draft:
        """Greedy drafts with their hints."""
        last = torch.tensor([row.tokens[-1] for row in ctx.rows])
        logits = self.logits[last]
        tokens = self.to_target(logits.argmax(-1))
        ready = list(range(len(ctx.rows)))
        hints = {"ready": ready, "states_RbD": self.states[last], "logits_RNV": logits}
        return Draft.chain(tokens, [BLOCK - 1] * len(ready), None, **hints)


class LawOfTheResult(Refine):
    """The mistake that looks right: the law recomputed from the tokens that came out."""

    def __call__(self, draft: Draft, ctx: DraftContext) -> Draft:
        out = super().__call__(draft, ctx)
        assert out.probs_BNV is not None
        laws = torch.zeros_like(out.probs_BNV)
        base, states = draft.hints["logits_RNV"], draft.hints["states_RbD"]
        for i, row in enumerate(ctx.rows):
            prev = torch.tensor([[row.tokens[-2], row.tokens[-1], *out.tokens_BN[i, :-1].tolist()]])
            bias = self.head.bias(states[i : i + 1], states[i : i + 1].mean(1), prev)[0, 1:]
            self.drafter.spread(shape_probs(base[i] + bias, row.params), laws[i])
        return replace(out, probs_BNV=laws)


def p_value(stage: Refine, params: SamplingParams, rows: int) -> float:
    """Chi-square of the joint counts of the three tokens behind the first against the table LM."""
    source, numbers = random.Random(0), np.random.default_rng(0)
    counts = np.zeros((VOCAB,) * 3)
    for _ in range(rows // 500):
        some = [new_row([1, 2], params, noise=RowNoise(source, numbers)) for _ in range(500)]
        for row in some:  # past its prefill: the first token is given
            row.tokens.append(3)
            row.rounds.append(SimpleNamespace())  # type: ignore[arg-type]
        session = loop.Session(
            target=TableTarget(TARGET),
            drafter=stage.drafter,
            accept=rejection,
            stages=(stage,),
            slots=500,
        )
        for _ in loop.run(session, some):
            pass
        for row in some:
            counts[tuple(row.output[1:4])] += 1
    laws = []
    for a, b in ((2, 3), *((3, t) for t in range(VOCAB))):
        laws.append(shape_probs(TARGET.table_VVV[a, b][None], params)[0])
    first, second = laws[0], torch.stack(laws[1:])
    table = torch.stack(
        [shape_probs(TARGET.table_VVV[a], params) for a in range(VOCAB)]
    )  # [last but one, last, next]
    joint = (first[:, None] * second)[:, :, None] * table
    expected, seen = joint.flatten().double().numpy(), counts.flatten()
    assert not seen[expected == 0].any(), "a token of probability 0 was emitted"
    kept = expected * seen.sum() > 5
    expected, seen = expected[kept], seen[kept]
    return float(chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def refined(kind: str, sweeps: int | None, words: Sequence[int] | None = None) -> Refine:
    return Refine(Blocks(kind, words), kind, sweeps=sweeps, samples=True)


@pytest.mark.parametrize("sweeps", [1, 2, 3, 6])
def test_xpress_keeps_the_distribution(sweeps: int) -> None:
    assert p_value(refined("xpress", sweeps), PLAIN, 10_000) > 1e-4


def test_xpress_keeps_it_under_cuts_and_a_reduced_vocabulary() -> None:
    assert p_value(refined("xpress", 1, (0, 2, 3)), CUT, 10_000) > 1e-4


def test_the_markov_walk_keeps_the_distribution() -> None:
    assert p_value(refined("markov", None), PLAIN, 10_000) > 1e-4


def test_the_law_of_the_final_tokens_is_caught() -> None:
    """The negative control: without it the tests above would have no power."""
    wrong = LawOfTheResult(Blocks("xpress"), "xpress", sweeps=1, samples=True)
    assert p_value(wrong, PLAIN, 10_000) < 1e-4


@pytest.mark.parametrize("kind", ["xpress", "markov"])
@pytest.mark.parametrize("samples", [False, True])
def test_enough_sweeps_are_the_walk_and_later_tokens_change_nothing_before(
    kind: str, samples: bool
) -> None:
    stage = Refine(Blocks(kind), kind, sweeps=None if kind == "markov" else 3, samples=samples)
    numbers = np.random.default_rng(1)
    row = new_row([1, 2, 4], PLAIN, noise=RowNoise(random.Random(1), numbers))
    ctx = DraftContext(rows=[row], state=None)
    draft = stage.drafter.propose(ctx)
    out = stage(draft, ctx)
    head, states = stage.head, draft.hints["states_RbD"]
    prev, walked = [2, 4, 0, 0], []
    for k in range(BLOCK - 1):
        bias = head.bias(states, states.mean(1), torch.tensor([prev]))[0, k + 1]
        logits = draft.hints["logits_RNV"][0, k] + bias
        torch.testing.assert_close(out.hints["refined_RNV"][0, k], logits)
        law = shape_probs(logits[None], PLAIN)[0]
        noise = torch.from_numpy(row.noise.exponentials("refine", 3 + k, VOCAB))
        walked.append(int((law / noise if samples else law).argmax()))
        if k + 2 < BLOCK:
            prev[k + 2] = walked[-1]
    assert out.tokens_BN[0].tolist() == walked
    if samples:
        assert out.probs_BNV is not None and out.probs_BNV.sum(-1).allclose(torch.ones(1, 3))
    else:
        assert out.probs_BNV is None


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_a_previous_token_reaches_its_slot_and_later_ones_only(kind: str) -> None:
    head, generator = random_head(kind, VOCAB), torch.Generator().manual_seed(3)
    hidden = torch.randn(2, BLOCK, WIDTH, generator=generator)
    prev = torch.randint(0, VOCAB, (2, BLOCK), generator=generator)
    before = head.bias(hidden, hidden.mean(1), prev)
    for j in range(BLOCK):
        other = prev.clone()
        other[:, j] = (other[:, j] + 1) % VOCAB
        changed = (head.bias(hidden, hidden.mean(1), other) != before).any(-1).any(0).tolist()
        assert changed[:j] == [False] * j and changed[j]
        assert any(changed[j + 1 :]) == (kind == "xpress" and j + 1 < BLOCK)


def test_the_folded_mixer_is_the_unfolded_one() -> None:
    head, generator = random_head("xpress", VOCAB), torch.Generator().manual_seed(4)
    hidden = torch.randn(3, BLOCK, WIDTH, generator=generator)
    fixed = head.fixed(hidden, hidden.mean(1))
    prev = torch.randint(0, VOCAB, (3, BLOCK), generator=generator)
    folded = head.latent(fixed, prev, head.mixer())
    torch.testing.assert_close(folded, head.latent(fixed, prev), atol=1e-3, rtol=1e-4)


def test_early_stop_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that always takes all its sweeps gives the same tokens and laws."""
    rows: list[Row] = [
        new_row([1, t, 3], PLAIN, noise=RowNoise(random.Random(t), np.random.default_rng(t)))
        for t in range(4)
    ]
    ctx = DraftContext(rows=rows, state=None)
    stage = refined("xpress", 6)
    draft = stage.drafter.propose(ctx)
    out = stage(draft, ctx)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", lambda a, b: False)
        slow = stage(draft, ctx)
    assert out.probs_BNV is not None and slow.probs_BNV is not None
    assert torch.equal(out.tokens_BN, slow.tokens_BN)
    assert torch.equal(out.probs_BNV, slow.probs_BNV)
