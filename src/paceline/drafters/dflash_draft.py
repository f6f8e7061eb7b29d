"""Drafts with a DFlash module: one bidirectional pass per round over all live rows' blocks.

Knows nothing about accept rules or how its weights were trained.

Source: DFlash, arXiv 2602.06036, section 4.1; sliding layers as SpecForge trains them and vLLM runs
them: a block token at position p sees the positions above p - sliding_window, and its own block only
up to itself. Letters: B rows, b block size, N = b - 1 drafts, C new context tokens, V' draft
vocabulary.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.attention import Packed, RaggedCache, packed_attention
from paceline.core import Draft, DraftContext, Row
from paceline.decode.accept import draw
from paceline.decode.warp import shape_probs, top
from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    draft_to_target,
    load_dflash,
    stored_weights,
    vocabulary_fingerprint,
)
from paceline.prepack import PackedLinear, can_prepack, prepack


@dataclass
class DFlashState:
    """One session: the context's keys and values per draft layer, and what was warned about."""

    cache: RaggedCache
    warned: set[str] = field(default_factory=set)


class DFlashDrafter:
    """A block-diffusion drafter bound to the target whose embedding and head it borrows.

    With ``samples`` it draws its tokens at temperature > 0 and hands over their law (for the
    ``rejection`` rule); otherwise it proposes its most probable tokens.

    Raises:
        ValueError: the drafter was made for another target (width, vocabulary or depth) or tokenizer.
    """

    name = "dflash"

    def __init__(
        self,
        config: DFlashConfig,
        module: DFlashModule,
        d2t: Tensor | None,
        target: Any,
        *,
        samples: bool = False,
    ) -> None:
        _check_fit(config, target)
        self.config, self.module, self.target, self.samples = config, module, target, samples
        module.fold()
        self.taps = tuple(config.target_layer_ids)
        self.vocabulary = None if d2t is None else draft_to_target(d2t).to(target.device)
        weight = target.head.weight.detach()
        rows = weight if self.vocabulary is None else weight[self.vocabulary].contiguous()
        packs = can_prepack(target.dtype, target.device)
        self._head: Any = PackedLinear(rows) if packs else (lambda flat: F.linear(flat, rows))

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        target: Any,
        *,
        samples: bool = False,
        block_size: int | None = None,
    ) -> DFlashDrafter:
        """Load a DFlash or DFlare folder for this target, in the target's dtype and device.

        ``block_size`` drafts another block than the folder says: fewer or more masks, nothing else, for
        the block has no weights of its own. (An xPress head has: it is refused for a longer one.)
        """
        config, module, d2t = load_dflash(folder, target.dtype)
        if block_size is not None and block_size > config.max_position_embeddings:
            raise ValueError(
                f"a block of {block_size} does not fit into the drafter's "
                f"{config.max_position_embeddings} positions"
            )
        if block_size is not None:
            config = replace(config, block_size=block_size)
        _check_fit(config, target)
        _check_stored(folder, d2t, target)
        if can_prepack(target.dtype, target.device):
            prepack(module)
        return cls(config, module.to(target.device), d2t, target, samples=samples)

    def new_state(self, slots: int) -> DFlashState:
        """Empty context caches for rows in slots 0 .. slots-1."""
        return DFlashState(cache=RaggedCache(slots))

    def release(self, state: DFlashState, slot: int) -> None:
        """Forget the row in this slot."""
        state.cache.lengths[slot] = 0

    def propose(self, ctx: DraftContext) -> Draft:
        """Inject the rows' new features, then draft N tokens for every row that has a context."""
        state: DFlashState = ctx.state
        self._inject(ctx.rows, state.cache)
        ready = [b for b, row in enumerate(ctx.rows) if self._can_draft(row, state)]
        N, B = self.config.block_size - 1, len(ctx.rows)
        tokens_BN = torch.zeros(B, N, dtype=torch.int64)
        sizes = [0] * B
        if not ready:
            return Draft.chain(tokens_BN, sizes)
        rows = [ctx.rows[b] for b in ready]
        states, logits = self._block(rows, state.cache)
        levels, likeliest = top(logits)
        broken = (~levels.isfinite()).any(-1).tolist()
        ids = self.to_target(likeliest).cpu()
        probs_BNV = torch.zeros(B, N, self.config.vocab_size) if self.samples else None
        for i, b in enumerate(ready):
            if broken[i]:
                self._warn_once(
                    state, "nan", "the drafter's output is NaN or infinite; this row is not drafted"
                )
                continue
            sizes[b] = N
            tokens_BN[b] = ids[i]
            if probs_BNV is not None:
                tokens_BN[b] = self._sample(logits[i], ids[i], rows[i], probs_BNV[b])
        hints = {"ready": ready, "states_RbD": states, "logits_RNV": logits}
        return Draft.chain(tokens_BN, sizes, probs_BNV, **hints)

    def _sample(self, logits: Tensor, best: Tensor, row: Row, law_NV: Tensor) -> Tensor:
        """Draw the row's tokens and write their law; a greedy row's law is one-hot."""
        if row.params.temperature == 0:
            law_NV.scatter_(1, best[:, None], 1.0)
            return best
        probs = shape_probs(logits, row.params).cpu()
        self.spread(probs, law_NV)
        return self.to_target(torch.tensor(draw(probs, row, len(row.tokens)))).cpu()

    def spread(self, probs_NV: Tensor, law_NV: Tensor) -> None:
        """Write laws over the draft vocabulary into zeros over the target's."""
        if self.vocabulary is None:
            law_NV.copy_(probs_NV)
        else:
            law_NV[:, self.vocabulary.cpu()] = probs_NV.cpu()

    def _inject(self, rows: list[Row], cache: RaggedCache) -> None:
        """Write the new features' keys and values behind each row's context."""
        limit = self.config.max_position_embeddings
        for row in rows:  # past its positions a row is decoded without drafts
            if len(row.tokens) > limit:
                row.features.clear()
        fresh = [row for row in rows if row.features]
        if not fresh:
            return
        parts = [torch.cat(row.features) for row in fresh]
        starts = [cache.lengths[row.slot] for row in fresh]
        counts = [len(part) for part in parts]
        batch = _layout(fresh, starts, counts, parts[0].device)
        context = self.module.context(torch.cat(parts).to(self.target.dtype))
        for i in range(self.config.num_hidden_layers):
            keys, values = self.module.context_kv(i, context, batch.positions_T)
            cache.write(i, keys.transpose(0, 1), values.transpose(0, 1), batch)
        for row, start, count in zip(fresh, starts, counts, strict=True):
            cache.lengths[row.slot] = start + count
            row.features.clear()

    def _can_draft(self, row: Row, state: DFlashState) -> bool:
        limit = self.config.max_position_embeddings
        if len(row.tokens) - 1 + self.config.block_size > limit:
            self._warn_once(
                state, "long", f"a row passed the drafter's {limit} positions; not drafted"
            )
            return False
        context = state.cache.lengths[row.slot]
        if context == 0 or row.budget == 0:
            return False
        assert context == len(row.tokens) - 1, "context must end right before the anchor"
        return True

    def _block(self, rows: list[Row], cache: RaggedCache) -> tuple[Tensor, Tensor]:
        """One masked block behind each row's anchor: final states [rows, b, D], logits [rows, N, V']."""
        config, b = self.config, self.config.block_size
        device = self.target.device
        ids = torch.full((len(rows), b), config.mask_token_id, device=device)
        ids[:, 0] = torch.tensor([row.tokens[-1] for row in rows], device=device)
        starts = [cache.lengths[row.slot] for row in rows]
        layouts = {
            causal: _layout(rows, starts, [b] * len(rows), device, bidirectional=not causal)
            for causal in map(config.is_causal, range(config.num_hidden_layers))
        }
        positions = next(iter(layouts.values())).positions_T
        scale = config.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch = layouts[config.is_causal(layer)]
            cache.write(layer, k.transpose(0, 1), v.transpose(0, 1), batch)
            sliding = config.layer_types[layer] == "sliding_attention"
            window = config.sliding_window if sliding else None
            query = q.transpose(0, 1)
            return packed_attention(query, cache, layer, batch, scale=scale, window=window)

        hidden = self.target.embed(ids.flatten())
        for i in range(config.num_hidden_layers):
            hidden = self.module.layer(i, hidden, positions, attend)
        states = self.module.final(hidden).view(len(rows), b, -1)
        # reshape, never a strided slice: with frozen weights a slice takes a 20 times slower path.
        flat = states[:, 1:].reshape(-1, states.shape[-1])
        return states, self._head(flat).float().view(len(rows), b - 1, -1)

    def to_target(self, ids: Tensor) -> Tensor:
        """Target ids of draft vocabulary ids."""
        return ids if self.vocabulary is None else self.vocabulary[ids.to(self.vocabulary.device)]

    def _warn_once(self, state: DFlashState, key: str, message: str) -> None:
        if key not in state.warned:
            state.warned.add(key)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _layout(
    rows: list[Row],
    starts: list[int],
    counts: list[int],
    device: torch.device,
    bidirectional: bool = False,
) -> Packed:
    places = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    positions = torch.cat(places).to(device)
    return Packed(
        ids_T=positions,
        positions_T=positions,
        slots=[row.slot for row in rows],
        starts=starts,
        counts=counts,
        ancestors=[None] * len(rows),
        bidirectional=bidirectional,
    )


def _check_fit(config: DFlashConfig, target: Any) -> None:
    """Refuse a drafter of another target, naming what differs."""
    for what, mine, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise ValueError(
                f"this drafter was made for another target: its {what} is {mine}, the target's "
                f"is {theirs}"
            )
    wanted, tokenizer = config.vocabulary_fingerprint, target.tokenizer
    if wanted is not None and tokenizer is not None:
        if (found := vocabulary_fingerprint(tokenizer)) != wanted:
            raise ValueError(
                f"this drafter was made for another tokenizer: its vocabulary_fingerprint is {wanted}, "
                f"the target's is {found}"
            )


def _check_stored(folder: str | os.PathLike[str], d2t: Tensor | None, target: Any) -> None:
    """Warn when a stored head or embedding is not the target's, whose own are used."""
    for name, stored in stored_weights(folder).items():
        mine = (target.head if name == "lm_head.weight" else target.embedding).weight.detach()
        if d2t is not None and name == "lm_head.weight":
            mine = mine[draft_to_target(d2t).to(mine.device)]
        if not torch.allclose(stored.to(mine), mine, rtol=0.01, atol=1e-4):
            warnings.warn(f"{folder}: {name} is not the target's and unused", stacklevel=3)
