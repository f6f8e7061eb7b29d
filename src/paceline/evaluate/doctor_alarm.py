"""An alarm for drafters that contribute nothing: acceptance of first drafts at the level of chance.

Does not know drafters; it counts rounds and speaks once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.core import Round

ENOUGH = 32  # rounds with drafts before anything is said
CHANCE = 0.11  # always drafting a common word is right nearly so often; a trained drafter six times
_Z = 1.96


def upper_bound(right: int, of: int) -> float:
    """Upper end of Wilson's 95 % interval of a share."""
    share, z2 = right / of, _Z * _Z
    middle = share + z2 / (2 * of)
    spread = _Z * (share * (1 - share) / of + z2 / (4 * of * of)) ** 0.5
    return float((middle + spread) / (1 + z2 / of))


def can_alarm(pipeline: Any) -> bool:
    """Whether the drafter reads the target's states; a lookup finds nothing where nothing repeats."""
    return pipeline.drafter is not None and bool(pipeline.drafter.taps)


class Alarm:
    """Feed it rounds; ``message`` is set once first drafts are known to be no better than chance."""

    def __init__(self) -> None:
        self.right, self.of = 0, 0
        self.message: str | None = None

    def add(self, rounds: Iterable[Round]) -> str | None:
        """The message when these rounds are the ones that show it; None before and after."""
        for one in rounds:
            if one.drafted:
                self.of += 1
                self.right += one.accepted > 0
        if self.message is not None or self.of < ENOUGH:
            return None
        if upper_bound(self.right, self.of) <= CHANCE:
            self.message = (
                f"the drafter contributes nothing: {self.right} of {self.of} first drafts were accepted, "
                "which is chance; `paceline doctor TARGET DRAFTER` looks for the reason"
            )
            return self.message
        return None
