"""Attention of training blocks to their contexts and to themselves, by the rule of `mask_cell`.

Does not know projections, features or losses. Letters: R rows, S padded context, A anchors per row,
b block size, h heads, G key/value heads, e head width. Queries are packed [R * A * b, h, e]; keys
and values of the context are [R * S, G, e].

Source: DFlash, arXiv 2602.06036, section 4.2. A block's token sees the context strictly before its
anchor and its own block; blocks do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]  # R, S, A, b
BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`attend(q, own k, own v, context k, context v)` -> [R * A * b, h, e]."""


def mask_cell(anchors: Sequence[int], b: int, query: int, key: int, S: int, causal: bool) -> bool:
    """The visibility rule, one cell at a time: query (block token) against key (context or block).

    The slow twin of everything else here, for the tests.
    """
    block, offset = divmod(query, b)
    if key < S:
        return key < anchors[block]
    other, other_offset = divmod(key - S, b)
    return other == block and (not causal or other_offset <= offset)


def block_attention(anchors_RA: Tensor, S: int, b: int, causal: bool) -> BlockAttention:
    """The attention of one batch: products on a CPU, flex attention on an accelerator.

    Built once per batch; all layers use it.
    """
    shape = (len(anchors_RA), S, anchors_RA.shape[1], b)
    if anchors_RA.device.type == "cpu":
        return _Products(anchors_RA, shape, causal)
    return Flex(anchors_RA, shape, causal)


def context_bias(anchors_RA: Tensor, S: int, dtype: torch.dtype) -> Tensor:
    """[R, A, S]: 0 where context t < anchor is visible, minus infinity elsewhere."""
    hidden = torch.arange(S, device=anchors_RA.device) >= anchors_RA[..., None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=anchors_RA.device)
    return bias.masked_fill_(hidden, float("-inf"))


class _Products:
    """Two products per row (context, own block) and one softmax over both: no masked product is
    computed, and SDPA's backward on a CPU with a dense mask is about three times slower."""

    def __init__(self, anchors_RA: Tensor, shape: Shape, causal: bool) -> None:
        self.anchors_RA, self.shape, self.causal = anchors_RA, shape, causal
        self.bias_RAS: Tensor | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor
    ) -> Tensor:
        R, S, A, b = self.shape
        G, e = k.shape[1:]
        r = q.shape[1] // G
        if self.bias_RAS is None:
            self.bias_RAS = context_bias(self.anchors_RA, S, q.dtype)
        far_k = context_k.view(R, S, G, e).transpose(1, 2).reshape(R * G, S, e)
        far_v = context_v.view(R, S, G, e).transpose(1, 2).reshape(R * G, S, e)
        q = q.view(R, A, b, G, r, e).permute(0, 3, 1, 4, 2, 5) * e**-0.5  # R G A r b e
        own_k = k.view(R, A, b, G, e).permute(0, 3, 1, 2, 4).reshape(R * G * A, b, e)
        own_v = v.view(R, A, b, G, e).permute(0, 3, 1, 2, 4).reshape(R * G * A, b, e)
        far = torch.bmm(q.reshape(R * G, A * r * b, e), far_k.transpose(1, 2))
        far = far.view(R, G, A, r * b, S) + self.bias_RAS[:, None, :, None]
        near = torch.bmm(q.reshape(R * G * A, r * b, e), own_k.transpose(1, 2))
        if self.causal:
            later = torch.ones(b, b, dtype=torch.bool, device=q.device).triu(1).repeat(r, 1)
            near = near.masked_fill(later, float("-inf"))
        scores = torch.cat((far, near.view(R, G, A, r * b, b)), dim=-1)
        weights = scores.softmax(-1)
        out = torch.bmm(weights[..., :S].reshape(R * G, A * r * b, S), far_v)
        mine = torch.bmm(weights[..., S:].reshape(R * G * A, r * b, b), own_v)
        out = out.view(R, G, A, r, b, e) + mine.view(R, G, A, r, b, e)
        return out.permute(0, 2, 4, 1, 3, 5).reshape(R * A * b, G * r, e)


class Flex:
    """Flex attention over [context; all blocks of the row], masked block-sparse; for accelerators.

    Compiled there. On a CPU it runs uncompiled and without a gradient, which is enough to compare.
    """

    def __init__(self, anchors_RA: Tensor, shape: Shape, causal: bool) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        R, S, A, b = self.shape = shape
        device = anchors_RA.device
        self._run = _flex(device.type != "cpu")
        visible = mask_mod(anchors_RA, S, b, causal)
        self.mask = create_block_mask(visible, R, None, A * b, S + A * b, device=device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor
    ) -> Tensor:
        R, S, A, b = self.shape
        G, e = k.shape[1:]

        def join(context: Tensor, own: Tensor) -> Tensor:
            parts = (context.view(R, S, G, e), own.view(R, A * b, G, e))
            return torch.cat(parts, dim=1).transpose(1, 2)

        out = self._run(
            q.view(R, A * b, -1, e).transpose(1, 2),
            join(context_k, k),
            join(context_v, v),
            block_mask=self.mask,
            enable_gqa=q.shape[1] != G,
        )
        return out.transpose(1, 2).reshape(R * A * b, -1, e)


def mask_mod(anchors_RA: Tensor, S: int, b: int, causal: bool) -> Callable[..., Tensor]:
    """`mask_cell` for tensors of indices, as flex attention asks for it."""

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        other = key - S
        context = (other < 0) & (key < anchors_RA[row, query // b])
        own = (other >= 0) & (other // b == query // b)
        if causal:
            own = own & (other % b <= query % b)
        return context | own

    return visible


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
