"""Law 5: at the same anchor the training path and the decode path give the same drafter logits.

Does not know trained weights; taps and tokens come from a tiny real target.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core import SamplingParams
from paceline.decode.loop import run
from paceline.drafters.dflash import DFlashConfig, DFlashModule, init_random
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.pipeline import Pipeline
from paceline.train.blocks import Blocks, block_states
from paceline.train.start import embedding_table
from tiny import tiny_target

B = 5
DFLARE = ("layerwise_fusion", "split_kv")
NORMED = (*DFLARE, "tap_norm")


def drafter_of(target, causal: bool, **changes) -> DFlashDrafter:
    config = DFlashConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        block_size=B,
        num_target_layers=3,
        mask_token_id=96,
        target_layer_ids=(0, 1),
        max_position_embeddings=128,
        causal=causal,
        **changes,
    )
    module = DFlashModule(config)
    init_random(module, torch.Generator().manual_seed(0), std=0.3)
    return DFlashDrafter(config, module.eval().requires_grad_(False), None, target)


def training_logits(
    drafter: DFlashDrafter, target, tokens: list[int], anchors: list[int]
) -> Tensor:
    """Logits [anchors, B - 1, V] of the training path, from the plain forward's hidden states."""
    states = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([states[1], states[2]], dim=-1)
    blocks = Blocks(
        anchors_RA=torch.tensor([anchors]),
        anchor_ids_RA=torch.tensor([[tokens[a] for a in anchors]]),
        labels_RAk=torch.zeros(1, len(anchors), B - 1, dtype=torch.int64),
        keep_RA=torch.ones(1, len(anchors), dtype=torch.bool),
    )
    table = embedding_table(target.model, torch.float32)
    hidden = block_states(drafter.module, blocks, features, table)
    return (hidden.view(len(anchors), B, -1)[:, 1:] @ target.head.weight.T).float()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("parts", [(), ("layerwise_fusion",), ("split_kv",), DFLARE, NORMED])
def test_drafts_of_a_session_are_what_training_saw(
    parts: tuple[str, ...], kind: str, causal: bool, monkeypatch
) -> None:
    target = tiny_target(kind)
    drafter = drafter_of(target, causal, **dict.fromkeys(parts, True))
    seen: dict[int, dict[int, Tensor]] = {0: {}, 1: {}}
    inner = drafter._block

    def watch(rows, cache):
        states, logits = inner(rows, cache)
        for row, part in zip(rows, logits, strict=True):
            seen[row.request][len(row.tokens) - 1] = part.clone()
        return states, logits

    monkeypatch.setattr(drafter, "_block", watch)
    pipeline = Pipeline(target=target, drafter=drafter)
    rows = pipeline.rows([[3, 4, 5], list(range(11))], SamplingParams(max_tokens=15))
    for _ in run(pipeline.session(2), rows):
        pass
    for row in rows:
        places = sorted(seen[row.request])
        assert len(places) > 5
        got = torch.stack([seen[row.request][place] for place in places])
        with torch.inference_mode():
            want = training_logits(drafter, target, row.tokens, places)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_anchor_matters_and_what_follows_it_does_not() -> None:
    """The comparison above has power: another anchor token gives other logits."""
    target = tiny_target()
    drafter = drafter_of(target, False)
    tokens = list(range(3, 15))
    with torch.inference_mode():
        right = training_logits(drafter, target, tokens, [6])
        moved = tokens[:6] + [50] + tokens[7:]  # another anchor token
        changed = training_logits(drafter, target, moved, [6])
        later = training_logits(drafter, target, tokens[:7] + [60] * 5, [6])
    assert not torch.allclose(right, changed, atol=1e-3)
    torch.testing.assert_close(right, later)
