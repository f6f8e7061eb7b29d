"""Draws anchors and builds masked blocks, and attends from blocks to contexts as decoding will.

Does not know losses, optimisers or files. Letters: R rows, S padded context, A anchors per row,
b block size, h heads, G key/value heads, e head width, F tapped width.

Source: DFlash, arXiv 2602.06036, section 4.2. A block's token sees the context strictly before its
anchor and its own block; blocks do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.dflash import Attend, DFlashModule
from paceline.train.features import FeatureRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """R rows with A blocks each. ``keep_RA`` is False for a block that only fills the shape."""

    features_RSF: Tensor  # bf16 or the module's dtype
    anchors_RA: Tensor  # int64, position of the anchor token
    anchor_ids_RA: Tensor  # int64
    labels_RAk: Tensor  # int64 [R, A, b - 1]; -100 where nothing is supervised
    keep_RA: Tensor  # bool

    @property
    def block_size(self) -> int:
        """Tokens per block, anchor included."""
        return self.labels_RAk.shape[-1] + 1


def make_blocks(
    rows: Sequence[FeatureRow], *, anchors: int, block_size: int, rng: np.random.Generator
) -> Blocks:
    """Draw up to ``anchors`` anchors per row among reply tokens whose next token exists.

    Contexts are cut behind the last anchor and padded to a multiple of 64: kernels are built per
    shape. Anchors may lie near the end; labels beyond it are -100.
    """
    A, k = anchors, block_size - 1
    chosen, ids = np.zeros((len(rows), A), np.int64), np.zeros((len(rows), A), np.int64)
    keep = np.zeros((len(rows), A), bool)
    labels = np.full((len(rows), A, k), -100, np.int64)
    for r, item in enumerate(rows):
        tokens, start = item.row.tokens, item.row.start
        places = np.arange(start, len(tokens) - 1)
        drawn = np.sort(rng.choice(places, min(A, len(places)), replace=False))
        chosen[r, : len(drawn)], keep[r, : len(drawn)] = drawn, True
        chosen[r, len(drawn) :] = drawn[-1] if len(drawn) else 1
        ids[r] = tokens[chosen[r]]
        for a, place in enumerate(drawn):
            following = tokens[place + 1 : place + 1 + k]
            labels[r, a, : len(following)] = following
    width = max(64, -(-int(chosen.max()) // 64) * 64)
    features = torch.zeros(len(rows), width, rows[0].features.shape[1], dtype=torch.bfloat16)
    for r, item in enumerate(rows):
        part = item.tensor(min(width, len(item.row.tokens)))
        features[r, : len(part)] = part
    return Blocks(
        features_RSF=features,
        anchors_RA=torch.from_numpy(chosen),
        anchor_ids_RA=torch.from_numpy(ids),
        labels_RAk=torch.from_numpy(labels),
        keep_RA=torch.from_numpy(keep),
    )


def block_states(module: DFlashModule, blocks: Blocks, embedding_VD: Tensor) -> Tensor:
    """Final states [R * A * b, D] of all block tokens; offset 0 of each block is its anchor.

    Runs the very methods that decoding runs; only ``attend`` differs.
    """
    if "sliding_attention" in module.config.layer_types:
        raise ValueError("training sliding-attention drafters is not supported")
    R, S, _ = blocks.features_RSF.shape
    A, b = blocks.anchors_RA.shape[1], blocks.block_size
    context = module.context(blocks.features_RSF.reshape(R * S, -1))
    places = torch.arange(S).repeat(R)
    ids = torch.full((R, A, b), module.config.mask_token_id)
    ids[..., 0] = blocks.anchor_ids_RA
    positions = (blocks.anchors_RA[..., None] + torch.arange(b)).flatten()
    hidden = embedding_VD[ids.flatten()]
    bias = context_bias(blocks.anchors_RA, S, hidden.dtype)
    for i in range(module.config.num_hidden_layers):
        keys, values = module.context_kv(i, context, places)
        attend = _block_attention(keys, values, bias, (R, S, A, b), module.config.causal)
        hidden = module.layer(i, hidden, positions, attend)
    return module.final(hidden)


def context_bias(anchors_RA: Tensor, S: int, dtype: torch.dtype) -> Tensor:
    """[R, A, S]: 0 where context t < anchor is visible, minus infinity elsewhere."""
    hidden = torch.arange(S) >= anchors_RA[..., None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _block_attention(
    keys: Tensor, values: Tensor, bias_RAS: Tensor, shape: tuple[int, int, int, int], causal: bool
) -> Attend:
    """Fast path: two products per row group (context, own block) and one softmax over both."""
    R, S, A, b = shape
    G, e = keys.shape[1:]
    context_k = keys.view(R, S, G, e).transpose(1, 2).reshape(R * G, S, e)
    context_v = values.view(R, S, G, e).transpose(1, 2).reshape(R * G, S, e)

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        r = q.shape[1] // G
        q = q.view(R, A, b, G, r, e).permute(0, 3, 1, 4, 2, 5) * e**-0.5  # R G A r b e
        own_k = k.view(R, A, b, G, e).permute(0, 3, 1, 2, 4).reshape(R * G * A, b, e)
        own_v = v.view(R, A, b, G, e).permute(0, 3, 1, 2, 4).reshape(R * G * A, b, e)
        far = torch.bmm(q.reshape(R * G, A * r * b, e), context_k.transpose(1, 2))
        far = far.view(R, G, A, r * b, S) + bias_RAS[:, None, :, None]
        near = torch.bmm(q.reshape(R * G * A, r * b, e), own_k.transpose(1, 2))
        if causal:
            later = torch.ones(b, b, dtype=torch.bool).triu(1).repeat(r, 1)
            near = near.masked_fill(later, float("-inf"))
        scores = torch.cat((far, near.view(R, G, A, r * b, b)), dim=-1)
        weights = scores.softmax(-1)
        out = torch.bmm(weights[..., :S].reshape(R * G, A * r * b, S), context_v)
        mine = torch.bmm(weights[..., S:].reshape(R * G * A, r * b, b), own_v)
        out = out.view(R, G, A, r, b, e) + mine.view(R, G, A, r, b, e)
        return out.permute(0, 2, 4, 1, 3, 5).reshape(R * A * b, G * r, e)

    return attend


def mask_cell(anchors: Sequence[int], b: int, query: int, key: int, S: int, causal: bool) -> bool:
    """The visibility rule, one cell at a time: query (block token) against key (context or block).

    The slow twin of ``context_bias`` and ``_block_attention`` for the tests.
    """
    block, offset = divmod(query, b)
    if key < S:
        return key < anchors[block]
    other, other_offset = divmod(key - S, b)
    return other == block and (not causal or other_offset <= offset)
