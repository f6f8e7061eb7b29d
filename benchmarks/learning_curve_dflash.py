"""How good the recipe's drafter gets with how much text and how many CPU seconds.

Does not know how a step works: it calls `paceline.train`. Each run is the recipe from the target's
layers on a share of the rows of the repository's corpus, with a learning rate that ends at zero
after its CPU seconds. All are judged on the same held-out rows. Stopped, it goes on where it was:

    OMP_NUM_THREADS=1 python benchmarks/learning_curve_dflash.py --out runs/curve

docs/methods/dflash.md discusses what it prints.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from paceline.recipes.smollm2 import smollm2_dflash
from paceline.train.config import TrainConfig
from paceline.train.features import FeatureRow, load_frozen, load_tokenizer
from paceline.train.fit import feature_rows, read_rows, train_step
from paceline.train.logs import RunLog
from paceline.train.order import Order
from paceline.train.served import Served, served_estimate
from paceline.train.trainee import make_trainee

CORPUS = Path(__file__).parents[1] / "corpus"
TIMED, WARM = 12, 4
# (share of the rows, CPU seconds): time with all text, then text at one time.
RUNS = [(1.0, 60), (1.0, 120), (1.0, 240), (1.0, 480), (0.5, 240), (0.25, 240), (0.0625, 240)]


def run(
    config: TrainConfig, target: Any, train: list[FeatureRow], held: list[FeatureRow], seconds: int
) -> dict[str, Any]:
    """Train for ``seconds`` of CPU time, as many steps as a few timed ones say will fill it."""
    tokenizer = load_tokenizer(config.target)
    order, steps = Order(train, config.rows_per_step, config.seed), TIMED + WARM
    for timing in (True, False):
        now = config.replace(steps=steps)
        trainee = make_trainee(now, target, train, torch.bfloat16, tokenizer=tokenizer)
        positions, began = 0.0, time.process_time()
        for step in range(steps):
            if timing and step == WARM:
                began = time.process_time()
            positions += train_step(now, trainee, order, step)["positions"]
        spent = time.process_time() - began
        if timing:
            steps = max(10, round(seconds * TIMED / spent))
    found = served_estimate(trainee, held, config.block_size, len(held))
    total = sum(found.values(), Served())
    return {
        "reply_tokens": sum(len(item.row.reply) for item in train),
        "steps": steps,
        "cpu_seconds": spent,
        "positions": positions,
        "held_out": total.acceptance_length,
        "held_out_rounds": total.verify_rounds,
        "trained_on": _on_training_rows(trainee, train, config),
    }


def _on_training_rows(trainee: Any, train: list[FeatureRow], config: TrainConfig) -> float:
    found = served_estimate(trainee, train, config.block_size, 100)
    return sum(found.values(), Served()).acceptance_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    known = {(line["text"], line["seconds"]) for line in done}
    data = tuple(str(CORPUS / f"{name}.jsonl.gz") for name in ("chat", "code"))
    config = smollm2_dflash(data, str(options.out)).replace(held_out_share=0.06)
    target = load_frozen(config.target, torch.bfloat16)
    log = RunLog(options.out, first=True, say=print, progress=lambda *_: None)
    rows = feature_rows(config, target, read_rows(config), log)
    held = [item for item in rows if item.row.held_out and item.row.greedy]
    kept = [item for item in rows if not item.row.held_out]
    print("| text | reply tokens | CPU s | steps | positions | held out | trained on |")
    print("|---|---|---|---|---|---|---|")
    for text, seconds in RUNS:
        if (text, seconds) not in known:
            # Every n-th row: each file keeps its part.
            part = kept[:: round(1 / text)]
            line = {"text": text, "seconds": seconds} | run(config, target, part, held, seconds)
            done.append(line)
            with results.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        line = next(d for d in done if (d["text"], d["seconds"]) == (text, seconds))
        print(
            f"| {text:g} | {line['reply_tokens'] / 1000:.0f}k | {line['cpu_seconds']:.0f} "
            f"| {line['steps']} | {line['positions'] / 1000:.0f}k | {line['held_out']:.3f} "
            f"| {line['trained_on']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
