"""Classic speculative decoding: a smaller causal LM with the same tokenizer drafts a chain.

Knows nothing about accept rules; it uses a second target with a cache of its own.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.attention import RaggedCache
from paceline.core import Draft, DraftContext, Row
from paceline.decode.accept import draw
from paceline.decode.warp import shape_probs


@dataclass
class ModelState:
    """One session: the draft model's own cache, and what was warned about."""

    cache: RaggedCache
    warned: set[str] = field(default_factory=set)


class ModelDrafter:
    """Drafts ``num_drafts`` tokens one after another with a smaller model.

    Raises:
        ValueError: the two models do not share a vocabulary.
    """

    name = "model"
    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Any, target: Any, *, num_drafts: int = 4, samples: bool = False
    ) -> None:
        if num_drafts < 1:
            raise ValueError("num_drafts must be at least 1")
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has {model.vocab_size} tokens, the target {target.vocab_size}; "
                "a draft model needs the target's tokenizer"
            )
        if model.tokenizer is not None and target.tokenizer is not None:
            if model.tokenizer.get_vocab() != target.tokenizer.get_vocab():
                raise ValueError("draft model and target have different tokenizers")
        self.model, self.num_drafts, self.samples = model, num_drafts, samples

    def new_state(self, slots: int) -> ModelState:
        """Empty caches for rows in slots 0 .. slots-1."""
        return ModelState(cache=self.model.new_cache(slots))

    def release(self, state: ModelState, slot: int) -> None:
        """Forget the row in this slot."""
        state.cache.lengths[slot] = 0

    def propose(self, ctx: DraftContext) -> Draft:
        """Catch up with the committed tokens, then draft a chain for every row that may use one."""
        cache: RaggedCache = ctx.state.cache
        B, N = len(ctx.rows), self.num_drafts
        tokens_BN = torch.zeros(B, N, dtype=torch.int64)
        live = [b for b, row in enumerate(ctx.rows) if row.budget > 0 and self._fits(row)]
        shadows = [dataclasses.replace(ctx.rows[b], tokens=list(ctx.rows[b].tokens)) for b in live]
        broken: set[int] = set()
        probs_BNV = torch.zeros(B, N, self.model.vocab_size) if self.samples else None
        for step in range(N if live else 0):
            scored = self.model.score(Draft.empty(len(live)), shadows, cache)
            finite = scored.logits_TV.amax(-1).isfinite().tolist()
            for i, b in enumerate(live):
                row = shadows[i]
                cache.lengths[row.slot] = len(row.tokens)
                if not finite[i]:
                    broken.add(b)
                    self._warn_once(ctx.state)
                if b in broken:
                    row.tokens.append(0)
                    continue
                law = probs_BNV[b, step] if probs_BNV is not None else None
                token = _choose(scored.logits_TV[i].float(), row, law)
                tokens_BN[b, step] = token
                row.tokens.append(token)
        for b in live:
            cache.lengths[ctx.rows[b].slot] = len(ctx.rows[b].tokens)
        sizes = [N if b in live and b not in broken else 0 for b in range(B)]
        return Draft.chain(tokens_BN, sizes, probs_BNV)

    def _warn_once(self, state: ModelState) -> None:
        if "nan" not in state.warned:
            state.warned.add("nan")
            message = "the draft model's output is NaN or infinite; this row is not drafted"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _fits(self, row: Row) -> bool:
        return bool(len(row.tokens) + self.num_drafts < self.model.max_length)


def _choose(logits_V: Tensor, row: Row, law_V: Tensor | None) -> int:
    if law_V is None or row.params.temperature == 0:
        token = int(logits_V.argmax())
        if law_V is not None:
            law_V[token] = 1.0
        return token
    probs = shape_probs(logits_V[None], row.params)
    law_V.copy_(probs[0])
    return draw(probs, row, len(row.tokens))[0]
