"""Where a round's time goes, and how it grows with batch and context.

Overhead is everything outside the target's forward, the drafter's pass and the sampling: packing,
slicing taps, committing, bookkeeping. Medians over rounds; a fixed context of random token ids.

    .venv/bin/python benchmarks/round_time.py --json rounds.json
    .venv/bin/python benchmarks/round_time.py --drafter smollm2-dflash --drafter FOLDER

Several drafters are measured in turn at each shape, and each one's own parameters are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.decode.loop import Session


def measure(pipeline: paceline.Pipeline, batch: int, context: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a round and its parts, after prefill and two rounds of warm-up."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(20, 40_000, (batch, context), generator=generator).tolist()
    params = paceline.SamplingParams(max_tokens=8 * (rounds + 4), ignore_eos=True)
    session: Session = pipeline.session(batch)
    for row in pipeline.rows(prompts, params):
        session.add(row)
    forwards: list[float] = []
    began: list[float] = []
    model = pipeline.target.model
    hooks = [
        model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())),
        model.register_forward_hook(lambda *_: forwards.append(time.perf_counter() - began[-1])),
    ]
    parts: dict[str, list[float]] = {
        k: [] for k in ("total", "target", "drafter", "sampling", "rest")
    }
    for number in range(rounds + 3):
        before = vars_of(session)
        start = time.perf_counter()
        session.step()
        total = time.perf_counter() - start
        after = vars_of(session)
        if number < 3:
            continue
        drafter, sampling = (after[k] - before[k] for k in ("draft", "accept"))
        values = (total, forwards[-1], drafter, sampling)
        for name, value in zip(parts, (*values, total - sum(values[1:])), strict=True):
            parts[name].append(1e3 * value)
    for hook in hooks:
        hook.remove()
    found = {name: statistics.median(values) for name, values in parts.items()}
    return {
        "batch": batch,
        "context": context,
        "ms": found,
        "overhead": found["rest"] / found["total"],
    }


def vars_of(session: Session) -> dict[str, float]:
    """The session's running seconds by phase."""
    return {"draft": session.seconds.draft, "accept": session.seconds.accept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--drafter", action="append", help="repeatable; none: the default one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.drafter or ["default"]
    pipelines = {name: paceline.load("smollm2", name, dtype=options.dtype) for name in names}
    results = []
    shapes = [(batch, 256) for batch in (1, 2, 4, 8, 16)] + [(1, 1024), (1, 4096)]
    for batch, context in shapes:
        for name, pipeline in pipelines.items():
            module: Any = pipeline.drafter.module  # type: ignore[union-attr]
            size = sum(weight.numel() for weight in module.parameters())
            found = measure(pipeline, batch, context, options.rounds)
            results.append({"drafter": name, "parameters": size} | found)
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
