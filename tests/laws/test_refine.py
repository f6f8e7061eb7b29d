"""Refined drafts leave the target's distribution as it is, for any number of sweeps.

Does not know trained heads, real models or folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare
from torch import Tensor, nn

from harness import TableLM, TableTarget, new_row
from paceline.core import Draft, DraftContext, Noise, Row, SamplingParams
from paceline.decode import loop
from paceline.decode.accept import rejection
from paceline.decode.warp import shape_probs
from paceline.drafters.heads import MarkovHead, XPressHead, init_head
from paceline.drafters.refine import Refine

VOCAB, WIDTH, BLOCK, RANK, N = 5, 6, 4, 4, 3
TARGET = TableLM.random(VOCAB, seed=1, scale=1.0)
PLAIN = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)
CUT = replace(PLAIN, temperature=0.8, top_p=0.9, top_k=4)
GREEDY = replace(PLAIN, temperature=0.0)
WORDS = (0, 2, 3)  # a reduced draft vocabulary
STRENGTH = 2.0  # how far previous tokens move logits: much, yet no law becomes one-hot


def random_head(kind: str, words: int = VOCAB) -> Any:
    head: Any = MarkovHead(VOCAB, words, RANK)
    if kind == "xpress":
        head = XPressHead(VOCAB, words, WIDTH, BLOCK, RANK, 2)
    generator = torch.Generator().manual_seed(12)
    init_head(head, generator, std=0.7)
    if kind == "xpress":
        nn.init.normal_(head.mix_l, std=0.7, generator=generator)
        nn.init.normal_(head.token_embed.weight, std=2.0, generator=generator)
    hidden = torch.randn(1, BLOCK, WIDTH, generator=generator).expand(200, -1, -1)
    prev = torch.randint(0, VOCAB, (200, BLOCK), generator=generator)
    with torch.no_grad():
        head.readout.weight *= STRENGTH / head.bias(hidden, hidden.mean(1), prev).std(0).mean()
    return head.requires_grad_(False)


@dataclass
class Blocks:
    """Hands out hints as a block drafter does: states and logits are functions of the last token.

    Rows that end in ``silent`` have no context and are not drafted.
    """

    kind: str
    words: Sequence[int] | None = None
    silent: int = -1
    name: str = "blocks"
    taps: tuple[int, ...] = ()
    samples: bool = False

    def __post_init__(self) -> None:
        size = VOCAB if self.words is None else len(self.words)
        generator = torch.Generator().manual_seed(7)
        self.states = torch.randn(VOCAB, BLOCK, WIDTH, generator=generator)
        self.logits = torch.randn(VOCAB, N, size, generator=generator) * 0.5
        self.module = SimpleNamespace(**{f"{self.kind}_head": random_head(self.kind, size)})
        self.config = SimpleNamespace(num_jacobi_passes=2, vocab_size=VOCAB, block_size=BLOCK)
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
        ready = [b for b, row in enumerate(ctx.rows) if row.tokens[-1] != self.silent]
        tokens, sizes = torch.zeros(len(ctx.rows), N, dtype=torch.int64), [0] * len(ctx.rows)
        for b in ready:
            sizes[b] = N
        last = torch.tensor([ctx.rows[b].tokens[-1] for b in ready])
        logits = self.logits[last]
        tokens[ready] = self.to_target(logits.argmax(-1))
        hints = {"ready": ready, "states_RbD": self.states[last], "logits_RNV": logits}
        return Draft.chain(tokens, sizes, None, **hints)


def stage_of(
    kind: str, sweeps: int | None, words: Sequence[int] | None = None, samples: bool = True
) -> Refine:
    return Refine(Blocks(kind, words), kind, sweeps=sweeps, samples=samples)


def rows_of(count: int, params: SamplingParams, noise: type[Noise] = Noise) -> list[Row]:
    """Rows behind their prefill, all with the same three tokens."""
    rows = [new_row([1, 2], params, noise=noise(seed)) for seed in range(count)]
    for row in rows:
        row.tokens.append(3)
        row.rounds.append(SimpleNamespace())  # type: ignore[arg-type]
    return rows


class LawOfTheResult(Refine):
    """The mistake that looks right: the law recomputed from the tokens that came out."""

    def __call__(self, draft: Draft, ctx: DraftContext) -> Draft:
        out = super().__call__(draft, ctx)
        last = torch.tensor([row.tokens[-2:] for row in ctx.rows])
        prev = torch.cat((last, out.tokens_BN[:, :-1]), dim=1)
        states = draft.hints["states_RbD"]
        bias = self.head.bias(states, states.mean(1), prev)[:, 1:]
        logits, params = draft.hints["logits_RNV"] + bias, ctx.rows[0].params
        return replace(out, probs_BNV=shape_probs(logits.flatten(0, 1), params).view(-1, N, VOCAB))


class SharedNoise(Noise):
    """The same numbers for two slots of a block."""

    def exponentials(self, stream: str, position: int, count: int) -> Any:
        return super().exponentials(stream, position // 2, count)


class NoiseOfSlots(Noise):
    """The same numbers in every block, addressed by slot: a position behind a rejection gets those
    that decided the rejection."""

    asked = -1

    def exponentials(self, stream: str, position: int, count: int) -> Any:
        self.asked += 1
        return super().exponentials(stream, self.asked % N, count)


def p_of_draws(stage: Refine, params: SamplingParams, noise: type[Noise] = Noise) -> float:
    """Whether each drafted token is a draw from its law, given the drafted tokens before it.

    Pearson's statistic over (slot, tokens before, token); the expected counts are sums of laws, which
    differ within a cell, so that the true variance is smaller: the p-value errs upwards.
    """
    ctx = DraftContext(rows=rows_of(4000, params, noise), state=None)
    out = stage(stage.drafter.propose(ctx), ctx)
    assert out.probs_BNV is not None
    statistic, freedom = 0.0, 0
    for k in range(N):
        before = (out.tokens_BN[:, :k] * VOCAB ** torch.arange(k)).sum(1)
        seen, expected = torch.zeros(2, VOCAB**k, VOCAB, dtype=torch.float64)
        seen.index_put_((before, out.tokens_BN[:, k]), torch.tensor(1.0).double(), accumulate=True)
        expected.index_add_(0, before, out.probs_BNV[:, k].double())
        assert not seen[expected == 0].any(), "a token of probability 0 was drafted"
        for counts, means in zip(seen, expected, strict=True):
            kept = means > 5
            if kept.sum() > 1:
                statistic += float(((counts - means)[kept] ** 2 / means[kept]).sum())
                freedom += int(kept.sum()) - bool(kept.all())
    return float(chi2.sf(statistic, freedom))


def decoded(stage: Refine, rows: list[Row]) -> None:
    """Run the real loop with the rejection rule until every row is finished."""
    session = loop.Session(
        target=TableTarget(TARGET),
        drafter=stage.drafter,
        accept=rejection,
        stages=(stage,),
        slots=len(rows),
    )
    for _ in loop.run(session, rows):
        pass


def p_value(
    stage: Refine, params: SamplingParams, count: int = 2500, noise: type[Noise] = Noise
) -> float:
    """Chi-square of the joint counts of three tokens, the first ones and the next, against the table.

    Most blocks lose a token, so that positions are drafted again, by several rounds, with the numbers
    they had. The smaller of both p-values, times two.
    """
    rows = rows_of(count, params, noise)
    decoded(stage, rows)
    P = shape_probs(TARGET.table_VVV.flatten(0, 1), params).view(VOCAB, VOCAB, VOCAB).double()
    P /= P.sum(-1, keepdim=True)
    joint = torch.einsum("a,ab,abc,bcd->abcd", P[2, 3], P[3], P, P)
    values = []
    for first, law in ((0, joint.sum(3)), (1, joint.sum(0))):
        counts = np.zeros((VOCAB,) * 3)
        for row in rows:
            counts[tuple(row.output[1 + first : 4 + first])] += 1
        seen, expected = counts.flatten(), law.flatten().numpy() * count
        assert not seen[expected == 0].any(), "a token of probability 0 was emitted"
        rare = expected < 5  # together one cell
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        some = expected > 0
        values.append(float(chisquare(seen[some], expected[some]).pvalue))
    return min(1.0, 2 * min(values))


XPRESS = [("xpress", sweeps, PLAIN, None) for sweeps in (1, 2, 3, 6)]
SETTINGS = [*XPRESS, ("markov", None, PLAIN, None), ("xpress", 2, CUT, WORDS)]


@pytest.mark.parametrize(("kind", "sweeps", "params", "words"), SETTINGS)
def test_each_token_is_a_draw_from_the_law_handed_over(
    kind: str, sweeps: int | None, params: SamplingParams, words: Sequence[int] | None
) -> None:
    """Given the draft tokens before it: all that rejection needs, for any number of sweeps."""
    assert p_of_draws(stage_of(kind, sweeps, words), params) > 1e-4


@pytest.mark.parametrize(("kind", "sweeps", "params", "words"), SETTINGS)
def test_rejection_keeps_the_distribution(
    kind: str, sweeps: int | None, params: SamplingParams, words: Sequence[int] | None
) -> None:
    """Over several rounds of a row, with its own numbers, some of which serve twice."""
    assert p_value(stage_of(kind, sweeps, words), params) > 1e-4


@pytest.mark.parametrize("sweeps", [1, 2])
def test_the_law_of_the_final_tokens_is_caught(sweeps: int) -> None:
    """The classic mistake is one before the sweeps have settled, which three of them have here."""
    wrong = LawOfTheResult(Blocks("xpress"), "xpress", sweeps=sweeps, samples=True)
    assert p_of_draws(wrong, PLAIN) < 1e-9
    if sweeps == 1:
        assert p_value(wrong, PLAIN) < 1e-9
    else:
        settled = LawOfTheResult(Blocks("xpress"), "xpress", sweeps=N, samples=True)
        assert p_of_draws(settled, PLAIN) > 1e-4


def test_shared_numbers_are_caught() -> None:
    """Between two slots of a block, and between the blocks of a row."""
    assert p_of_draws(stage_of("xpress", 2), PLAIN, SharedNoise) < 1e-9
    assert p_of_draws(stage_of("xpress", 2), PLAIN, NoiseOfSlots) > 1e-4, "no block alone shows it"
    assert p_value(stage_of("xpress", 2), PLAIN, noise=NoiseOfSlots) < 1e-9


def test_the_world_has_something_to_tell() -> None:
    """Else the laws above would hold for a stage that does nothing, or for drafts without chance."""
    few = {k: stage_of("xpress", k) for k in (1, 2, 3)}
    rows = rows_of(400, PLAIN)
    ctx = DraftContext(rows=rows, state=None)
    draft = few[1].drafter.propose(ctx)
    outs = {k: stage(draft, ctx) for k, stage in few.items()}
    tokens = {k: out.tokens_BN for k, out in outs.items()}
    assert (tokens[1] != tokens[2]).float().mean() > 0.1, "a second sweep changes tokens"
    assert (tokens[2] != tokens[3]).any(), "and so does a third"
    assert outs[3].probs_BNV is not None
    assert (outs[3].probs_BNV.amax(-1).mean(0) < 0.95).all(), "no slot's law is one-hot"
    decoded(few[1], rows)
    kept = [row.rounds[1].accepted for row in rows]  # of the first block
    assert all(kept.count(n) > 5 for n in range(N + 1)), "it is cut at every slot"


def walked(stage: Refine, row: Row, states: Tensor, base_NV: Tensor) -> tuple[list[int], Tensor]:
    """One row, naively: slot by slot, each with the head's bias for the tokens so far."""
    prev, chosen, logits_NV = [*row.tokens[-2:], *[0] * (N - 1)], [], torch.empty_like(base_NV)
    for k in range(N):
        bias = stage.head.bias(states[None], states.mean(0)[None], torch.tensor([prev]))
        logits_NV[k] = base_NV[k] + bias[0, k + 1]
        chosen.append(picked(stage, row, k, logits_NV[k]))
        if k + 2 < BLOCK:
            prev[k + 2] = chosen[-1]
    return chosen, logits_NV


def picked(stage: Refine, row: Row, k: int, logits_V: Tensor) -> int:
    """The target id that slot k takes: the most probable, or a race with the position's noise."""
    if stage.samples and row.params.temperature > 0:
        noise = row.noise.exponentials("refine", len(row.tokens) + k, len(logits_V))
        logits_V = shape_probs(logits_V[None], row.params)[0] / torch.from_numpy(noise)
    return int(stage.drafter.to_target(logits_V.argmax()))


def ragged(count: int = 24) -> list[Row]:
    """Rows of different lengths and parameters; one in four is greedy."""
    params = (PLAIN, CUT, GREEDY, replace(PLAIN, temperature=1.4))
    return [
        new_row([1] * (i % 3) + [i % VOCAB, (i // 5) % VOCAB], params[i % 4], noise=Noise(i))
        for i in range(count)
    ]


@pytest.mark.parametrize("words", [None, WORDS])
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_enough_sweeps_are_the_walk_of_each_row_alone(
    kind: str, samples: bool, words: Sequence[int] | None
) -> None:
    """B - 1 of them; laws are those of the walk, over the target's vocabulary; greedy ones one-hot."""
    stage = stage_of(kind, None if kind == "markov" else BLOCK - 1, words, samples)
    ctx = DraftContext(rows=ragged(), state=None)
    draft = stage.drafter.propose(ctx)
    out = stage(draft, ctx)
    assert out.sizes_B == draft.sizes_B
    assert (out.probs_BNV is not None) == samples
    for b, row in enumerate(ctx.rows):
        states, base = draft.hints["states_RbD"][b], draft.hints["logits_RNV"][b]
        tokens, logits = walked(stage, row, states, base)
        assert out.tokens_BN[b].tolist() == tokens
        torch.testing.assert_close(out.hints["refined_RNV"][b], logits)
        if out.probs_BNV is not None:
            law = torch.zeros(N, VOCAB)
            if row.params.temperature == 0:
                law[range(N), tokens] = 1.0
            else:
                law[:, list(words or range(VOCAB))] = shape_probs(logits, row.params)
            torch.testing.assert_close(out.probs_BNV[b], law)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("sweeps", range(1, 7))
def test_stopping_early_is_as_good_as_every_sweep(
    sweeps: int, samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against sweeps written naively, all of them, without the folded mixer."""
    stage = stage_of("xpress", sweeps, samples=samples)
    swept, latent = [], stage.head.latent
    monkeypatch.setattr(stage.head, "latent", lambda *a: swept.append(0) or latent(*a))
    ctx = DraftContext(rows=ragged(), state=None)
    draft = stage.drafter.propose(ctx)
    out = stage(draft, ctx)
    took = len(swept)
    assert took <= sweeps and (sweeps < 6 or took < 6), "four sweeps can change nothing any more"
    base, states = draft.hints["logits_RNV"], draft.hints["states_RbD"]

    def pick(logits: Tensor) -> Tensor:
        return torch.tensor(
            [
                [picked(stage, row, k, logits[b, k]) for k in range(N)]
                for b, row in enumerate(ctx.rows)
            ]
        )

    known, tokens = torch.tensor([row.tokens[-2:] for row in ctx.rows]), pick(base)
    for _ in range(sweeps):
        prev = torch.cat((known, tokens[:, :-1]), dim=1)
        logits = base + stage.head.bias(states, states.mean(1), prev)[:, 1:]
        tokens = pick(logits)
    assert torch.equal(out.tokens_BN, tokens)
    torch.testing.assert_close(out.hints["refined_RNV"], logits)


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_a_previous_token_reaches_its_slot_and_later_ones_only(kind: str) -> None:
    head, generator = random_head(kind), torch.Generator().manual_seed(3)
    hidden = torch.randn(2, BLOCK, WIDTH, generator=generator)
    prev = torch.randint(0, VOCAB, (2, BLOCK), generator=generator)
    before = head.bias(hidden, hidden.mean(1), prev)
    for j in range(BLOCK):
        other = prev.clone()
        other[:, j] = (other[:, j] + 1) % VOCAB
        changed = (head.bias(hidden, hidden.mean(1), other) != before).any(-1).any(0).tolist()
        assert changed == [k == j or (k > j and kind == "xpress") for k in range(BLOCK)]


class Forced(Noise):
    """The row's own numbers, but for one position, where ``token`` always wins the race."""

    position, token = -1, 0

    def exponentials(self, stream: str, position: int, count: int) -> Any:
        numbers = super().exponentials(stream, position, count)
        if position == self.position:
            numbers[self.token] = 1e-30
        return numbers


@pytest.mark.parametrize(
    ("kind", "sweeps"), [("xpress", k) for k in (1, 2, 6)] + [("markov", None)]
)
def test_a_draft_token_changes_no_logits_at_or_before_its_slot(
    kind: str, sweeps: int | None
) -> None:
    """Through the stage, where the token feeds the next sweep; behind its slot it changes some."""
    stage = stage_of(kind, sweeps)
    rows = rows_of(8, PLAIN, Forced)
    ctx = DraftContext(rows=rows, state=None)
    draft = stage.drafter.propose(ctx)
    for j in range(N):
        outs = []
        for token in (1, 2):
            for row in rows:
                row.noise.position, row.noise.token = len(row.tokens) + j, token  # type: ignore[attr-defined]
            outs.append(stage(draft, ctx))
            assert (outs[-1].tokens_BN[:, j] == token).all()
        one, two = (out.hints["refined_RNV"] for out in outs)
        changed = (one != two).any(-1).any(0).tolist()
        assert not any(changed[: j + 1])
        assert j + 1 == N or changed[j + 1]


def test_the_folded_mixer_is_the_unfolded_one() -> None:
    head, generator = random_head("xpress"), torch.Generator().manual_seed(4)
    hidden = torch.randn(3, BLOCK, WIDTH, generator=generator)
    fixed = head.fixed(hidden, hidden.mean(1))
    prev = torch.randint(0, VOCAB, (3, BLOCK), generator=generator)
    folded, plain = head.latent(fixed, prev, head.mixer()), head.latent(fixed, prev)
    torch.testing.assert_close(folded, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_a_silent_head_leaves_the_draft_as_it_was(kind: str) -> None:
    """Exactly with a readout of zeros; a fresh head whispers, since only its mixer is zero."""
    stage = stage_of(kind, None, samples=False)
    ctx = DraftContext(rows=ragged(), state=None)
    draft = stage.drafter.propose(ctx)
    assert not torch.equal(stage(draft, ctx).tokens_BN, draft.tokens_BN)
    base = draft.hints["logits_RNV"]
    init_head(stage.head, torch.Generator().manual_seed(0))
    fresh = Refine(stage.drafter, kind)(draft, ctx)  # anew: the stage keeps the folded mixer
    torch.testing.assert_close(fresh.hints["refined_RNV"], base, rtol=0, atol=0.01)
    nn.init.zeros_(stage.head.readout.weight)
    silent = Refine(stage.drafter, kind)(draft, ctx)
    assert torch.equal(silent.hints["refined_RNV"], base)
    assert torch.equal(silent.tokens_BN, draft.tokens_BN)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_rows_without_a_draft_or_with_nan_are_not_verified_and_disturb_nobody(
    kind: str, samples: bool
) -> None:
    stage = stage_of(kind, None, samples=samples)
    stage.drafter.silent = 3
    rows = ragged()
    ctx = DraftContext(rows=rows, state=None)
    draft = stage.drafter.propose(ctx)
    ready, silent = draft.hints["ready"], [b for b in range(24) if rows[b].tokens[-1] == 3]
    assert silent and len(ready) + len(silent) == len(rows)
    whole = stage(draft, ctx)
    draft.hints["logits_RNV"][4, 1] = torch.nan
    out = stage(draft, ctx)
    for b in range(len(rows)):
        assert out.sizes_B[b] == (0 if b in silent or b == ready[4] else N)
        if b != ready[4]:
            assert torch.equal(out.tokens_BN[b], whole.tokens_BN[b])
            if out.probs_BNV is not None and whole.probs_BNV is not None:
                assert torch.equal(out.probs_BNV[b], whole.probs_BNV[b])
    nobody = DraftContext(rows=[rows[b] for b in silent], state=None)
    empty = Draft.empty(len(silent))
    assert stage(empty, nobody) is empty
