"""A made-up document in the schema of docs/bench.md, for tests of whatever reads one.

Does not run any model: rounds are drawn from fixed acceptance rates, seconds from fixed costs.
"""

from __future__ import annotations

import random
import statistics
from itertools import product
from typing import Any

from paceline.core import Completion, Round
from paceline.evaluate.metrics import acceptance, ratio

METHODS = ("plain", "ngram", "dflash")
TASKS: dict[str, dict[str, int]] = {
    "gsm8k": {},
    "builtin": {"code": 4, "maths": 4, "chat": 4},
}
UNSPLIT = 12  # requests of a task without categories
BATCH_SIZES, TEMPERATURES = (1, 8), (0.0, 1.0)
DRAFTS = {"plain": 0, "ngram": 10, "dflash": 7}
RATES = {"plain": 0.0, "ngram": 0.25, "dflash": 0.66}
EASE = {None: 1.0, "code": 1.05, "maths": 1.15, "chat": 0.7}
PHASES = ("draft", "refine", "verify", "accept", "commit")
TOKENS = 96


def example_bench() -> dict[str, Any]:
    """Three methods, two tasks, three categories, batch sizes 1 and 8, temperatures 0 and 1."""
    runs, replies = [], []
    for method, task, batch, temperature in product(METHODS, TASKS, BATCH_SIZES, TEMPERATURES):
        setting = {"method": method, "task": task}
        conditions = {"batch_size": batch, "temperature": temperature}
        groups: dict[str | None, int] = {**TASKS[task]} or {None: UNSPLIT}
        found = {
            category: [_reply(method, category, batch, temperature, i) for i in range(count)]
            for category, count in groups.items()
        }
        for category in [None, *TASKS[task]]:
            some = found[category] if category in found else sum(found.values(), [])
            name = {**setting, "category": category, **conditions}
            runs.append({**name, **_figures(some)})
        for category, some in found.items():
            name = {**setting, "category": category, **conditions}
            replies += [{**name, "row": i, **_entry(reply)} for i, reply in enumerate(some)]
    return {
        "schema": {"name": "paceline-bench", "version": 2},
        "environment": {
            "paceline": "0.1.0",
            "python": "3.12.3",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "commit": None,
            "device": "cpu",
            "device_name": "Example CPU 9000",
            "machine": "x86_64",
            "threads": 2,
            "dtype": "bf16",
            "cpu_features": ["avx2", "avx512f", "avx512_bf16", "amx_bf16"],
        },
        "target": {
            "name": "smollm2",
            "architecture": "LlamaForCausalLM",
            "parameters": 134515008,
            "layers": 30,
            "vocab_size": 49152,
            "context": 8192,
            "fingerprint": {
                "weights": "8f0e61d2a94c7b35",
                "tokenizer": "51c07e9ab23d4f68",
                "template": "d4b8a6f013597ce2",
            },
        },
        "arguments": {
            "methods": list(METHODS),
            "tasks": list(TASKS),
            "batch_sizes": list(BATCH_SIZES),
            "temperatures": list(TEMPERATURES),
            "limit": 12,
            "max_new_tokens": TOKENS,
            "accept": "match",
        },
        "methods": [
            {
                "name": name,
                "drafter": name,
                "stages": [],
                "weights": "3f9c2a70b1d4e856" if name == "dflash" else None,
                "accept": "match",
            }
            for name in METHODS
        ],
        "tasks": [
            {
                "name": task,
                "rows": 1000 if task == "gsm8k" else 30,
                "prompts": sum(categories.values()) or UNSPLIT,
                "requests": sum(categories.values()) or UNSPLIT,
                "left_out": {},
                "categories": dict(categories),
                "fingerprint": "0123456789abcdef",
            }
            for task, categories in TASKS.items()
        ],
        "runs": runs,
        "replies": replies,
    }


def _reply(
    method: str, category: str | None, batch: int, temperature: float, index: int
) -> dict[str, Any]:
    """One reply with its counts and its share of the time, and plain's share for the same one."""
    draw = random.Random(f"{method}/{category}/{batch}/{temperature}/{index}")
    rate = RATES[method] * EASE[category] * (0.85 if temperature else 1.0)
    rounds, left = [Round(drafted=0, accepted=0, committed=1)], TOKENS - 1
    while left > 0:
        drafted = min(DRAFTS[method], left - 1)
        accepted = next((k for k in range(drafted) if draw.random() > rate), drafted)
        rounds.append(Round(drafted=drafted, accepted=accepted, committed=accepted + 1))
        left -= accepted + 1
    looping = index == 3
    done = Completion(
        index=0,
        text="",
        token_ids=[5] * TOKENS if looping else list(range(TOKENS)),
        finish_reason="length",
        stop_reason=None,
        logprobs=None,
        rounds=rounds,
    )
    passes = len(rounds) - 1
    cost = {
        "draft": 0.0068 * (method == "dflash") + 0.0002 * (method == "ngram"),
        "refine": 0.0,
        "verify": 0.031 + 0.0024 * DRAFTS[method],
        "accept": 0.0006 + 0.0004 * (temperature > 0),
        "commit": 0.0004,
    }
    share = (0.3 if batch > 1 else 1.0) * passes  # of the time of the passes it took part in
    return {
        "reply": done,
        "seconds": {phase: cost[phase] * share for phase in PHASES},
        "plain_seconds": (0.0324 if temperature else 0.032)
        * (0.3 if batch > 1 else 1)
        * (TOKENS - 1),
        "prefill": 0.06 * (0.5 if batch > 1 else 1.0),
        "passes": passes / batch,
        "looping": looping,
        "verdict": "near-tie" if method != "plain" and index % 4 == 1 else "identical",
    }


def _figures(some: list[dict[str, Any]]) -> dict[str, Any]:
    counts = acceptance([one["reply"] for one in some])
    seconds = {phase: sum(one["seconds"][phase] for one in some) for phase in PHASES}
    seconds["total"] = sum(seconds.values())
    plain = sum(one["plain_seconds"] for one in some)
    prefill = sum(one["prefill"] for one in some)
    tokens = counts.committed_tokens
    kept = [one for one in some if not one["looping"]]
    fewer = acceptance([one["reply"] for one in kept])
    kept_seconds = sum(sum(one["seconds"].values()) for one in kept)
    kept_plain = sum(one["plain_seconds"] for one in kept)
    ratios = [one["plain_seconds"] / sum(one["seconds"].values()) for one in some]
    verdicts = [one["verdict"] for one in some]
    names = ("requests", "verify_rounds", "accepted_drafts", "committed_tokens")
    names += ("acceptance_length_pooled", "acceptance_length_request_mean")
    return {
        **counts.figures(),
        "output_tokens": tokens + len(some),
        "seconds": seconds,
        "prefill_seconds": prefill,
        "forward_passes": sum(one["passes"] for one in some),
        "rows_per_pass": counts.verify_rounds / sum(one["passes"] for one in some),
        "unfilled_requests": 0,
        "tokens_per_second": tokens / seconds["total"],
        "speedup_vs_plain": plain / seconds["total"],
        "speedup_median": statistics.median(ratios),
        "speedup_end_to_end": (plain + prefill) / (seconds["total"] + prefill),
        "chunks": len(some),
        "measurements": len(some),
        "identical_to_plain": verdicts.count("identical"),
        "near_ties": verdicts.count("near-tie"),
        "other_draws": verdicts.count("draw"),
        "bugs": 0,
        "looping_share": ratio(sum(one["looping"] for one in some), len(some)),
        "without_loops": {
            **{name: getattr(fewer, name) for name in names},
            "tokens_per_second": fewer.committed_tokens / kept_seconds,
            "speedup_vs_plain": kept_plain / kept_seconds,
        },
    }


def _entry(one: dict[str, Any]) -> dict[str, Any]:
    counts = acceptance([one["reply"]])
    near = one["verdict"] == "near-tie"
    split = {"position": 40, "plain_token": 28, "speculative_token": 198}
    return {
        "turn": 0,
        "prompt_tokens": 61,
        "output_tokens": TOKENS,
        "finish_reason": "length",
        "verify_rounds": counts.verify_rounds,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_drafts": counts.accepted_drafts,
        "committed_tokens": counts.committed_tokens,
        "seconds": sum(one["seconds"].values()),
        "looping": one["looping"],
        "verdict": one["verdict"],
        "difference": {**split, "margin": 0.03, "rounding": 0.08} if near else None,
    }
