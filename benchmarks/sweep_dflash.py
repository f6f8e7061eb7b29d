"""Short training runs that differ from the recipe in one setting each, for the same CPU seconds.

Does not know how training works: it calls `paceline.train.fit`. The text is the first rows of the
repository's own corpus. Each run is a process of one thread; its steps are as many as 12 timed ones
say will fill the budget, so that the learning rate ends at zero. Stopped, it goes on where it was:

    python benchmarks/sweep_dflash.py --seconds 120 --out runs/sweep

prints a table of served-acceptance estimates on held-out rows, which are the same for all.
docs/methods/dflash.md discusses it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = {"chat": 700, "code": 300}
TIMED, WARM = 12, 4


def phase(share: float, block_size: int, anchors: int) -> dict[str, Any]:
    return {"share": share, "block_size": block_size, "anchors_per_row": anchors}


VARIANTS: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "blocks of 8 only, 12 anchors": {"phases": [phase(1.0, 8, 12)]},
    "blocks of 8 only, 24 anchors": {"phases": [phase(1.0, 8, 24)]},
    "blocks of 4 for 60 % of the steps": {"phases": [phase(0.6, 4, 24), phase(0.4, 8, 12)]},
    "drafts blocks of 4": {"phases": [phase(1.0, 4, 24)], "block_size": 4},
    "drafts blocks of 16": {
        "phases": [phase(0.3, 4, 24), phase(0.4, 8, 12), phase(0.3, 16, 6)],
        "block_size": 16,
    },
    "gamma 2": {"gamma": 2.0},
    "gamma 4": {"gamma": 4.0},
    "gamma 7": {"gamma": 7.0},
    "draft vocabulary 8k": {"draft_vocab_size": 8192},
    "draft vocabulary 32k": {"draft_vocab_size": 32768},
    "full vocabulary": {"draft_vocab_size": None},
    "1 layer (21)": {"init_layers": [21]},
    "3 layers (9, 15, 21)": {"init_layers": [9, 15, 21]},
    "4 layers (1, 9, 20, 28)": {"init_layers": [1, 9, 20, 28]},
    "random start": {"init_layers": [], "layers": 2},
    "lr 1e-3": {"lr": 1e-3},
    "lr 5e-3": {"lr": 5e-3},
    "2 rows a step": {"rows_per_step": 2},
    "8 rows a step": {"rows_per_step": 8},
    "taps 8, 20, 27": {"taps": [8, 20, 27]},
    "taps 20, 24, 27": {"taps": [20, 24, 27]},
    "KL to the target": {"loss": "kl"},
    "total variation": {"loss": "tv"},
}


def write_text(folder: Path) -> list[str]:
    """The first rows of each corpus file."""
    paths = []
    for name, count in ROWS.items():
        path = folder / f"{name}.jsonl"
        paths.append(str(path))
        if not path.exists():
            with gzip.open(ROOT / "corpus" / f"{name}.jsonl.gz", "rt") as stream:
                lines = [line for _, line in zip(range(count), stream, strict=False)]
            path.write_text("".join(lines))
    return paths


def config_of(name: str, out: Path, steps: int, run: str) -> Any:
    """The recipe with one variant's settings."""
    from paceline.recipes.smollm2 import smollm2_dflash
    from paceline.train.config import parse_settings

    pairs = [f"{key}={json.dumps(value)}" for key, value in VARIANTS[name].items()]
    settings = dict(parse_settings(pairs))
    taps = settings.get("taps", ())
    kind = "-".join(map(str, taps)) or ("head" if "loss" in settings else "default")
    return smollm2_dflash(tuple(write_text(out)), run_dir=str(out / run)).replace(
        steps=steps,
        eval_every=steps,
        eval_rows=64,
        held_out_share=0.06,
        features_dir=str(out / f"taps-{kind}"),
        **settings,
    )


def run_one(name: str, out: Path, seconds: float, number: int) -> dict[str, Any]:
    """Time a few steps of the variant, then train it for the budget."""
    import torch

    import paceline.train.fit as training

    torch.set_num_threads(1)
    clock: list[float] = []
    real = training.train_step

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        found = real(*arguments)
        clock.append(time.process_time() - began)
        return found

    training.train_step = timed
    for folder in (out / f"timing-{number}", out / f"run-{number}"):  # of a run that was stopped
        shutil.rmtree(folder, ignore_errors=True)
    # All phases take their turn in the timed steps, in the run's own proportions.
    training.fit(config_of(name, out, TIMED + WARM, f"timing-{number}"), say=lambda _: None)
    per_step = sum(clock[WARM:]) / TIMED
    clock.clear()
    config = config_of(name, out, max(10, round(seconds / per_step)), f"run-{number}")
    training.fit(config, say=lambda _: None)
    lines = [json.loads(line) for line in open(out / f"run-{number}" / "log.jsonl")]
    found = lines[-1]
    return {
        "variant": name,
        "steps": config.steps,
        "cpu_seconds": sum(clock),
        "positions": found["total_positions"],
        "served_estimate": found["served_estimate"],
        "served_rounds": found["served_rounds"],
        "by_source": found["served_by_source"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU seconds a run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / f"results-{options.seconds:.0f}.jsonl"
    if options.one:
        number = list(VARIANTS).index(options.one)
        found = run_one(options.one, options.out, options.seconds, number)
        with results.open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        return
    done = {}
    for name in VARIANTS:
        if results.exists():
            done = {line["variant"]: line for line in map(json.loads, results.open())}
        if name not in done:
            command = [sys.executable, __file__, "--one", name, "--out", str(options.out)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            seconds = ["--seconds", str(options.seconds)]
            subprocess.run([*command, *seconds], check=True, env=environment)
    rows = [json.loads(line) for line in results.open()]
    print(
        "| variant | steps | positions | positions / CPU s | served estimate |\n|---|---|---|---|---|"
    )
    for row in rows:
        rate = row["positions"] / row["cpu_seconds"]
        print(
            f"| {row['variant']} | {row['steps']} | {row['positions'] / 1000:.0f}k | {rate:.0f} "
            f"| {row['served_estimate']:.3f} "
            f"| {row['by_source']['chat']:.3f} | {row['by_source']['code']:.3f} |"
        )


if __name__ == "__main__":
    main()
