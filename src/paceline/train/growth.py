"""What a longer block brings a drafter and what it costs: survival of drafts before and after.

Does not know optimisers or decoding. n is the number of accepted drafts of a whole round, at most B - 1
for a block of B (one is the anchor); rounds that the reply's end cuts are left out.

Source: DBloom, arXiv 2608.30427 (ceiling bin, new slots G, front erosion L).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.train.config import TrainConfig
from paceline.train.features import FeatureRow
from paceline.train.served import runs_of, spread
from paceline.train.trainee import Trainee

Histogram = Counter[int]  # accepted drafts -> whole rounds


def rounds_of(runs: Sequence[int], block: int) -> Histogram:
    """Accepted drafts of each whole round of one reply, from the leading right drafts at its tokens."""
    found, at = Histogram(), 0
    while at + block - 1 < len(runs):
        found[runs[at]] += 1
        at += runs[at] + 1
    return found


def survival(histogram: Histogram, block: int) -> list[float]:
    """P(n >= k) for k = 1 .. block - 1."""
    total = max(1, histogram.total())
    return [sum(c for n, c in histogram.items() if n >= k) / total for k in range(1, block)]


def growth(
    before: Histogram, after: Histogram, after_at_old: Histogram, old: int, new: int
) -> dict[str, Any]:
    """A drafter at its old block, the widened one at the new, and at the old: what was won and lost.

    ``gain`` (committed tokens a round) is G - L: what slots behind the old block add, less what the
    slots before them lost (``erosion_by_slot``).
    """
    short, wide = survival(before, old), survival(after, new)
    lost = [x - y for x, y in zip(short, wide, strict=False)]
    return {
        "rounds": before.total(),
        "tau_short": 1 + sum(short),
        "tau_wide": 1 + sum(wide),
        "tau_wide_at_short": 1 + sum(survival(after_at_old, old)),
        "ceiling_before": short[-1],
        "ceiling_after": wide[-1],
        "gain": sum(wide) - sum(short),
        "new_slots_G": sum(wide[old - 1 :]),
        "front_erosion_L": sum(lost),
        "erosion_by_slot": lost,
    }


def sentence(found: dict[str, Any], old: int, new: int) -> str:
    """The figures of `growth` in a line."""
    slots = " ".join(f"{one:+.3f}" for one in found["erosion_by_slot"])
    return (
        f"block {old} -> {new}: acceptance length {found['tau_short']:.3f} -> {found['tau_wide']:.3f} "
        f"(at the old block {found['tau_wide_at_short']:.3f}), G {found['new_slots_G']:.3f}, "
        f"L {found['front_erosion_L']:.3f} (by slot {slots}), ceiling "
        f"{found['ceiling_before']:.1%} -> {found['ceiling_after']:.1%}; {found['rounds']} rounds"
    )


def counted(trainee: Trainee, rows: Iterable[FeatureRow], block: int) -> Histogram:
    """Whole rounds of all rows; all processes must call this together, and each gets the sum."""
    mine = Histogram()
    for _, runs in runs_of(trainee, list(rows), block):
        mine += rounds_of(runs, block)
    sums = trainee.ranks.sum(*(mine[n] for n in range(block)))
    return Histogram({n: int(total) for n, total in enumerate(sums) if total})


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Watches a run that widens blocks: where its drafter stood at the old block, and how it stands."""

    trainee: Trainee
    rows: Sequence[FeatureRow]
    old: int
    new: int
    before: Histogram

    @staticmethod
    def of(
        config: TrainConfig, trainee: Trainee, held: Sequence[FeatureRow], resumed: bool
    ) -> Growth | None:
        """None for a run without a widened phase, or without greedy rows held out.

        What the drafter could before the first step is kept in ``growth.json`` of the run folder.
        """
        old = next((p.widened_from for p in config.phases if p.widened_from is not None), None)
        rows = spread([item for item in held if item.row.greedy], config.eval_rows)
        file = Path(config.run_dir) / "growth.json"
        if old is None or not rows or (resumed and not file.exists()):
            return None
        if resumed:
            before = Histogram(dict(enumerate(json.loads(file.read_text()))))
        else:
            before = counted(trainee, rows, old)
            if trainee.ranks.first:
                work = file.with_name(f".{file.name}.{os.getpid()}")
                work.write_text(json.dumps([before[n] for n in range(old)]))
                work.replace(file)
        return Growth(trainee=trainee, rows=rows, old=old, new=config.block_size, before=before)

    def measure(self) -> dict[str, Any]:
        """`growth` with the drafter as it stands."""
        wide, again = (counted(self.trainee, self.rows, block) for block in (self.new, self.old))
        return growth(self.before, wide, again, self.old, self.new)

    def sentence(self, found: dict[str, Any]) -> str:
        """Its figures in a line."""
        return sentence(found, self.old, self.new)
