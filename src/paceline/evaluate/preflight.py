"""What to do next with a drafter, from the rounds of the user's own traffic: histogram, ceiling, verdict.

Does not know models, clocks or files: it gets counts and measured costs, and every function is pure.

Source: DBloom, arXiv 2608.30427 (histogram of accepted drafts, ceiling bin, stranded speed-up). n is
the number of accepted drafts of a round, at most B - 1 for a block of B (the anchor counts); S_k is
P(n >= k), a_k is S_k / S_(k-1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core import Completion
from paceline.evaluate.metrics import loops, ratio

SCHEMA = ("paceline-preflight", 1)  # name and version of the JSON
FEW_ROUNDS = 100  # below this a domain gets no verdict
CEILING = 0.10  # share of rounds that keep the whole block, from which a longer one is considered
DEAD_ZONE = 0.03  # a change of the round that promises less than this is none: clocks are noisy
WEAK_FRONT = 0.10  # how far the first slot may fall behind the three after it
BLIND = 0.5  # accepted drafts a round, against those of all other domains together
TAIL = 4  # slots whose conditional acceptance is taken to go on in a longer block


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Counts of one kind of request. ``kept_n[n]``: rounds of whole drafts that accepted n of them."""

    name: str
    requests: int
    looping: int
    unfinished: int  # ended by the token limit: their rounds are left out if others are enough
    kept_n: tuple[int, ...]
    of_unfinished: bool = False  # whether rounds of unfinished replies had to be counted

    @property
    def rounds(self) -> int:
        """Rounds in the histogram."""
        return sum(self.kept_n)

    @property
    def accepted(self) -> float | None:
        """Accepted drafts per round."""
        return ratio(sum(n * count for n, count in enumerate(self.kept_n)), self.rounds)

    @property
    def survival(self) -> list[float]:
        """S_1 .. S_(B-1)."""
        total = max(1, self.rounds)
        return [sum(self.kept_n[k:]) / total for k in range(1, len(self.kept_n))]

    @property
    def conditional(self) -> list[float | None]:
        """a_1 .. a_(B-1); None where no round got so far."""
        chain = [1.0, *self.survival]
        return [ratio(b, a) for a, b in zip(chain, chain[1:], strict=False)]

    @property
    def ceiling(self) -> float:
        """Share of rounds that accepted the whole block: what they would have had beyond is not known."""
        return self.survival[-1]

    def stranded(self, more: int) -> float:
        """Estimated drafts a round that ``more`` slots would add if the tail's acceptance went on.

        ceiling * a * (1 - a^more) / (1 - a), with a the mean of the last `TAIL` conditional acceptances.
        """
        known = [a for a in self.conditional[-TAIL:] if a is not None]
        tail = sum(known) / len(known) if known else 0.0
        return self.ceiling * sum(tail**k for k in range(1, more + 1))


def domain_of(name: str, replies: Iterable[Completion], block_size: int) -> Domain:
    """Count the rounds of replies: prefill, last rounds (cut by the end) and short drafts left out.

    Replies that hit the token limit count only where the others have fewer than `FEW_ROUNDS` rounds.
    """
    every = list(replies)
    unfinished = [reply for reply in every if reply.finish_reason == "length"]
    finished = [reply for reply in every if reply.finish_reason != "length"]
    kept = _histogram(finished, block_size)
    fill = sum(kept) < FEW_ROUNDS and bool(unfinished)
    return Domain(
        name=name,
        requests=len(every),
        looping=sum(loops(reply.token_ids) for reply in every),
        unfinished=len(unfinished),
        kept_n=tuple(_histogram(every, block_size) if fill else kept),
        of_unfinished=fill,
    )


def _histogram(replies: Sequence[Completion], block_size: int) -> list[int]:
    counts = [0] * block_size
    for reply in replies:
        for one in reply.rounds[1:-1]:
            if one.drafted == block_size - 1:
                counts[one.accepted] += 1
    return counts


def together(domains: Sequence[Domain], name: str = "all") -> Domain:
    """Several domains as one."""
    columns = zip(*(one.kept_n for one in domains), strict=True)
    return Domain(
        name=name,
        requests=sum(one.requests for one in domains),
        looping=sum(one.looping for one in domains),
        unfinished=sum(one.unfinished for one in domains),
        kept_n=tuple(map(sum, columns)),
        of_unfinished=any(one.of_unfinished for one in domains),
    )


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Measured seconds: a plain round, drafting a block, and rounds that verify so many drafts.

    ``verify`` are (drafts, seconds) beyond the plain round's 0 drafts, rising; between and beyond them
    costs go on in a line.
    """

    plain: float
    draft: float
    verify: tuple[tuple[int, float], ...]

    def round(self, drafts: int) -> float:
        """Seconds of a round with so many drafts; a plain one without any."""
        if drafts == 0:
            return self.plain
        points = [(0, self.plain), *self.verify]
        at = next((i for i in range(1, len(points)) if points[i][0] >= drafts), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return self.draft + y0 + (y1 - y0) * (drafts - x0) / (x1 - x0)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do for one domain: a stable ``code``, a sentence, and the numbers it rests on."""

    code: str
    sentence: str
    numbers: dict[str, Any]


def speed(domain: Domain, costs: RoundCosts, drafts: int, more: float = 0.0) -> float:
    """Expected speed over plain decoding with so many drafts a round; ``more`` accepted ones beyond."""
    tokens = 1 + sum(domain.survival[:drafts]) + more
    return tokens * costs.plain / costs.round(drafts)


def verdict(
    domain: Domain, others: Domain | None, costs: RoundCosts | None, longer: int
) -> Verdict:
    """The first that applies: too few rounds, train this domain, stop, longer blocks, early slots, a
    shorter block, nothing.

    ``longer`` is the block size to consider. Without costs nothing is said about stopping or shortening
    where that depends on them.
    """
    B = len(domain.kept_n)
    numbers: dict[str, Any] = {
        "rounds": domain.rounds,
        "accepted_drafts_per_round": domain.accepted,
        "ceiling": domain.ceiling,
        "stranded_drafts": domain.stranded(longer - B),
    }
    if domain.rounds < FEW_ROUNDS:
        return Verdict(
            code="too-few-rounds",
            sentence=f"{domain.rounds} rounds are too few to say (from {FEW_ROUNDS}): give more prompts.",
            numbers=numbers,
        )
    stop = ""
    best = full = None
    if costs is not None:
        speeds = [speed(domain, costs, n) for n in range(1, B)]
        best, full = max(range(1, B), key=lambda n: (speeds[n - 1], -n)), speeds[-1]
        numbers |= {"speed": full, "best_drafts": best, "best_speed": speeds[best - 1]}
        numbers["longer_speed"] = speed(domain, costs, B - 1, numbers["stranded_drafts"]) * (
            costs.round(B - 1) / costs.round(longer - 1)
        )
        if numbers["best_speed"] <= 1:
            stop = "here drafting does not pay at any block length on this machine"
    elif domain.survival[0] < WEAK_FRONT:
        stop = "hardly any first draft is accepted"
    return _judged(domain, others, numbers, stop, longer)


def _judged(
    domain: Domain, others: Domain | None, numbers: dict[str, Any], stop: str, longer: int
) -> Verdict:
    B, mine = len(domain.kept_n), domain.accepted or 0.0
    theirs = None if others is None or others.rounds < FEW_ROUNDS else others.accepted
    if theirs and mine < BLIND * theirs:
        numbers["accepted_drafts_elsewhere"] = theirs
        until = f" Until then do not speculate: {stop}." * bool(stop)
        return Verdict(
            code="train-this-domain",
            sentence=f"Train this domain: {mine:.2f} drafts are accepted a round, {theirs:.2f} "
            f"elsewhere; add its prompts, answered by the target, to the training text.{until}",
            numbers=numbers,
        )
    if stop:
        return Verdict(
            code="stop-speculating", sentence=f"Stop speculating here: {stop}.", numbers=numbers
        )
    pays = numbers.get("longer_speed", 1.0) > (1 + DEAD_ZONE) * numbers.get("speed", 0.0)
    if domain.ceiling >= CEILING and pays:
        return Verdict(
            code="train-longer-blocks",
            sentence=f"Train longer blocks: {domain.ceiling:.0%} of the rounds accept the whole block of "
            f"{B}; a block of {longer} should add about {numbers['stranded_drafts']:.2f} drafts a round.",
            numbers=numbers,
        )
    front, *after = (a for a in domain.conditional[:4] if a is not None)
    if after and front + WEAK_FRONT < sum(after) / len(after):
        return Verdict(
            code="train-early-slots",
            sentence=f"Train early slots: the first draft is accepted {front:.0%} of the time, those "
            f"behind it {sum(after) / len(after):.0%}; use a smaller gamma or shorter blocks first.",
            numbers=numbers,
        )
    if "best_speed" in numbers and numbers["best_speed"] > (1 + DEAD_ZONE) * numbers["speed"]:
        return Verdict(
            code="reduce-the-block",
            sentence=f"Reduce the block: {numbers['best_drafts']} drafts a round promise "
            f"{numbers['best_speed']:.2f}x plain decoding, all {B - 1} {numbers['speed']:.2f}x.",
            numbers=numbers,
        )
    return Verdict(code="nothing-to-change", sentence="Nothing to change here.", numbers=numbers)


def judge_all(
    domains: Sequence[Domain], costs: RoundCosts | None, longer: int
) -> list[tuple[Domain, Verdict]]:
    """Every domain with its verdict, each against all the others together, and last all of them."""
    found = []
    for i, one in enumerate(domains):
        rest = [*domains[:i], *domains[i + 1 :]]
        others = together(rest, "others") if rest else None
        found.append((one, verdict(one, others, costs, longer)))
    if len(domains) > 1:
        whole = together(domains)
        found.append((whole, verdict(whole, None, costs, longer)))
    return found


def describe(domain: Domain, found: Verdict) -> dict[str, Any]:
    """One domain as it stands in the JSON."""
    return {
        "domain": domain.name,
        "requests": domain.requests,
        "looping_share": ratio(domain.looping, domain.requests),
        "unfinished_share": ratio(domain.unfinished, domain.requests),
        "counts_unfinished_replies": domain.of_unfinished,
        "histogram": list(domain.kept_n),
        "survival": domain.survival,
        "conditional": domain.conditional,
        "verdict": found.code,
        "sentence": found.sentence,
        **found.numbers,
    }


def document(
    domains: Sequence[Domain], costs: RoundCosts | None, longer: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The JSON of a preflight: every domain judged, and all of them."""
    return {
        "schema": dict(zip(("name", "version"), SCHEMA, strict=True)),
        "arguments": arguments,
        "block_size": len(domains[0].kept_n),
        "longer_block": longer,
        "costs": None if costs is None else asdict(costs),
        "domains": [describe(*judged) for judged in judge_all(domains, costs, longer)],
    }
