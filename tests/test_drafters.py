"""Every drafter on a real architecture: ids equal the golden loop's, caches equal a fresh prefill.

Does not know trained weights.
"""

from __future__ import annotations

import pytest
import torch

from paceline.core import Noise, Row, SamplingParams
from paceline.decode.accept import match, rejection
from paceline.decode.loop import Session, run
from paceline.decode.reference import golden
from paceline.drafters.dflash import DFlashConfig, DFlashModule, init_random, offsets_of
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.pipeline import Pipeline
from tiny import tiny_target

PROMPTS = [[3, 4, 5], [9, 9, 1, 9, 9, 1, 9], list(range(20)), [50]]


def dflash(target, *, reduced: bool = False, samples: bool = False, **changes) -> DFlashDrafter:
    settings = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        block_size=5,
        num_target_layers=3,
        mask_token_id=96,
        target_layer_ids=(0, 1),
        max_position_embeddings=128,
        draft_vocab_size=40 if reduced else None,
    )
    config = DFlashConfig(**(settings | changes))
    module = DFlashModule(config)
    init_random(module, torch.Generator().manual_seed(0), std=0.2)
    d2t = offsets_of(torch.arange(0, 80, 2)) if reduced else None
    return DFlashDrafter(config, module.eval().requires_grad_(False), d2t, target, samples=samples)


def make(name: str, target, samples: bool = False):
    if name.startswith("dflash"):
        return dflash(target, reduced="reduced" in name, samples=samples)
    if name == "ngram":
        return NgramDrafter(num_drafts=4)
    if name == "model-self":
        return ModelDrafter(target, target, num_drafts=3, samples=samples)
    return ModelDrafter(tiny_target("llama", seed=5), target, num_drafts=3, samples=samples)


NAMES = ["dflash", "dflash-reduced", "ngram", "model", "model-self"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_equal_the_golden_loop(name: str, kind: str, temperature: float) -> None:
    target = tiny_target(kind)
    pipeline = Pipeline(target=target, drafter=make(name, target))
    params = [SamplingParams(max_tokens=12 + i, temperature=temperature, seed=i) for i in range(4)]
    got = [o.outputs[0].token_ids for o in pipeline.generate(PROMPTS, params, batch_size=3)]
    want = [
        golden(target.next_logits, prompt, p).token_ids
        for prompt, p in zip(PROMPTS, params, strict=True)
    ]
    assert got == want


def test_drafting_with_the_target_itself_accepts_everything() -> None:
    target = tiny_target()
    for accept, temperature in (("match", 0.0), ("rejection", 0.9), ("rejection", 0.0)):
        drafter = make("model-self", target, samples=accept == "rejection")
        pipeline = Pipeline(target=target, drafter=drafter, accept=accept)
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=1)
        rounds = pipeline.generate([PROMPTS[0]], params)[0].outputs[0].rounds
        assert all(r.accepted == r.drafted for r in rounds)


@pytest.mark.parametrize("name", ["dflash", "dflash-reduced", "model"])
def test_rejection_runs_for_ragged_mixed_rows(name: str) -> None:
    target = tiny_target()
    pipeline = Pipeline(target=target, drafter=make(name, target, True), accept="rejection")
    params = [SamplingParams(max_tokens=9, temperature=t, seed=1) for t in (0.0, 0.7, 1.2, 0.0)]
    outputs = pipeline.generate(PROMPTS, params)
    for i in (0, 3):
        want = golden(target.next_logits, PROMPTS[i], params[i]).token_ids
        assert outputs[i].outputs[0].token_ids == want
    alone = pipeline.generate([PROMPTS[1]], params[1])[0].outputs[0].token_ids
    assert outputs[1].outputs[0].token_ids == alone


@pytest.mark.parametrize("name", NAMES)
def test_law_4_after_every_round_the_cache_equals_a_fresh_prefill(name: str) -> None:
    target = tiny_target("mistral")
    session = Pipeline(target=target, drafter=make(name, target)).session(2)
    rows = Pipeline(target=target).rows(PROMPTS[:2], SamplingParams(max_tokens=14))
    for _ in run(session, rows):
        for row in session.rows:
            fresh = Session(target=target, drafter=None, accept=match, slots=1)
            copy = Row(
                slot=-1,
                tokens=row.tokens[:-1],
                prompt_length=1,
                params=SamplingParams(),
                noise=Noise(0),
                stop_ids=frozenset(),
                limit=1000,
            )
            fresh.add(copy)
            fresh.step()
            length = len(row.tokens) - 1
            assert session.cache.lengths[row.slot] == length == fresh.cache.lengths[0]
            for layer in range(3):
                got, want = session.cache.read(layer, row.slot), fresh.cache.read(layer, 0)
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_one_drafter_object_leaks_nothing_into_the_next_request() -> None:
    target = tiny_target()
    params = SamplingParams(max_tokens=10)
    shared = Pipeline(target=target, drafter=dflash(target))
    shared.generate([PROMPTS[2]], SamplingParams(max_tokens=40))
    fresh = Pipeline(target=target, drafter=dflash(target))
    a, b = (p.generate([PROMPTS[0]], params)[0].outputs[0] for p in (shared, fresh))
    assert a.token_ids == b.token_ids and a.rounds == b.rounds


def test_drafter_positions_end_before_the_context_does() -> None:
    target = tiny_target()
    pipeline = Pipeline(target=target, drafter=dflash(target, max_position_embeddings=16))
    params = SamplingParams(max_tokens=20)
    with pytest.warns(RuntimeWarning, match="16 positions"):
        got = pipeline.generate([PROMPTS[0]], params)[0].outputs[0]
    assert got.token_ids == golden(target.next_logits, PROMPTS[0], params).token_ids
    assert got.rounds[-1].drafted == 0


def test_nan_drafter_drafts_nothing_and_says_so() -> None:
    target = tiny_target()
    drafter = dflash(target)
    drafter.module.norm.weight.data.fill_(float("nan"))
    params = SamplingParams(max_tokens=6)
    with pytest.warns(RuntimeWarning, match="NaN"):
        got = Pipeline(target=target, drafter=drafter).generate([PROMPTS[0]], params)
    assert got[0].outputs[0].token_ids == golden(target.next_logits, PROMPTS[0], params).token_ids


@pytest.mark.parametrize(
    "change", [{"hidden_size": 40}, {"vocab_size": 98}, {"num_target_layers": 4}]
)
def test_drafter_of_another_target_is_refused(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        dflash(tiny_target(), **change)


def test_illegal_pairs_and_requests_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="accept='match'"):
        Pipeline(target=target, drafter=dflash(target), accept="rejection")
    pipeline = Pipeline(target=target)
    for prompt, message in (([], "empty"), ([1] * 128, "context"), ([97], "outside")):
        with pytest.raises(ValueError, match=message):
            pipeline.generate([prompt], SamplingParams())
    for bad in ({"temperature": -1}, {"stop": ""}, {"top_p": 0}, {"n": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_samples_and_usage_agree_with_the_ids() -> None:
    pipeline = Pipeline(target=tiny_target())
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=3)
    (output,) = pipeline.generate([PROMPTS[0]], params)
    ids = [c.token_ids for c in output.outputs]
    assert len({tuple(i) for i in ids}) == 3 and output.usage.completion_tokens == 15
    one = SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    assert pipeline.generate([PROMPTS[0]], one)[0].outputs[0].token_ids == ids[0]
    assert rejection is not match
