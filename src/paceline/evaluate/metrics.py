"""Acceptance figures from the rounds of finished replies, with one definition each.

Knows nothing about models or clocks; it counts. A reply's first round is its prefill and is left
out. Every ratio is a quotient of two sums that add up over requests, so no figure depends on how
requests were split into batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core import Completion

LOOP_WINDOW, LOOP_GRAM, LOOP_TIMES = 64, 8, 4


def ratio(total: float, count: float) -> float | None:
    """Quotient of a (sum, count) pair; None, never 0, where nothing was counted."""
    return total / count if count else None


def quotient(a: float | None, b: float | None) -> float | None:
    """a / b for speeds; None where there is nothing to divide or to divide by."""
    return a / b if a and b else None


def percent(share: float | None, unknown: str = "-") -> str:
    """A share as text, whole percents; 100% is said of all and nothing less."""
    if share is None:
        return unknown
    return "99%" if 0.99 < share < 1 else f"{share:.0%}"


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the last 64 tokens hold an 8-gram 4 or more times (overlaps count)."""
    tail = list(token_ids[-LOOP_WINDOW:])
    grams = Counter(tuple(tail[i : i + LOOP_GRAM]) for i in range(len(tail) - LOOP_GRAM + 1))
    return max(grams.values(), default=0) >= LOOP_TIMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Sums over verify rounds, after trimming at EOS, stop and limits. Two of them add up."""

    requests: int  # replies, those without a verify round included
    verify_rounds: int
    drafted_tokens: int  # draft nodes the target scored, those after a rejection included
    accepted_drafts: int  # leading accepted drafts that were committed
    committed_tokens: int  # accepted drafts and bonus tokens
    request_lengths: float  # sum over replies of committed tokens per round ...
    requests_with_rounds: int  # ... and how many replies that sum has
    committed_rounds: Counter[int]  # committed tokens -> rounds that committed so many
    draft_rounds: Counter[tuple[int, int]]  # (drafted, accepted) -> rounds with these counts

    def __add__(self, other: Acceptance) -> Acceptance:
        """The figures of both sets of replies together."""
        names = Acceptance.__dataclass_fields__
        return Acceptance(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def verified_tokens(self) -> int:
        """Nodes the target scored: every round's root and its drafts."""
        return self.drafted_tokens + self.verify_rounds

    @property
    def acceptance_length_pooled(self) -> float | None:
        """Committed tokens per verify round, the bonus token included; None without rounds."""
        return ratio(self.committed_tokens, self.verify_rounds)

    @property
    def acceptance_length_request_mean(self) -> float | None:
        """Mean over replies of each reply's own committed tokens per verify round."""
        return ratio(self.request_lengths, self.requests_with_rounds)

    @property
    def acceptance_length_full_bonus(self) -> float | None:
        """1 + accepted drafts per round, as engines print it: a reply that ends inside the
        accepted drafts has no bonus token, and yet one is counted. None without rounds."""
        return ratio(self.accepted_drafts + self.verify_rounds, self.verify_rounds)

    @property
    def accepted_drafts_per_round(self) -> float | None:
        """Acceptance length of the drafts only, the bonus token left out."""
        return ratio(self.accepted_drafts, self.verify_rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted; drafts after a rejection count as drafted."""
        return ratio(self.accepted_drafts, self.drafted_tokens)

    @property
    def waste(self) -> float | None:
        """Share of the drafted tokens that were not committed."""
        return ratio(self.drafted_tokens - self.accepted_drafts, self.drafted_tokens)

    @property
    def drafted_per_committed(self) -> float | None:
        """Draft tokens spent per committed token."""
        return ratio(self.drafted_tokens, self.committed_tokens)

    @property
    def verified_per_committed(self) -> float | None:
        """Nodes scored per committed token: what predicts the slow-down at large batches."""
        return ratio(self.verified_tokens, self.committed_tokens)

    @property
    def slot_acceptance(self) -> list[dict[str, Any]]:
        """Per draft position k = 1, 2, ... up to the longest draft.

        ``drafted``: rounds that drafted at least k tokens; ``reached``: those of them that accepted
        at least k - 1; ``accepted``: rounds that accepted at least k. ``unconditional`` is accepted
        over all rounds, ``conditional`` accepted over reached: a round whose draft was too short
        says nothing about position k. For chains; in a tree a node's number is not its position.
        """
        slots = []
        for position in range(1, max((d for d, _ in self.draft_rounds), default=0) + 1):
            long = [(a, n) for (d, a), n in self.draft_rounds.items() if d >= position]
            accepted = sum(n for a, n in long if a >= position)
            reached = sum(n for a, n in long if a >= position - 1)
            slots.append(
                {
                    "position": position,
                    "drafted": sum(n for _, n in long),
                    "reached": reached,
                    "accepted": accepted,
                    "unconditional": ratio(accepted, self.verify_rounds),
                    "conditional": ratio(accepted, reached),
                }
            )
        return slots

    def figures(self) -> dict[str, Any]:
        """Sums and ratios by name, as they go into JSON."""
        names = (
            "requests",
            "verify_rounds",
            "drafted_tokens",
            "verified_tokens",
            "accepted_drafts",
            "committed_tokens",
            "acceptance_length_pooled",
            "acceptance_length_request_mean",
            "acceptance_length_full_bonus",
            "accepted_drafts_per_round",
            "acceptance_rate",
            "waste",
            "drafted_per_committed",
            "verified_per_committed",
            "slot_acceptance",
        )
        histogram = {str(k): n for k, n in sorted(self.committed_rounds.items())}
        return {name: getattr(self, name) for name in names} | {"histogram": histogram}


def acceptance(replies: Iterable[Completion]) -> Acceptance:
    """Pool the verify rounds of many replies."""
    requests = with_rounds = 0
    lengths = 0.0
    committed: Counter[int] = Counter()
    drafts: Counter[tuple[int, int]] = Counter()
    for reply in replies:
        rounds = reply.rounds[1:]
        requests += 1
        with_rounds += bool(rounds)
        lengths += ratio(sum(r.committed for r in rounds), len(rounds)) or 0.0
        committed.update(r.committed for r in rounds)
        drafts.update((r.drafted, r.accepted) for r in rounds)
    return Acceptance(
        requests=requests,
        verify_rounds=committed.total(),
        drafted_tokens=sum(d * n for (d, _), n in drafts.items()),
        accepted_drafts=sum(a * n for (_, a), n in drafts.items()),
        committed_tokens=sum(length * n for length, n in committed.items()),
        request_lengths=lengths,
        requests_with_rounds=with_rounds,
        committed_rounds=committed,
        draft_rounds=drafts,
    )


def without_loops(replies: Iterable[Completion]) -> list[Completion]:
    """The replies that do not end in a loop: repeated text inflates acceptance."""
    return [reply for reply in replies if not loops(reply.token_ids)]
