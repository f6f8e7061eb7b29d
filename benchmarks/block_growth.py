"""What a longer block brings and costs: a drafter before and after block expansion, on one text.

Does not time anything and does not decode: drafters are walked along the target's own greedy replies
at the short and at the long block, which is what greedy decoding accepts there (near ties of bf16
aside). n is the number of accepted drafts of a round; rounds that the reply's end cuts are left out.
Printed for each source of the text: acceptance length, ceiling bin h(B - 1), the gain G of the new slots
and the front erosion L of the old ones, slot by slot, with what preflight would have promised from the
short drafter's histogram alone; then the rank correlation of ceiling and gain over all pairs.

    OMP_NUM_THREADS=1 python benchmarks/block_growth.py --data held-out.jsonl --out runs/growth \
        --pair 4-8=SHORT_FOLDER,WIDE_FOLDER --json growth.json

A folder may say another block than its own: ``--pair cut=FOLDER+block:4,FOLDER`` is a drafter that was
trained at the long block and cut short, so what it gains is what a perfect expansion would bring.

Source: DBloom, arXiv 2608.30427 (histogram, G - L).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from walked import Walker

from paceline.drafters.dflash import read_config
from paceline.evaluate.preflight import Domain
from paceline.train.growth import Histogram, growth, rounds_of, sentence, survival

Seen = dict[tuple[str, int], dict[str, Histogram]]


def histograms(walker: Walker, folder: str, block: int, seen: Seen) -> dict[str, Histogram]:
    """By source, of one drafter at one block; its own draft vocabulary and refiner are kept."""
    if (folder, block) not in seen:
        found: dict[str, Histogram] = {}
        for item, runs in walker.runs(folder, block):
            found.setdefault(item.row.source, Histogram()).update(rounds_of(runs, block))
        found["all"] = sum(found.values(), Histogram())
        seen[folder, block] = found
    return seen[folder, block]


def split(method: str) -> tuple[str, int]:
    """Folder and block of ``FOLDER`` or ``FOLDER+block:N``."""
    folder, _, block = method.partition("+block:")
    return folder, int(block) if block else read_config(folder).block_size


def compared(parts: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """The figures of one source; ``naive`` is the short drafter at the long block, as it is."""
    found = growth(parts["short"], parts["wide"], parts["wide_at_short"], old, new)
    counts = tuple(parts["short"][n] for n in range(old))
    domain = Domain(name="", requests=0, looping=0, unfinished=0, kept_n=counts)
    found["promised"] = domain.stranded(new - old)
    if parts["naive"] is None:
        return found
    short, blunt = survival(parts["short"], old), survival(parts["naive"], new)
    found["tau_naive"] = 1 + sum(blunt)
    found["naive_erosion_L"] = sum(x - y for x, y in zip(short, blunt, strict=False))
    return found


def pair(walker: Walker, methods: list[tuple[str, int]], seen: Seen) -> dict[str, Any]:
    """By source, and all of them: the short drafter and the one that was made of it.

    A refiner's mixer is tied to its block, so a drafter with one has no figures of a longer one.
    """
    (short, b), (wide, B) = methods
    theirs = read_config(short)
    every = {"short": (short, b), "wide": (wide, B), "wide_at_short": (wide, b)}
    every["naive"] = (short, B)
    tied = "xpress" in theirs.refiners and theirs.block_size < B
    parts: dict[str, Any] = {
        what: None if tied and what == "naive" else histograms(walker, *of, seen)
        for what, of in every.items()
    }
    return {
        source: compared(
            {
                what: None if part is None else part.get(source, Histogram())
                for what, part in parts.items()
            },
            b,
            B,
        )
        for source in parts["short"]
    }


def ranks(values: list[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def rank_correlation(points: list[tuple[float, float]]) -> float | None:
    """Spearman's; None for fewer than three points or where one side is constant."""
    if len(points) < 3:
        return None
    try:
        return statistics.correlation(*(ranks(list(side)) for side in zip(*points, strict=True)))
    except statistics.StatisticsError:
        return None


def main() -> None:
    """Parse the options, walk the pairs, print a line for each source."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", action="append", required=True, help="greedy replies, not trained on"
    )
    parser.add_argument("--pair", action="append", required=True, help="NAME=SHORT,WIDE (folders)")
    parser.add_argument("--out", type=Path, required=True, help="for features")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    walker = Walker(options.data, options.out)
    found: dict[str, Any] = {}
    seen: Seen = {}
    points: list[tuple[float, float]] = []
    for text in options.pair:
        name, folders = text.split("=", 1)
        methods = [split(method) for method in folders.split(",")]
        found[name] = pair(walker, methods, seen)
        points += [
            (one["ceiling_before"], one["gain"]) for s, one in found[name].items() if s != "all"
        ]
        (_, b), (_, B) = methods
        for source, one in found[name].items():
            naive = f"naive {one['tau_naive']:.2f}, " if "tau_naive" in one else ""
            promised = f"; gain {one['gain']:+.2f}, promised {one['promised']:.2f}"
            print(f"{name} {source}: {naive}{sentence(one, b, B)}{promised}", flush=True)
    found["spearman"] = rank_correlation(points)
    print(f"Spearman of ceiling and gain over {len(points)} pairs: {found['spearman']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
