"""Greedy acceptance lengths of many drafters on the benchmark tasks, from one set of replies.

Does not time anything and does not decode with a drafter: at temperature 0 what a drafter gets accepted
is a function of the target's own reply, so each drafter is walked along the same replies (near ties of
bf16 aside; tails that loop are cut). Domains are Spec-Bench's categories and the other tasks; figures
are per domain, pooled, and spread over domains and slots. Stopped, it goes on where it was:

    OMP_NUM_THREADS=1 python benchmarks/walk_tasks.py --tasks-dir data --out runs/walk \
        --drafter before=FOLDER --drafter after=FOLDER --json walk.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from walked import Walker

from paceline.core import SamplingParams
from paceline.drafters.dflash import read_config
from paceline.evaluate.tasks import load_tasks
from paceline.pipeline import Pipeline
from paceline.target import load_target
from paceline.train.served import Served, walk


def write_replies(path: Path, options: argparse.Namespace) -> None:
    """Greedy replies to the first turns, 16 at a time; what is there already is kept."""
    pipeline = Pipeline(target=load_target("smollm2", dtype="bf16"))
    jobs = []
    tasks = load_tasks(options.tasks.split(","), options.tasks_dir, options.limit)
    for task in tasks:
        for question in task.questions:
            ids = pipeline.encode([dict(message) for message in question.turns[0]])
            if len(ids) <= 700:
                domain = question.category if task.name == "spec_bench" else task.name
                jobs.append((domain, ids))
    done = sum(1 for _ in path.open()) if path.exists() else 0
    params = SamplingParams(max_tokens=options.max_new_tokens)
    for at in range(done, len(jobs), 16):
        part = jobs[at : at + 16]
        found = pipeline.generate([ids for _, ids in part], params)
        lines = [
            {"prompt_ids": ids, "response_ids": one.outputs[0].token_ids, "source": domain}
            for (domain, ids), one in zip(part, found, strict=True)
        ]
        with path.open("a") as stream:
            stream.write("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{at + len(part)}/{len(jobs)} replies", flush=True)


def figures(found: Any, block: int) -> dict[str, Any]:
    """Acceptance length by domain, and how it varies over domains and slots."""
    domains: dict[str, Served] = {}
    reached, accepted = [0] * (block - 1), [0] * (block - 1)
    for item, runs in found:
        domains[item.row.source] = domains.get(item.row.source, Served()) + walk(runs)
        at = 0
        while at < len(runs):
            for slot in range(min(runs[at] + 1, block - 1, len(runs) - at)):
                reached[slot] += 1
                accepted[slot] += slot < runs[at]
            at += runs[at] + 1
    lengths = {name: one.acceptance_length for name, one in sorted(domains.items())}
    slots = [a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True)]
    return {
        "pooled": sum(domains.values(), Served()).acceptance_length,
        "domains": lengths,
        "mean_of_domains": statistics.mean(lengths.values()),
        "variance_over_domains": statistics.pvariance(lengths.values()),
        "slots": slots,
        "variance_over_slots": statistics.pvariance(slots),
        "rounds": sum(one.verify_rounds for one in domains.values()),
    }


def main() -> None:
    """Parse the options, write replies, walk the drafters, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", action="append", required=True, help="NAME=FOLDER")
    parser.add_argument("--tasks", default="gsm8k,humaneval,spec_bench")
    parser.add_argument("--tasks-dir", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=96, help="prompts of a task")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    replies = options.out / "replies.jsonl"
    write_replies(replies, options)
    walker, found = Walker([str(replies)], options.out), {}
    for text in options.drafter:
        name, folder = text.split("=", 1)
        block = read_config(folder).block_size
        found[name] = figures(walker.runs(folder, block), block)
        one = found[name]
        print(
            f"{name}: {one['pooled']:.3f} pooled, mean {one['mean_of_domains']:.3f} and variance "
            f"{one['variance_over_domains']:.3f} over domains; "
            + ", ".join(f"{domain} {length:.2f}" for domain, length in one["domains"].items())
            + "; slots "
            + " ".join(f"{slot:.2f}" for slot in one["slots"]),
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
