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
    """Append one corpus row per prompt to ``out`` (JSON lines); batches greedy and T = 0.6 in turn.

    Rows already there are skipped and a torn last line is dropped, so a stopped run resumes. Text
    is drawn without drafts: large batches leave a CPU no idle arithmetic for them.
    """
    done, tokens = _whole_lines(out), 0
    for at in range(done, len(prompts), batch_size):
        part = prompts[at : at + batch_size]
        # By the row's own number: a run stopped inside a batch goes on as it would have.
        params = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=0.0 if i // batch_size % 2 == 0 else 0.6,
                seed=i,
            )
            for i in range(at, at + len(part))
        ]
        outputs = pipeline.plain().generate(part, params, batch_size=batch_size)
        with out.open("a") as stream:
            for prompt, chosen, output in zip(part, params, outputs, strict=True):
                reply = output.outputs[0]
                row = {
                    "source": source,
                    "prompt": prompt,
                    "temperature": chosen.temperature,
                    "prompt_ids": output.prompt_token_ids,
                    "response_ids": reply.token_ids,
                    "finish": reply.finish_reason,
                }
                stream.write(json.dumps(row) + "\n")
                tokens += len(reply.token_ids)
        report(at + len(part), tokens)


def _whole_lines(out: Path) -> int:
    """How many rows are there; cuts what a killed run left of its last one."""
    if not out.exists():
        return 0
    with out.open("r+b") as stream:
        text = stream.read()
        stream.truncate(text.rfind(b"\n") + 1)
    return text.count(b"\n")
