"""Lets the target answer prompts and writes its replies as corpus rows: it trains on its own text.

Knows nothing about drafters or features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.core import SamplingParams
from paceline.pipeline import Pipeline


def write_replies(
    pipeline: Pipeline,
    prompts: Sequence[str],
    out: Path,
    *,
    source: str,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    report: Callable[[int, int], None] = lambda rows, tokens: None,
) -> None:
    """Append one corpus row per prompt to ``out`` (JSON lines); greedy and T = 0.6 in turn.

    Batches are appended whole, and rows already there are skipped, so a stopped run resumes. Text
    is drawn without drafts: large batches leave a CPU no idle arithmetic for them.
    """
    done = len(out.read_text().splitlines()) if out.exists() else 0
    tokens = 0
    for at in range(done, len(prompts), batch_size):
        part = prompts[at : at + batch_size]
        temperature = 0.0 if at // batch_size % 2 == 0 else 0.6
        params = [
            SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=at + i)
            for i in range(len(part))
        ]
        outputs = pipeline.plain().generate(part, params, batch_size=batch_size)
        with out.open("a") as stream:
            for prompt, output in zip(part, outputs, strict=True):
                reply = output.outputs[0]
                row = {
                    "source": source,
                    "prompt": prompt,
                    "temperature": temperature,
                    "prompt_ids": output.prompt_token_ids,
                    "response_ids": reply.token_ids,
                    "finish": reply.finish_reason,
                }
                stream.write(json.dumps(row) + "\n")
                tokens += len(reply.token_ids)
        report(at + len(part), tokens)
