"""An asynchronous on-policy run on the real model whose two processes are killed at random moments.

Does not know losses: it starts the recipe `smollm2_adaflash` and its rollouts as two processes, kills
one of them again and again (SIGKILL), starts it again, and at the end compares what was trained with
what was rolled out.

    python benchmarks/on_policy_kills.py --data replies.jsonl --run-dir runs/kills --json kills.json

Each process takes one thread. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.dflash import load_dflash
from paceline.recipes.smollm2 import smollm2_adaflash
from paceline.train.config import OnPolicy, TrainConfig
from paceline.train.fit import fit
from paceline.train.on_policy import versions_folder
from paceline.train.records import RecordReader
from paceline.train.sources import RolloutSource
from paceline.train.versions import Versions
from paceline.train.worker import roll_out_for

NOTES = "trained.jsonl"


def train(config: TrainConfig) -> None:
    """The trainer; it appends step, ids and versions of every batch as they are given out."""
    torch.set_num_threads(1)
    real, read, taken = RolloutSource.batch, RecordReader.read, list[tuple[int, int]]()

    def noted(self: RecordReader, number: int) -> Any:
        record = read(self, number)
        taken.append((record.id, record.version))
        return record

    def batch(self: RolloutSource, step: int) -> Any:
        taken.clear()
        found = real(self, step)
        with (Path(config.run_dir) / NOTES).open("a") as stream:
            stream.write(json.dumps({"step": step, "taken": taken}) + "\n")
        return found

    RecordReader.read, RolloutSource.batch = noted, batch  # type: ignore[method-assign]
    fit(config)


def roll_out(config: TrainConfig) -> None:
    """The process that decodes."""
    torch.set_num_threads(1)
    roll_out_for(config)


def checked(config: TrainConfig, steps: int) -> dict[str, Any]:
    """What was trained, of each step the last try: an earlier one was undone by going back."""
    run = Path(config.run_dir)
    tries = [json.loads(line) for line in (run / NOTES).read_text().splitlines()]
    last = {entry["step"]: entry["taken"] for entry in tries}
    ids = [number for step in range(steps) for number, _ in last.get(step, [])]
    versions = [version for step in range(steps) for _, version in last.get(step, [])]
    wanted = range(len(ids))
    return {
        "steps": steps,
        "steps_undone_by_kills": len(tries) - len(last),
        "records": len(ids),
        "lost": len(set(wanted) - set(ids)),
        "trained_twice": len(ids) - len(set(ids)),
        "in_order": ids == list(wanted),
        "versions_used": sorted(set(versions)),
    }


def kill_and_restart(config: TrainConfig, kills: int, span: float, seed: int) -> dict[str, Any]:
    """Run both processes to the end with so many kills, ``span`` seconds apart on average."""
    rng, context = random.Random(seed), multiprocessing.get_context("spawn")
    work = {"train": train, "roll out": roll_out}

    def start(name: str) -> Any:
        process = context.Process(target=work[name], args=(config,), daemon=True)
        process.start()
        return process

    running = {name: start(name) for name in work}
    versions, seen = Versions(versions_folder(Path(config.run_dir))), set[int]()
    damaged, killed, backwards = 0, list[str](), 0
    began = time.monotonic()
    due = began + rng.uniform(0.5, 1.5) * span
    while running["train"].is_alive():
        newest = versions.newest()
        if newest is not None and newest not in seen:
            backwards += newest < max(seen, default=0)
            seen.add(newest)
            try:  # what serving would load at this moment
                versions.load(lambda folder: load_dflash(folder, torch.float32))
            except (OSError, ValueError) as error:
                print(f"version {newest} cannot be read: {error}", flush=True)
                damaged += 1
        if len(killed) < kills and time.monotonic() > due:
            name = rng.choice(sorted(work))
            running[name].kill()
            running[name].join()
            running[name] = start(name)
            killed.append(name)
            due = time.monotonic() + rng.uniform(0.5, 1.5) * span
            print(f"{time.monotonic() - began:.0f} s: killed {name}", flush=True)
        time.sleep(0.05)
    running["roll out"].join(timeout=120)
    codes = {name: process.exitcode for name, process in running.items()}
    return {
        "killed": killed,
        "exit_codes": codes,
        "versions_read": len(seen),
        "versions_damaged": damaged,
        "versions_backwards": backwards,
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Parse the options, run, and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", action="append", required=True, help="rows to take prompts from")
    parser.add_argument("--run-dir", default="runs/kills")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=120.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features-dir", help="features of earlier runs on the same rows")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    how = OnPolicy(
        asynchronous=True,
        records_per_shard=16,
        slots=16,
        publish_every=16,
        max_stale=None,
        keep_records=True,
    )
    config = smollm2_adaflash(tuple(options.data), options.run_dir).replace(
        steps=options.steps, on_policy=how, eval_every=options.steps, checkpoint_seconds=30.0
    )
    if options.features_dir:
        config = config.replace(features_dir=options.features_dir)
    found = kill_and_restart(config, options.kills, options.every, options.seed)
    found |= checked(config, options.steps)
    print(json.dumps(found, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if found["exit_codes"]["train"] != 0 or not found["in_order"]:
        raise SystemExit("records were lost or trained twice, or the run failed")


if __name__ == "__main__":
    main()
