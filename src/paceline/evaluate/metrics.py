"""Acceptance figures from the rounds of finished replies, with one definition each.

Knows nothing about models; it counts. A reply's first round is its prefill and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core import Completion, Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Sums over verify rounds, after trimming at EOS, stop and limits."""

    verify_rounds: int
    drafted_tokens: int
    accepted_drafts: int
    committed_tokens: int

    @property
    def acceptance_length_pooled(self) -> float:
        """Committed tokens per verify round, the bonus token included; 0 without rounds."""
        return self.committed_tokens / self.verify_rounds if self.verify_rounds else 0.0


def acceptance(replies: Iterable[Completion]) -> Acceptance:
    """Pool the verify rounds of many replies."""
    rounds: list[Round] = [r for reply in replies for r in reply.rounds[1:]]
    return Acceptance(
        verify_rounds=len(rounds),
        drafted_tokens=sum(r.drafted for r in rounds),
        accepted_drafts=sum(r.accepted for r in rounds),
        committed_tokens=sum(r.committed for r in rounds),
    )
