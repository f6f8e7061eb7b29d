"""Which rows each step takes: a function of the seed and the step.

Does not know what a step does with them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.train.features import FeatureRow

_WINDOW = 16  # steps whose rows are sorted by length together


class Order:
    """Batches of ``size`` rows: a fresh permutation every epoch, similar lengths together.

    With fewer rows than ``size`` every batch is all of them.
    """

    def __init__(self, rows: Sequence[FeatureRow], size: int, seed: int) -> None:
        self._rows, self._size, self._seed = rows, size, seed
        self._epoch, self._batches = -1, list[list[int]]()

    def batch(self, step: int) -> list[FeatureRow]:
        """The rows of a step."""
        epoch, at = divmod(step, max(1, len(self._rows) // self._size))
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return [self._rows[i] for i in self._batches[at]]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng, size = random.Random(self._seed * 1_000_003 + epoch), self._size
        order = list(range(len(self._rows)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for at in range(0, len(order), _WINDOW * size):  # sort inside small windows only
            window = order[at : at + _WINDOW * size]
            window.sort(key=lambda i: len(self._rows[i].row.tokens))
            batches += [window[i : i + size] for i in range(0, len(window), size)]
        batches = [batch for batch in batches if len(batch) == size] or [order]
        rng.shuffle(batches)
        return batches
