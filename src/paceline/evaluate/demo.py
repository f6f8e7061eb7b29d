"""Streams replies and compares plain with speculative decoding on a few prompts, as a table.

Knows nothing about commands.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from paceline.core import Row, SamplingParams
from paceline.data.prompts import DEMO_PROMPTS
from paceline.evaluate.doctor_alarm import Alarm, can_alarm
from paceline.evaluate.metrics import acceptance
from paceline.evaluate.traces import Trace, traced
from paceline.evaluate.verify import ExactArithmetic, judge
from paceline.pipeline import Pipeline


def stream_reply(
    pipeline: Pipeline, messages: Any, params: SamplingParams, alarm: Alarm
) -> dict[str, Any]:
    """Print one reply as it comes, and a warning behind it if it sets off the alarm.

    Returns the reply's text and figures; ``warning`` is what the alarm has said so far, or None.
    """
    began = time.perf_counter()
    reply = shown_reply(pipeline, messages, params).reply
    seconds = time.perf_counter() - began
    if can_alarm(pipeline) and (said := alarm.add(reply.rounds)) is not None:
        print(f"paceline: {said}", file=sys.stderr)
    counts = acceptance([reply])
    return {
        "text": reply.text,
        "tokens": len(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "seconds": seconds,
        "tokens_per_second": len(reply.token_ids) / seconds,
        "acceptance_length": counts.acceptance_length_pooled,
        "warning": alarm.message,
    }


def shown_reply(pipeline: Pipeline, messages: Any, params: SamplingParams) -> Trace:
    """One reply, printed as it comes."""

    def show(row: Row) -> None:
        if row.text is not None:
            live = row.finish_reason is None
            sys.stdout.write(row.text.take() if live else row.text.finish())
            sys.stdout.flush()

    found = traced(pipeline, [messages], params, each=show)[0]
    sys.stdout.write("\n")
    return found


def run_demo(pipeline: Pipeline, max_new_tokens: int) -> dict[str, Any]:
    """Alternate plain and speculative decoding over the demo prompts, print a table."""
    import torch
    from rich.console import Console
    from rich.table import Table

    console = Console()
    params = SamplingParams(max_tokens=max_new_tokens)
    traced(pipeline, [DEMO_PROMPTS[0][1]], SamplingParams(max_tokens=16))  # warm up kernels
    traced(pipeline.plain(), [DEMO_PROMPTS[0][1]], SamplingParams(max_tokens=4))
    rows = [_compare(pipeline, kind, prompt, params) for kind, prompt in DEMO_PROMPTS]
    table = Table("prompt", "plain tok/s", "tok/s", "speed-up", "acceptance length", "identical")
    for row in rows:
        table.add_row(
            row["kind"],
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_vs_plain']:.2f}x",
            "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
            row["identical"],
        )
    spent, plain = (sum(row[key] for row in rows) or 1e-9 for key in ("seconds", "plain_seconds"))
    tokens, plain_tokens = (sum(row[key] for row in rows) for key in ("tokens", "plain_tokens"))
    total = (tokens / spent) / (plain_tokens / plain) if plain_tokens else 1.0
    median = statistics.median(row["speedup_vs_plain"] for row in rows)
    console.print(table)
    console.print(f"All prompts: {total:.2f}x plain decoding (median {median:.2f}x), batch 1.")
    if any(row["identical"].startswith("near-tie") for row in rows):
        console.print(
            "near-tie: the model's two best tokens lay within the rounding of the dtype (in brackets, "
            "their distance), so passes over one and over several tokens may differ; in fp32 replies "
            "are identical (--dtype fp32)."
        )
    return {
        "speedup_vs_plain": total,
        "speedup_median": median,
        "dtype": pipeline.target.dtype_name,
        "threads": torch.get_num_threads(),
        "prompts": rows,
    }


def _compare(pipeline: Pipeline, kind: str, prompt: str, params: SamplingParams) -> dict[str, Any]:
    print(f"\n[{kind}] {prompt}\n")
    trace, base = (
        shown_reply(pipeline, prompt, params),
        traced(pipeline.plain(), [prompt], params)[0],
    )
    reply, plain = trace.reply, base.reply
    identical = "yes"
    if reply.token_ids != plain.token_ids:
        exact, start = ExactArithmetic(pipeline.target), trace.prompt_ids
        verdict = judge(pipeline, exact, 0, start, plain.token_ids, reply.token_ids, params)
        identical = "no" if verdict.verdict == "bug" else f"near-tie ({verdict.margin:.2g})"
    seconds, plain_seconds = trace.seconds.total, base.seconds.total
    tokens, plain_tokens = trace.decoded, base.decoded
    speed, plain_speed = tokens / max(seconds, 1e-9), plain_tokens / max(plain_seconds, 1e-9)
    return {
        "kind": kind,
        "tokens": tokens,
        "plain_tokens": plain_tokens,
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speedup_vs_plain": speed / plain_speed if tokens and plain_tokens else 1.0,
        "acceptance_length": acceptance([reply]).acceptance_length_pooled,
        "identical": identical,
    }
