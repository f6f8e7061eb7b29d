"""Training blocks: the mask cell by cell, what a block may see, and the fast attention's twin.

Does not know optimisers or files.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.drafters.dflash import DFlashConfig, DFlashModule, init_random
from paceline.train.attention import Flex, block_attention, mask_cell, mask_mod
from paceline.train.blocks import Blocks, block_states, draw, every, make_blocks
from paceline.train.corpus import Row

WIDTH, VOCABULARY = 16, 50


def text(length: int, start: int, seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (length,), generator=generator, dtype=torch.int32)
    return Row(tokens=tokens.numpy(), start=start, source="", temperature=0.0, held_out=False)


def drafter(causal: bool) -> tuple[DFlashModule, Tensor]:
    config = DFlashConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=VOCABULARY,
        block_size=4,
        num_target_layers=6,
        mask_token_id=5,
        target_layer_ids=(1, 2),
        max_position_embeddings=128,
        causal=causal,
    )
    module = DFlashModule(config)
    generator = torch.Generator().manual_seed(3)
    init_random(module, generator, std=0.3)
    return module, torch.randn(VOCABULARY, WIDTH, generator=generator)


def two_rows() -> tuple[Blocks, Tensor]:
    rows = [text(20, 6, 0), text(13, 4, 1)]
    blocks = make_blocks(rows, anchors=3, block_size=4, choose=draw(3, [(0, 0), (0, 1)]))
    generator = torch.Generator().manual_seed(7)
    return blocks, torch.randn(2, blocks.width, 2 * WIDTH, generator=generator)


def slow_attend(
    q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], anchors: Tensor, causal: bool
) -> Tensor:
    """Masked attention per row over [context; all blocks], the mask built cell by cell."""
    R, A = anchors.shape
    S, b = len(context[0]) // R, len(q) // (R * A)
    outs = []
    for r in range(R):
        mask = torch.tensor(
            [
                [mask_cell(anchors[r].tolist(), b, i, j, S, causal) for j in range(S + A * b)]
                for i in range(A * b)
            ]
        )
        own = slice(r * A * b, (r + 1) * A * b)
        keys = torch.cat((context[0][r * S : (r + 1) * S], k[own]))
        values = torch.cat((context[1][r * S : (r + 1) * S], v[own]))
        repeat = q.shape[1] // k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q[own].transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(repeat, 0),
            values.transpose(0, 1).repeat_interleave(repeat, 0),
            attn_mask=mask,
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("causal", [False, True])
def test_fast_attention_equals_its_slow_twin_with_gradients(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    R, S, A, b, h, G, e = 2, 7, 2, 3, 4, 2, 4
    anchors = torch.tensor([[2, 5], [1, 6]])

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    q, k, v = draw(R * A * b, h, e), draw(R * A * b, G, e), draw(R * A * b, G, e)
    ck, cv = draw(R * S, G, e), draw(R * S, G, e)

    def fast(q: Tensor, k: Tensor, v: Tensor, ck: Tensor, cv: Tensor) -> Tensor:
        return block_attention(anchors, S, b, causal)(q, k, v, ck, cv)

    slow = slow_attend(q, k, v, (ck, cv), anchors, causal)
    torch.testing.assert_close(fast(q, k, v, ck, cv), slow)
    assert torch.autograd.gradcheck(fast, (q, k, v, ck, cv), fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_has_the_mask_and_the_result_of_the_slow_twin(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    R, S, A, b, h, G, e = 2, 7, 2, 3, 4, 2, 16
    anchors = torch.tensor([[2, 5], [1, 6]])
    visible = mask_mod(anchors, S, b, causal)
    for r in range(R):
        for query in range(A * b):
            for key in range(S + A * b):
                at = [torch.tensor(i) for i in (r, 0, query, key)]
                cell = mask_cell(anchors[r].tolist(), b, query, key, S, causal)
                assert bool(visible(*at)) == cell, (r, query, key)
    q, k, v = (torch.randn(R * A * b, n, e, generator=generator) for n in (h, G, G))
    ck, cv = (torch.randn(R * S, G, e, generator=generator) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex attention says that it is slow uncompiled
        flex = Flex(anchors, (R, S, A, b), causal)(q, k, v, ck, cv)
    torch.testing.assert_close(flex, slow_attend(q, k, v, (ck, cv), anchors, causal))


def test_mask_oracle_follows_the_paper() -> None:
    anchors, b, S = [3, 5], 2, 8
    for query in range(4):
        block, offset = divmod(query, b)
        for key in range(S):
            assert mask_cell(anchors, b, query, key, S, False) == (key < anchors[block])
        seen = [mask_cell(anchors, b, query, S + other, S, False) for other in range(4)]
        assert seen == [other // b == block for other in range(4)]
        causal = [mask_cell(anchors, b, query, S + other, S, True) for other in range(4)]
        assert causal == [other // b == block and other % b <= offset for other in range(4)]


@pytest.mark.parametrize("causal", [False, True])
def test_block_states_do_not_change_with_what_lies_at_or_after_the_anchor(causal: bool) -> None:
    module, embedding = drafter(causal)
    blocks, clean = two_rows()
    before = block_states(module, blocks, clean, embedding).view(2, 3, 4, WIDTH)
    for r in range(2):
        for a in range(3):
            anchor = int(blocks.anchors_RA[r, a])
            features = clean.clone()
            features[r, anchor:] += 7.0
            after = block_states(module, blocks, features, embedding)
            torch.testing.assert_close(after.view(2, 3, 4, WIDTH)[r, a], before[r, a])
            features = clean.clone()
            features[r, anchor - 1] += 7.0  # the last visible one must matter
            after = block_states(module, blocks, features, embedding)
            assert not torch.allclose(after.view(2, 3, 4, WIDTH)[r, a], before[r, a], atol=1e-3)


def test_blocks_and_rows_do_not_see_each_other() -> None:
    module, embedding = drafter(False)
    blocks, features = two_rows()
    before = block_states(module, blocks, features, embedding).view(2, 3, 4, WIDTH)
    ids = blocks.anchor_ids_RA.clone()
    ids[0, 1] = (ids[0, 1] + 1) % VOCABULARY
    after = block_states(module, replace(blocks, anchor_ids_RA=ids), features, embedding)
    changed = (after.view(2, 3, 4, WIDTH) - before).abs().amax((2, 3)) > 1e-4
    assert changed.tolist() == [[False, True, False], [False, False, False]]


def test_anchors_are_supervised_and_labels_are_the_following_tokens() -> None:
    rows = [text(20, 6, 0), text(9, 6, 1)]
    blocks = make_blocks(rows, anchors=4, block_size=5, choose=draw(4, [(1, 0), (1, 1)]))
    assert blocks.keep_RA.tolist() == [[True] * 4, [True, True, False, False]]
    for r, item in enumerate(rows):
        for a in range(4):
            if not blocks.keep_RA[r, a]:
                assert (blocks.labels_RAk[r, a] == -100).all()
                continue
            anchor = int(blocks.anchors_RA[r, a])
            assert item.start <= anchor < len(item.tokens) - 1
            assert int(blocks.anchor_ids_RA[r, a]) == item.tokens[anchor]
            for k, label in enumerate(blocks.labels_RAk[r, a].tolist(), start=1):
                inside = anchor + k < len(item.tokens)
                assert label == (item.tokens[anchor + k] if inside else -100)


def test_a_rows_anchors_do_not_depend_on_the_other_rows() -> None:
    rows = [text(20, 6, 0), text(30, 4, 1), text(13, 4, 2)]
    seeds = [(5, 1, r) for r in range(3)]
    whole = make_blocks(rows, anchors=3, block_size=4, choose=draw(3, seeds))
    alone = make_blocks(rows[1:2], anchors=3, block_size=4, choose=draw(3, seeds[1:2]))
    assert torch.equal(whole.take([1]).anchors_RA, alone.anchors_RA)
    assert torch.equal(whole.take([1]).labels_RAk, alone.labels_RAk)
    other = make_blocks(rows[1:2], anchors=3, block_size=4, choose=draw(3, [(5, 2, 1)]))
    assert not torch.equal(other.anchors_RA, alone.anchors_RA)


@pytest.mark.parametrize(("length", "start"), [(7, 6), (6, 6), (1, 0)])
def test_a_row_without_any_anchor_fills_the_shape_only(length: int, start: int) -> None:
    for choose in (draw(4, [(0, 0)]), every):
        blocks = make_blocks([text(length, start, 0)], anchors=4, block_size=4, choose=choose)
        assert not blocks.keep_RA.any() and (blocks.labels_RAk == -100).all()
        module, embedding = drafter(False)
        features = torch.ones(1, blocks.width, 2 * WIDTH)
        assert block_states(module, blocks, features, embedding).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_recomputed_activations_give_the_same_gradients(causal: bool) -> None:
    module, embedding = drafter(causal)
    blocks, features = two_rows()
    grads = []
    for recompute in (False, True):
        states = block_states(module, blocks, features, embedding, recompute=recompute)
        grads.append(torch.autograd.grad(states.square().sum(), list(module.parameters())))
    for kept, again in zip(*grads, strict=True):
        assert torch.equal(kept, again)
