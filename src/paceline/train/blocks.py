"""Draws anchors, makes masked blocks of them and runs a drafter's layers over the blocks.

Does not know losses, optimisers or files. Letters: R rows, S padded context, A anchors per row,
b block size, F tapped width, D hidden width.

Source: DFlash, arXiv 2602.06036, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.drafters.dflash import DFlashModule
from paceline.train.attention import block_attention
from paceline.train.corpus import Row

_WIDTH_STEP = 64  # contexts are padded to a multiple: CPU kernels are built per shape
Choose = Callable[[int, int], "np.typing.NDArray[np.int64]"]
"""`choose(r, count)`: ascending indices of the anchors to take among row r's `count` places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """R rows with A blocks each. ``keep_RA`` is False for a block that only fills the shape."""

    anchors_RA: Tensor  # int64, position of the anchor token
    anchor_ids_RA: Tensor  # int64
    labels_RAk: Tensor  # int64 [R, A, b - 1]; -100 where nothing is supervised
    keep_RA: Tensor  # bool

    @property
    def block_size(self) -> int:
        """Tokens per block, anchor included."""
        return self.labels_RAk.shape[-1] + 1

    @property
    def width(self) -> int:
        """S: no anchor sees a context token at or behind it."""
        return max(1, -(-int(self.anchors_RA.max()) // _WIDTH_STEP)) * _WIDTH_STEP

    @property
    def sources_RAk(self) -> Tensor:
        """int64 [R, A, k]: the token from whose state the target predicts each label."""
        return self.anchors_RA[..., None] + torch.arange(self.block_size - 1)

    def take(self, rows: Sequence[int]) -> Blocks:
        """Some of the rows."""
        at = list(rows)
        return Blocks(
            anchors_RA=self.anchors_RA[at],
            anchor_ids_RA=self.anchor_ids_RA[at],
            labels_RAk=self.labels_RAk[at],
            keep_RA=self.keep_RA[at],
        )


def draw(anchors: int, seeds: Sequence[Sequence[int]]) -> Choose:
    """Up to ``anchors`` anchors a row, without replacement; each row has a generator of its own,
    so that what a row gets does not depend on who else is in the batch."""

    def choose(r: int, count: int) -> np.typing.NDArray[np.int64]:
        rng = np.random.default_rng(list(seeds[r]))
        return np.sort(rng.choice(count, min(anchors, count), replace=False))

    return choose


def every(_r: int, count: int) -> np.typing.NDArray[np.int64]:
    """All anchors of a row."""
    return np.arange(count)


def make_blocks(
    rows: Sequence[Row],
    *,
    anchors: int,
    block_size: int,
    choose: Choose,
    limit: int | None = None,
) -> Blocks:
    """Blocks at chosen reply tokens that have a next token; filled up to ``anchors`` a row.

    Anchors may lie near the end; labels beyond it are -100. No block reaches position ``limit``,
    the first one that the drafter does not have. A row without any place gives blocks that are not
    kept.
    """
    A, k = anchors, block_size - 1
    chosen, ids = np.zeros((len(rows), A), np.int64), np.zeros((len(rows), A), np.int64)
    keep = np.zeros((len(rows), A), bool)
    labels = np.full((len(rows), A, k), -100, np.int64)
    for r, row in enumerate(rows):
        last = len(row.tokens) - 1 if limit is None else min(len(row.tokens), limit - k) - 1
        places = np.arange(row.start, max(row.start, last))
        drawn = places[choose(r, len(places))]
        chosen[r, : len(drawn)], keep[r, : len(drawn)] = drawn, True
        chosen[r, len(drawn) :] = drawn[-1] if len(drawn) else 0
        ids[r] = row.tokens[chosen[r]]
        for a, place in enumerate(drawn):
            following = row.tokens[place + 1 : place + 1 + k]
            labels[r, a, : len(following)] = following
    return Blocks(
        anchors_RA=torch.from_numpy(chosen),
        anchor_ids_RA=torch.from_numpy(ids),
        labels_RAk=torch.from_numpy(labels),
        keep_RA=torch.from_numpy(keep),
    )


def block_states(
    module: DFlashModule,
    blocks: Blocks,
    features_RSF: Tensor,
    embedding_VD: Tensor,
    *,
    recompute: bool = False,
) -> Tensor:
    """Final states [R * A * b, D] of all block tokens; offset 0 of each block is its anchor.

    Runs the very methods that decoding runs; only attention differs. ``recompute`` keeps nothing
    inside a layer for the backward pass, which runs the layer's forward again.
    """
    if "sliding_attention" in module.config.layer_types:
        raise ValueError("training sliding-attention drafters is not supported")
    R, S, _ = features_RSF.shape
    A, b, device = blocks.anchors_RA.shape[1], blocks.block_size, features_RSF.device
    anchors = blocks.anchors_RA.to(device)
    context = module.context(features_RSF.reshape(R * S, -1))
    # Padding may lie behind the drafter's last position; nothing sees it.
    last = module.config.max_position_embeddings - 1
    places = torch.arange(S, device=device).clamp_max(last).repeat(R)
    ids = torch.full((R, A, b), module.config.mask_token_id)
    ids[..., 0] = blocks.anchor_ids_RA
    positions = (anchors[..., None] + torch.arange(b, device=device)).clamp_max(last).flatten()
    hidden = embedding_VD[ids.flatten().to(device)]
    attention = block_attention(anchors, S, b, module.config.causal)

    def layer(i: int, hidden: Tensor, context: Tensor) -> Tensor:
        keys, values = module.context_kv(i, context, places)
        attend = lambda _i, q, k, v: attention(q, k, v, keys, values)  # noqa: E731
        return module.layer(i, hidden, positions, attend)

    for i in range(module.config.num_hidden_layers):
        if recompute:
            hidden = checkpoint(layer, i, hidden, context, use_reentrant=False)
        else:
            hidden = layer(i, hidden, context)
    return module.final(hidden)
