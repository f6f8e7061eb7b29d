"""N-gram drafting against transformers' prompt lookup (batch 1) and economize (batch 1 and 8).

Same model, same draft length, greedy. In fp32 ids must be the same; accepted counts are compared
round by round with transformers, in sum with economize (which drafts nothing with the prefill).
Speed is bf16. economize runs in its own environment (``--economize PYTHON``), otherwise skipped.

    .venv/bin/python benchmarks/ngram_peers.py --prompts questions.jsonl --json ngram.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation import utils as generation

import paceline
from paceline.core import Completion
from paceline.data.prompts import read_prompts
from paceline.drafters.ngram import NgramDrafter
from paceline.gguf import convert_gguf, smollm2_gguf
from paceline.pipeline import Pipeline

DRAFTS = 7
LENGTHS: list[int] = []


class Recording(generation.PromptLookupCandidateGenerator):  # type: ignore[misc]
    """Their generator, noting how long the text is at every draft."""

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        LENGTHS.append(input_ids.shape[1])
        return super().get_candidates(input_ids, *args, **kwargs)


def ours(pipeline: Pipeline, ids: list[list[int]], new: int) -> tuple[list[Completion], float]:
    began = time.perf_counter()
    params = paceline.SamplingParams(max_tokens=new)
    outputs = pipeline.generate(ids, params, batch_size=len(ids))
    return [output.outputs[0] for output in outputs], time.perf_counter() - began


def lookup(model: Any, ids: list[int], new: int) -> tuple[list[int], list[int], float]:
    LENGTHS.clear()
    began = time.perf_counter()
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        prompt_lookup_num_tokens=DRAFTS,
        max_matching_ngram_size=2,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=2,
    )
    seconds = time.perf_counter() - began
    marks = [*LENGTHS, out.shape[1]]
    return (
        out[0, len(ids) :].tolist(),
        [b - a for a, b in zip(marks, marks[1:], strict=False)],
        seconds,
    )


def against_transformers(dtype: str, prompts: list[Any], new: int) -> dict[str, Any]:
    pipeline = load(dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        convert_gguf(smollm2_gguf()), dtype=pipeline.target.dtype
    ).eval()
    same = rounds = 0
    ratios = []
    for prompt in prompts:
        ids = pipeline.encode(prompt)
        (reply,), seconds = ours(pipeline, [ids], new)
        theirs, committed, their_seconds = lookup(model, ids, new)
        same += reply.token_ids == theirs
        rounds += [r.committed for r in reply.rounds] == committed
        ratios.append(len(reply.token_ids) / seconds / (len(theirs) / their_seconds))
    return {
        "peer": "transformers prompt lookup",
        "dtype": dtype,
        "batch": 1,
        "prompts": len(prompts),
        "same_ids": same,
        "same_committed_every_round": rounds,
        "median_speed_ratio": statistics.median(ratios),
    }


def against_economize(
    python: str, dtype: str, prompts: list[Any], new: int, batch: int
) -> dict[str, Any]:
    pipeline = load(dtype)
    ids = [pipeline.encode(prompt) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        job = {"prompts": ids, "new": new, "batch": batch, "drafts": DRAFTS, "stop": 2}
        source, out = Path(folder) / "in.json", Path(folder) / "out.json"
        source.write_text(json.dumps(job))
        script = Path(__file__).with_name("economize_lookup.py")
        command = [python, str(script), str(convert_gguf(smollm2_gguf())), dtype, source, out]
        subprocess.run(command, check=True)
        results = json.loads(out.read_text())
    same = 0
    ratios, accepted, their_accepted = [], 0, 0
    for number, result in enumerate(results):
        part = ids[number * batch : (number + 1) * batch]
        replies, seconds = ours(pipeline, part, new)
        for reply, theirs in zip(replies, result["ids"], strict=True):
            same += reply.token_ids[: len(theirs)] == theirs
        tokens = sum(len(reply.token_ids) for reply in replies)
        their_tokens = sum(map(len, result["ids"]))
        ratios.append(tokens / seconds / (their_tokens / result["seconds"]))
        accepted += sum(r.accepted for reply in replies for r in reply.rounds)
        their_accepted += sum(a for row in result["acceptance"] for _, a in row)
    return {
        "peer": "economize 0.3.2 lookup",
        "dtype": dtype,
        "batch": batch,
        "prompts": len(prompts),
        "same_ids": same,
        "accepted_drafts": accepted,
        "their_accepted_drafts": their_accepted,
        "median_speed_ratio": statistics.median(ratios),
    }


def load(dtype: str) -> Pipeline:
    target = paceline.load("smollm2", None, dtype=dtype).target
    return Pipeline(target=target, drafter=NgramDrafter(DRAFTS, max_ngram=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--economize", help="python of an environment with economize==0.3.2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generation.PromptLookupCandidateGenerator = Recording  # type: ignore[misc]
    prompts, new = read_prompts(options.prompts, options.limit), options.max_new_tokens
    results = []
    for dtype in ("fp32", "bf16"):
        results.append(against_transformers(dtype, prompts, new))
        print(json.dumps(results[-1]), flush=True)
        for batch in (1, 8) if options.economize else ():
            results.append(against_economize(options.economize, dtype, prompts, new, batch))
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
