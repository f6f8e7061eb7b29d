"""What a longer block brings and costs: a drafter before and after block expansion, on one text.

Does not time anything and does not decode: drafters are walked along the target's own greedy replies
at the short and at the long block, which is what greedy decoding accepts there (near ties of bf16
aside). n is the number of accepted drafts of a round; rounds that the reply's end cuts are left out.
Printed for each source of the text: acceptance length, ceiling bin h(B - 1), the gain G of the new slots
and the front erosion L of the old ones; then the rank correlation of ceiling and gain over all pairs.

    OMP_NUM_THREADS=1 python benchmarks/block_growth.py --data held-out.jsonl --out runs/growth \
        --pair 4-8=SHORT_FOLDER,WIDE_FOLDER --json growth.json

Source: DBloom, arXiv 2608.30427 (histogram, G - L).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.dflash import read_config
from paceline.recipes.smollm2 import smollm2_bloom
from paceline.train.capture import load_frozen, load_tokenizer
from paceline.train.config import LengthHead
from paceline.train.fit import feature_rows, read_rows
from paceline.train.logs import RunLog
from paceline.train.served import runs_of
from paceline.train.trainee import make_trainee

Histogram = Counter[int]  # accepted drafts -> whole rounds


def rounds_of(runs: list[int], block: int) -> Histogram:
    """Accepted drafts of each round of one reply, those left out that the reply's end cuts."""
    found, at = Histogram(), 0
    while at + block - 1 < len(runs):
        found[runs[at]] += 1
        at += runs[at] + 1
    return found


def histograms(options: argparse.Namespace, shared: Any, folder: str, block: int) -> Any:
    """By source, of one drafter at one block; its own draft vocabulary is kept."""
    target, rows, tokenizer = shared
    theirs = read_config(folder)
    config = smollm2_bloom(
        tuple(options.data), init_from=folder, block_size=max(block, theirs.block_size + 1)
    ).replace(length_head=LengthHead(alone=True))
    trainee = make_trainee(config, target, rows, torch.bfloat16, tokenizer=tokenizer)
    found: dict[str, Histogram] = {}
    for item, runs in runs_of(trainee, rows, block):
        found.setdefault(item.row.source, Histogram()).update(rounds_of(runs, block))
    return found


def survival(histogram: Histogram, block: int) -> list[float]:
    """P(n >= k) for k = 1 .. block - 1."""
    total = max(1, histogram.total())
    return [sum(c for n, c in histogram.items() if n >= k) / total for k in range(1, block)]


def compared(short: Any, naive: Any, wide_short: Any, wide: Any, b: int, B: int) -> dict[str, Any]:
    """The figures of one source."""
    old, trained, blunt = survival(short, b), survival(wide, B), survival(naive, B)
    again = survival(wide_short, b)
    return {
        "rounds": short.total(),
        "tau_short": 1 + sum(old),
        "tau_naive": 1 + sum(blunt),
        "tau_wide": 1 + sum(trained),
        "tau_wide_at_short": 1 + sum(again),
        "ceiling_before": old[-1],
        "ceiling_after": trained[-1],
        "new_slots_G": sum(trained[b - 1 :]),
        "front_erosion_L": sum(x - y for x, y in zip(old, trained, strict=False)),
        "erosion_by_slot": [x - y for x, y in zip(old, trained, strict=False)],
        "naive_erosion_L": sum(x - y for x, y in zip(old, blunt, strict=False)),
        "gain": sum(trained) - sum(old),
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
    options.out.mkdir(parents=True, exist_ok=True)
    first = options.pair[0].split("=", 1)[1].split(",")[0]
    base = smollm2_bloom(
        tuple(options.data),
        str(options.out),
        init_from=first,
        block_size=read_config(first).block_size + 1,
    )
    target = load_frozen(base.target, torch.bfloat16)
    log = RunLog(options.out, first=True, say=print, progress=lambda *_: None)
    rows = [row for row in feature_rows(base, target, read_rows(base), log) if row.row.greedy]
    shared = (target, rows, load_tokenizer(base.target))
    found: dict[str, Any] = {}
    points: list[tuple[float, float]] = []
    for text in options.pair:
        name, folders = text.split("=", 1)
        short, wide = folders.split(",")
        b, B = (read_config(folder).block_size for folder in (short, wide))
        every = [(short, b), (short, B), (wide, b), (wide, B)]
        parts = [histograms(options, shared, folder, block) for folder, block in every]
        sources = sorted(parts[0])
        for part in parts:
            part["all"] = sum(part.values(), Histogram())
        found[name] = {
            source: compared(*(part.get(source, Histogram()) for part in parts), b, B)
            for source in [*sources, "all"]
        }
        points += [(found[name][s]["ceiling_before"], found[name][s]["gain"]) for s in sources]
        for source, one in found[name].items():
            print(
                f"{name} {source}: {one['rounds']} rounds, {b} -> {B}: acceptance length "
                f"{one['tau_short']:.2f} -> naive {one['tau_naive']:.2f}, trained {one['tau_wide']:.2f} "
                f"(at the old block {one['tau_wide_at_short']:.2f}); ceiling "
                f"{one['ceiling_before']:.1%} -> {one['ceiling_after']:.1%}; "
                f"G {one['new_slots_G']:.2f}, L {one['front_erosion_L']:.3f} "
                f"(naive {one['naive_erosion_L']:.3f})",
                flush=True,
            )
    found["spearman"] = rank_correlation(points)
    print(f"Spearman of ceiling and gain over {len(points)} pairs: {found['spearman']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
