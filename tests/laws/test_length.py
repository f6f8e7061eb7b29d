"""Cutting drafts never changes what comes out, and cut tokens are not computed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from harness import FreshNoise, Scripted, TableDrafter, TableLM, TableTarget, new_row, truths
from paceline.core import Draft, DraftContext, Round, SamplingParams
from paceline.decode import loop
from paceline.decode.accept import match, rejection
from paceline.decode.length import (
    CostAware,
    Costs,
    Cut,
    First,
    Survival,
    best_lengths,
    isotonic,
)
from paceline.decode.pace import Pace, Sparing, SparingState
from paceline.decode.warp import shape_probs
from paceline.drafters.length import AdaLength
from paceline.pipeline import Pipeline

PREFILL = Round(drafted=0, accepted=0, committed=1)


def linear(per_node: float, fixed: float = 1.0, draft: float = 0.0) -> Costs:
    """A round costs ``fixed`` and so much per node."""
    rows, drafts = (1, 4), (0, 8)
    line = [[fixed + per_node * r * (1 + d) for d in drafts] for r in rows]
    return Costs(
        rows_B=rows,
        drafts_N=drafts,
        verify_BN=tuple(map(tuple, line)),
        draft_B=(draft, draft),
        context=0,
        per_cached=0.0,
    )


def test_lengths_are_the_best_of_all() -> None:
    """Against every combination, with costs that have steps."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        B, N = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        survival = np.cumprod(rng.random((B, N)), axis=1)
        seconds = np.cumsum(rng.random(B * N + 1) * rng.integers(0, 2, B * N + 1)) + 0.5
        for drafting in (0.0, 0.3, 5.0):
            sizes, tokens = best_lengths(survival, seconds, 1, drafting)
            kept = 1 + B + sum(survival[b, :n].sum() for b, n in enumerate(sizes))
            assert tokens[sum(sizes)] == pytest.approx(kept) and tokens[0] == 1 + B
            outcomes = [
                (1 + B + sum(survival[b, :n].sum() for b, n in enumerate(each)), seconds[sum(each)])
                for each in itertools.product(range(N + 1), repeat=B)
            ]
            best = max(some / (spent + drafting) for some, spent in outcomes)
            plain = (1 + B) / seconds[0]
            if best > plain:  # rounds like this one for ever
                assert kept / (seconds[sum(sizes)] + drafting) == pytest.approx(best)
            else:  # plain ones for ever after this one, whose drafts are there already
                gain = max(some - plain * spent for some, spent in outcomes)
                assert kept - plain * seconds[sum(sizes)] == pytest.approx(gain)


def test_costs_meet_their_points_and_grow_between_and_beyond_them() -> None:
    costs = linear(0.5)
    for rows, drafts in ((1, 0), (1, 8), (4, 8), (2, 4), (3, 2)):
        found = costs.verify(rows, np.array([float(rows * drafts)]), 0)[0]
        assert found == pytest.approx(1 + 0.5 * rows * (1 + drafts))
    assert costs.verify(8, np.array([0.0]), 0)[0] == pytest.approx(2 * (1 + 0.5 * 4))
    cached = Costs(**{**vars(costs), "context": 10, "per_cached": 0.25})
    extra = cached.verify(2, np.array([0.0]), 28)[0] - costs.verify(2, np.array([0.0]), 0)[0]
    assert extra == pytest.approx(0.25 * 8)


def test_isotonic_is_the_nearest_rising_line() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        x, y, w = rng.random(7), rng.random(7), rng.random(7) + 0.1
        found = isotonic(x, y, w)
        line = found[np.argsort(x)]
        assert (np.diff(line) >= 0).all()
        for _ in range(200):  # no rising line is nearer
            other = np.sort(rng.random(7))[np.argsort(np.argsort(x))]
            assert (w * (found - y) ** 2).sum() <= (w * (other - y) ** 2).sum() + 1e-12


@dataclass
class Sure:
    """Around a drafter: hints as a block drafter gives them, with logits that say how sure it is."""

    inner: Any
    vocab: int
    name: str = "sure"
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.samples = self.inner.samples

    def new_state(self, slots: int) -> Any:
        return self.inner.new_state(slots)

    def release(self, state: Any, slot: int) -> None:
        self.inner.release(state, slot)

    def propose(self, ctx: DraftContext) -> Draft:
        draft = self.inner.propose(ctx)
        sizes, tokens = draft.sizes_B, draft.tokens_BN
        generator = torch.Generator().manual_seed(int(tokens.sum()) + len(ctx.rows))
        logits = torch.randn(*tokens.shape, self.vocab, generator=generator) * 3
        hints = {"ready": list(range(len(sizes))), "logits_RNV": logits}
        return Draft.chain(tokens, sizes, draft.probs_BNV, **hints)


@dataclass
class Counting(TableTarget):
    """Counts the nodes that are scored."""

    nodes: int = 0

    def score(self, draft: Draft, rows: Any, cache: Any, taps: Any) -> Any:
        self.nodes += len(rows) + sum(draft.sizes_B)
        return super().score(draft, rows, cache, taps)


HALF = Survival(confidence=((0.0, 1.0),), accepted=((0.0, 1.0),))
RULES = {
    "first": lambda: Cut(First(2)),
    "none": lambda: Cut(First(0)),
    "cost": lambda: Cut(CostAware(costs=linear(0.2), greedy=HALF, sampled=HALF)),
    "base cost": lambda: Cut(CostAware(costs=linear(0.2), greedy=HALF, sampled=HALF, base=True)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_are_plain_decodings_and_cut_nodes_are_not_scored(
    rule: str, block: int, temperature: float
) -> None:
    model = TableLM.cycle(17)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=9 + i, ignore_eos=True)
        for i in range(4)
    ]
    prompts = [[i] * (i + 1) for i in range(4)]
    gold = truths(model, prompts, params)
    script = Scripted(
        truth={i: g.token_ids for i, g in enumerate(gold)}, vocab=17, block=block, pattern=(0, 3, 1)
    )
    target, stage = Counting(model), RULES[rule]()
    session = loop.Session(
        target=target,
        drafter=Sparing(Sure(script, 17), Foreseen(-1.0)),
        accept=match,
        stages=(stage,),
        slots=3,
    )
    rows = [new_row(p, q, request=i) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    for _ in loop.run(session, rows):
        pass
    assert [row.output for row in rows] == [g.token_ids for g in gold]
    scored = sum(1 + done.drafted for row in rows for done in row.rounds)
    assert target.nodes == scored
    if rule == "none":
        assert scored == sum(len(row.output) for row in rows)


def p_value(stage: Any, rows: int) -> float:
    """Chi-square of the joint counts of two tokens under rejection."""
    model, other = TableLM.random(5, seed=1), TableLM.random(5, seed=2)
    params = SamplingParams(temperature=0.7, max_tokens=2, ignore_eos=True)
    source, counts = random.Random(3), np.zeros((5, 5))
    for _ in range(rows // 2000):
        batch = [new_row([1, 2], params, noise=FreshNoise(source)) for _ in range(2000)]
        for row in batch:
            row.rounds.append(PREFILL)
        session = loop.Session(
            target=TableTarget(model),
            drafter=Sure(TableDrafter(other, block=2), 5),
            accept=rejection,
            stages=(stage,),
            slots=2000,
        )
        for _ in loop.run(session, batch):
            pass
        for row in batch:
            counts[tuple(row.output)] += 1
    first = shape_probs(model.table_VVV[1, 2][None], params)[0]
    second = shape_probs(model.table_VVV[2], params)
    joint = (first[:, None] * second).double().flatten().numpy()
    seen = counts.flatten()
    return float(chisquare(seen, joint * seen.sum() / joint.sum()).pvalue)


class OwnToken:
    """Cuts before a sampled token that the drafter itself finds unlikely, and says it keeps the law."""

    name, law = "own token", "keeps"

    def __call__(self, draft: Draft, ctx: DraftContext) -> list[int]:
        assert draft.probs_BNV is not None
        own = draft.probs_BNV.gather(2, draft.tokens_BN[..., None])[..., 0]
        return (own > 0.3).long().cumprod(-1).sum(-1).tolist()


def test_rules_that_keep_the_law_do_and_the_one_that_lies_is_caught() -> None:
    assert p_value(Cut(First(1)), 20_000) > 1e-4
    base = CostAware(costs=linear(0.3), greedy=HALF, sampled=HALF, base=True)
    assert p_value(Cut(base), 20_000) > 1e-4
    assert p_value(Cut(OwnToken()), 20_000) < 1e-4


def test_a_rule_that_looks_at_tokens_and_rejection_are_refused() -> None:
    looks = Cut(CostAware(costs=linear(0.3), greedy=HALF, sampled=HALF))
    drafter, target = Sure(TableDrafter(TableLM.random(5, seed=2), block=2), 5), _Layers()
    with pytest.raises(ValueError, match="'cost' looks at tokens"):
        Pipeline(target=target, drafter=drafter, accept="rejection", stages=(looks,))
    Pipeline(target=target, drafter=drafter, accept="rejection", stages=(Cut(First(1)),))
    row = new_row([1, 2], SamplingParams(temperature=1.0, seed=0))
    ctx = DraftContext(rows=[row], state=None)
    assert looks(drafter.propose(ctx), ctx).probs_BNV is None


class _Served(TableTarget):
    """What a pipeline asks of a target."""

    num_layers, max_length, vocab_size = 0, 100, 5
    tokenizer, eos_ids, dtype = None, (), torch.float32


class _Past(Sure):
    """Sure or not by the last committed token."""

    def propose(self, ctx: DraftContext) -> Draft:
        draft = super().propose(ctx)
        logits = torch.zeros(*draft.tokens_BN.shape, self.vocab)
        logits[..., 0] = torch.tensor([[3.0 * row.tokens[-1]] for row in ctx.rows])
        hints = {**draft.hints, "logits_RNV": logits}
        return Draft.chain(draft.tokens_BN, draft.sizes_B, draft.probs_BNV, **hints)


class _Apart(Pipeline):
    """The mistake: rows of one seed that share their noise."""

    @property
    def _mixes(self) -> bool:
        return False


@pytest.mark.parametrize("kind", [Pipeline, _Apart])
def test_rows_of_one_seed_tell_nothing_of_each_other(kind: type[Pipeline]) -> None:
    """Two prompts, the second a token longer: it has used the numbers that the first one will use, and
    how sure its drafts are, which follows from them, decides how much of the first is verified."""
    model, other = TableLM.random(5, seed=1), TableLM.random(5, seed=2)
    dear = Costs(
        rows_B=(1, 2),
        drafts_N=(0, 0.5, 1),
        verify_BN=((1.0, 1.0, 1.0), (1.0, 1.0, 1e3)),
        draft_B=(0.0, 0.0),
        context=1,
        per_cached=0.0,
    )
    rule = CostAware(costs=dear, greedy=HALF, sampled=HALF, base=True)
    pipeline = kind(
        target=_Served(model),
        drafter=_Past(TableDrafter(other, block=1), 5),
        accept="rejection",
        stages=(Cut(rule),),
    )
    counts = np.zeros((5, 5))
    for seed in range(2500):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=3, ignore_eos=True)
        rows = pipeline.rows([[1, 2], [1, 2, 2]], params)
        for _ in loop.run(pipeline.session(2), rows):
            pass
        counts[tuple(rows[0].output[:2])] += 1
    tests = []
    for first in range(5):
        law = shape_probs(model.table_VVV[2, first][None], params)[0].double().numpy()
        seen = counts[first]
        if seen.sum() > 100:
            tests.append(float(chisquare(seen, law * seen.sum() / law.sum()).pvalue))
    assert tests
    assert (min(tests) < 1e-6) == (kind is _Apart), tests


class _Layers:
    num_layers = 0


@dataclass
class Foreseen:
    """An outlook that says what it is told to."""

    loss: float
    behind: float = 0.0

    def lost(self, rows: Any) -> float:
        return self.loss

    def catching_up(self, rows: Any) -> float:
        return self.behind


def pause(pace: Pace, lost: float, behind: float = 0.0) -> int:
    """Rounds that pass without drafting from now on."""
    return next(i for i in range(1000) if not pace.paused(lost, behind))


def test_a_look_at_drafts_costs_a_fiftieth_of_the_pause_before_it() -> None:
    """None before the first look is worth it; the more it loses and has to take in, the later."""
    found = [pause(Pace(), lost) for lost in (1.8, 0.5, 0.01, 0.0, -0.3, 50.0)]
    assert found == [90, 25, 1, 0, 0, 256]
    assert pause(Pace(), 0.5, behind=1.0) == 75
    assert pause(Pace(), -0.1, behind=9.0) == 0  # it pays: what waits is taken in once
    pace = Pace()
    assert pause(pace, 0.5) == pause(pace, 0.5) == 25  # counted from the last look
    assert pause(pace, -0.1) == 0  # the load fell


def test_what_was_seen_corrects_what_is_expected() -> None:
    pace = Pace()
    assert not pace.paused(-0.2, 0.0)
    pace.seen(1.8)
    assert pace.off == pytest.approx(0.3 * 2.0)
    assert pause(pace, -0.2) == 20  # 0.4 is lost
    pace.seen(-0.8)
    assert pace.off == pytest.approx(0.7 * 0.6 - 0.3 * 0.6)
    assert pause(pace, -0.3) == 0


def test_a_drafter_pauses_by_its_outlook_and_keeps_what_waits() -> None:
    outlook = Foreseen(0.04)
    drafter = Sparing(Sure(TableDrafter(TableLM.random(5, seed=2), block=2), 5), outlook)
    state = drafter.new_state(2)
    assert isinstance(state, SparingState)
    rows = [new_row([1, 2], SamplingParams(temperature=1.0, seed=i)) for i in range(2)]
    rows[0].features = [torch.zeros(2, 3)]
    ctx = DraftContext(rows=rows, state=state)
    assert [drafter.propose(ctx).sizes_B for _ in range(3)] == [[0, 0], [0, 0], [2, 2]]
    outlook.loss = -0.04
    assert drafter.propose(ctx).sizes_B == [2, 2]
    assert len(rows[0].features) == 1  # the inner one takes it, not the pause


def test_typical_blocks_say_what_drafting_will_lose() -> None:
    """Two kinds of blocks, half of them sure: the mean of what rounds of them lose, by load, per kind
    of row, and what waits."""
    blocks = ((0.0, 0.0), (1.0, 1.0))
    curve = Survival(confidence=((0.0, 1.0),), accepted=((0.0, 1.0),), typical=blocks)
    doubtful = Survival(confidence=((0.0, 1.0),), accepted=((0.0, 0.0),), typical=blocks)
    costs = replace(linear(0.0, draft=0.5), per_waiting=0.25)
    rule = CostAware(costs=costs, greedy=curve, sampled=doubtful)
    cold, warm = (
        new_row([1, 2], SamplingParams(max_tokens=30, temperature=t, seed=0)) for t in (0.0, 1.0)
    )
    # a round takes 1 s and 0.5 s of drafting, and 0.25 s to take in each token that it commits
    sure, unsure = 1.5 + 0.25 * 3 - 3.0, 1.5 + 0.25 - 1.0
    assert rule.lost([warm]) == pytest.approx(unsure)
    assert min(sure, unsure) < rule.lost([cold]) < max(sure, unsure)
    assert rule.lost([cold]) == pytest.approx((sure + unsure) / 2, abs=0.5)
    assert rule.lost([cold, warm]) < rule.lost([warm, warm])
    cold.features = [torch.zeros(2, 3), torch.zeros(1, 3)]
    assert rule.catching_up([cold, warm]) == pytest.approx(0.75)
    silent = CostAware(costs=costs, greedy=HALF, sampled=HALF)
    assert silent.lost([cold]) == 0.0


def test_where_nodes_are_dear_nothing_is_drafted_and_where_they_are_free_everything() -> None:
    draft_ctx = DraftContext(
        rows=[new_row([1, 2], SamplingParams(max_tokens=30), request=i) for i in range(2)],
        state=None,
    )
    logits = torch.zeros(2, 4, 7)
    logits[..., 0] = 3.0
    draft = Draft.chain(
        torch.zeros(2, 4, dtype=torch.int64), [4, 4], None, ready=[0, 1], logits_RNV=logits
    )
    for per_node, sizes in ((0.0, [4, 4]), (100.0, [0, 0])):
        rule = CostAware(costs=linear(per_node), greedy=HALF, sampled=HALF)
        assert rule(draft, draft_ctx) == sizes


def test_a_row_without_a_draft_asks_nothing_of_the_length_head() -> None:
    """Its states are NaN where the drafter's were: that row is decoded plainly, the other is not."""

    class _Whole(torch.nn.Module):
        def forward(self, states_RbD: torch.Tensor) -> torch.Tensor:
            return states_RbD[:, 0, 0]

    drafter = SimpleNamespace(module=SimpleNamespace(thresh_head_two_model=_Whole()))
    states = torch.full((2, 4, 3), 0.5)
    states[0] = float("nan")
    draft = Draft.chain(
        torch.zeros(2, 3, dtype=torch.int64), [0, 3], None, ready=[0, 1], states_RbD=states
    )
    ctx: Any = None
    assert AdaLength(drafter, rate=1.0)(draft, ctx) == [0, 1]
