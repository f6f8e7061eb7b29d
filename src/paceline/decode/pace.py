"""When drafting does not pay at all: a drafter that pauses, by what costs and calibration promise.

Does not know how either was measured, nor how much of a draft is verified (length.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core import Draft, DraftContext, Drafter, Row

LOOK_SHARE = 0.02  # of the time that passes without drafting, what a look at drafts may cost
LONGEST_PAUSE = 256  # rounds: about a reply


class Outlook(Protocol):
    """What is known before anything is drafted. Times are in plain rounds of the same rows."""

    def lost(self, rows: Sequence[Row]) -> float:
        """What a drafted round is expected to cost more than it saves; negative where it pays."""

    def catching_up(self, rows: Sequence[Row]) -> float:
        """What the drafter needs to take in everything that waits in ``row.features``."""


@dataclass
class Pace:
    """Whether to draft: what is expected, corrected by a running mean of how far that was off."""

    off: float = 0.0  # plain rounds that drafted rounds lost beyond what was expected
    waited: int = 0  # rounds since the last one that was drafted
    expected: float = 0.0  # of the round that is drafted now

    def seen(self, lost: float) -> None:
        """A round was drafted and lost so much."""
        self.off = 0.7 * self.off + 0.3 * (lost - self.expected)

    def paused(self, lost: float, catching_up: float) -> bool:
        """Whether this round passes without drafting; ``lost`` and ``catching_up`` as in `Outlook`.

        Where drafting does not pay, the next look waits until it costs `LOOK_SHARE` of the wait.
        """
        now = lost + self.off
        if now > 0 and self.waited < min((now + catching_up) / LOOK_SHARE, LONGEST_PAUSE):
            self.waited += 1
            return True
        self.waited, self.expected = 0, lost
        return False


@dataclass(kw_only=True)
class SparingState:
    """The inner drafter's state, and the pace of one session."""

    inner: Any
    pace: Pace = field(default_factory=Pace)


class Sparing:
    """A drafter that pauses while drafts do not pay, from the first round on.

    What the drafter needs to see waits in ``row.features`` meanwhile.
    """

    def __init__(self, inner: Drafter, outlook: Outlook) -> None:
        self.inner, self.outlook = inner, outlook
        self.name, self.taps, self.samples = inner.name, inner.taps, inner.samples

    def new_state(self, slots: int) -> SparingState:
        """The inner drafter's, with a pace."""
        return SparingState(inner=self.inner.new_state(slots))

    def release(self, state: SparingState, slot: int) -> None:
        """Forget the row in this slot."""
        self.inner.release(state.inner, slot)

    def propose(self, ctx: DraftContext) -> Draft:
        """The inner drafter's draft, or none."""
        state: SparingState = ctx.state
        rows = ctx.rows
        if state.pace.paused(self.outlook.lost(rows), self.outlook.catching_up(rows)):
            return Draft.empty(len(rows))
        return self.inner.propose(DraftContext(rows=rows, state=state.inner))
