"""Every drafter on a real architecture: ids equal the golden loop's, caches equal a fresh prefill.

Does not know trained weights.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.core import Noise, Row, SamplingParams
from paceline.decode.accept import match, rejection
from paceline.decode.loop import Session, run
from paceline.decode.reference import golden
from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    init_random,
    offsets_of,
    vocabulary_fingerprint,
)
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.pipeline import Pipeline
from tiny import plain_row, tiny_target

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
    if name == "dflare":
        whole = {"layerwise_fusion": True, "split_kv": True, "tap_norm": True}
        return dflash(target, samples=samples, **whole)
    if name == "ngram":
        return NgramDrafter(num_drafts=4)
    if name == "model-self":
        return ModelDrafter(target, target, num_drafts=3, samples=samples)
    return ModelDrafter(tiny_target("llama", seed=5), target, num_drafts=3, samples=samples)


NAMES = ["dflash", "dflash-reduced", "dflare", "ngram", "model", "model-self"]


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


@pytest.mark.parametrize("name", ["dflash", "dflash-reduced", "dflare", "model"])
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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("samples", [False, True])
def test_nan_draft_model_drafts_nothing_and_says_so(samples: bool, temperature: float) -> None:
    target = tiny_target()
    model = tiny_target(seed=5)
    model.model.model.norm.weight.data.fill_(float("nan"))
    drafter = ModelDrafter(model, target, num_drafts=3, samples=samples)
    accept = "rejection" if samples else "match"
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1)
    with pytest.warns(RuntimeWarning, match="NaN") as caught:
        pipeline = Pipeline(target=target, drafter=drafter, accept=accept)
        got = pipeline.generate(PROMPTS[:2], params)[0].outputs[0]
    assert len(caught) == 1 and not any(r.drafted for r in got.rounds)
    if not samples:
        assert got.token_ids == golden(target.next_logits, PROMPTS[0], params).token_ids


def test_nan_drafter_drafts_nothing_and_says_so() -> None:
    target = tiny_target()
    drafter = dflash(target)
    drafter.module.norm.weight.data.fill_(float("nan"))
    params = SamplingParams(max_tokens=6)
    with pytest.warns(RuntimeWarning, match="NaN"):
        got = Pipeline(target=target, drafter=drafter).generate([PROMPTS[0]], params)
    assert got[0].outputs[0].token_ids == golden(target.next_logits, PROMPTS[0], params).token_ids


def test_sliding_layers_see_their_window_and_the_block_up_to_themselves() -> None:
    target = tiny_target()
    kinds = ("sliding_attention", "full_attention")
    drafter = dflash(target, layer_types=kinds, sliding_window=6)
    config, module = drafter.config, drafter.module
    features = torch.randn(9, config.feature_size, generator=torch.Generator().manual_seed(1))
    row = plain_row(0, range(10))
    row.features.append(features)
    state = drafter.new_state(1)
    drafter._inject([row], state.cache)
    _, got = drafter._block([row], state.cache)

    C, b = len(features), config.block_size
    keys, queries = torch.arange(C + b), torch.arange(C, C + b)[:, None]
    context = module.context(features)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        old_k, old_v = module.context_kv(layer, context, keys[:C])
        k, v = (
            torch.cat(x).repeat_interleave(2, 1).transpose(0, 1) for x in ((old_k, k), (old_v, v))
        )
        seen = torch.ones(b, C + b, dtype=torch.bool)
        if kinds[layer] == "sliding_attention":
            seen = (keys <= queries) & (keys > queries - 6)
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * config.head_dim**-0.5
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)

    hidden = target.embed(torch.tensor([9] + [config.mask_token_id] * (b - 1)))
    for layer in range(2):
        hidden = module.layer(layer, hidden, queries[:, 0], attend)
    want = module.final(hidden)[1:] @ target.head.weight.T
    torch.testing.assert_close(got[0], want, atol=1e-4, rtol=1e-4)


def test_drafter_of_another_tokenizer_is_refused() -> None:
    target = tiny_target()
    target.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    dflash(target)
    dflash(target, vocabulary_fingerprint=vocabulary_fingerprint(target.tokenizer))
    with pytest.raises(ValueError, match="vocabulary_fingerprint"):
        dflash(target, vocabulary_fingerprint="0123456789abcdef")


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
