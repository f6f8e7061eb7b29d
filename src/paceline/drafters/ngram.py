"""Prompt lookup: proposes what followed the same n-gram earlier in the row. No weights.

Knows nothing about the target.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.core import Draft, DraftContext


class NgramDrafter:
    """Copies up to ``num_drafts`` tokens behind the earliest earlier match of the last n-gram.

    Longer n-grams first, ``max_ngram`` down to ``min_ngram``, as transformers' prompt lookup does.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    samples = False

    def __init__(self, num_drafts: int = 10, max_ngram: int = 2, min_ngram: int = 1) -> None:
        if num_drafts < 1 or not 1 <= min_ngram <= max_ngram:
            raise ValueError("ngram needs num_drafts >= 1 and 1 <= min_ngram <= max_ngram")
        self.num_drafts, self.max_ngram, self.min_ngram = num_drafts, max_ngram, min_ngram

    def new_state(self, slots: int) -> None:
        """Nothing to remember between rounds."""

    def release(self, state: None, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, ctx: DraftContext) -> Draft:
        """A chain per row; empty where nothing matched."""
        tokens = torch.zeros(len(ctx.rows), self.num_drafts, dtype=torch.int64)
        sizes = []
        for b, row in enumerate(ctx.rows):
            row.features.clear()
            found = self._lookup(np.asarray(row.tokens))
            tokens[b, : len(found)] = torch.tensor(found, dtype=torch.int64)
            sizes.append(len(found))
        return Draft.chain(tokens, sizes)

    def _lookup(self, tokens: npt.NDArray[np.int64]) -> list[int]:
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens, n)[:-1]
            hits = np.flatnonzero((windows == tokens[-n:]).all(-1))
            if len(hits):
                follow = int(hits[0]) + n
                found: list[int] = tokens[follow : follow + self.num_drafts].tolist()
                return found
        return []
