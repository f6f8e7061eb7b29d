"""Does speculation change the output? Compares with plain decoding and judges each difference.

Knows nothing about how drafts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.core import Completion, SamplingParams
from paceline.evaluate.metrics import acceptance
from paceline.pipeline import Pipeline

# Largest top-2 margin that rounding can overturn: two units in the last place of a logit of ~20.
TIE_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first divergence of one reply. ``margin`` is the target's top-2 logit gap there."""

    prompt: int
    position: int
    plain_token: int
    speculative_token: int
    margin: float
    verdict: str


def verify(
    pipeline: Pipeline,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Generate every prompt with and without drafts; count identical, near-tie and bug.

    A near-tie is a first divergence between the target's two best tokens whose margin is within
    rounding of the dtype; anything else is a bug. Greedy or seeded sampling under ``match``.
    """
    differences: list[Difference] = []
    replies: list[Completion] = []
    plain = pipeline.plain()
    for at in range(0, len(prompts), batch_size):
        part = prompts[at : at + batch_size]
        wanted = plain.generate(part, params, batch_size=batch_size)
        got = pipeline.generate(part, params, batch_size=batch_size)
        replies += [output.outputs[0] for output in got]
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            ids, other = a.outputs[0].token_ids, b.outputs[0].token_ids
            if ids != other:
                differences.append(judge(pipeline, at + i, a.prompt_token_ids, ids, other))
        progress(min(len(prompts), at + batch_size))
    verdicts = [difference.verdict for difference in differences]
    return {
        "prompts": len(prompts),
        "identical": len(prompts) - len(differences),
        "near_ties": verdicts.count("near-tie"),
        "bugs": verdicts.count("bug"),
        "dtype": str(pipeline.target.dtype).removeprefix("torch."),
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "acceptance_length_pooled": acceptance(replies).acceptance_length_pooled,
        "differences": [asdict(difference) for difference in differences],
    }


def judge(
    pipeline: Pipeline, prompt: int, start: list[int], wanted: list[int], got: list[int]
) -> Difference:
    """Find the first divergence and look at the target's margin there."""
    pairs = list(zip(wanted, got, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    plain = wanted[at] if at < len(wanted) else -1
    other = got[at] if at < len(got) else -1
    margin = float("inf")
    if plain >= 0 and other >= 0:
        logits = pipeline.target.next_logits(start + wanted[:at]).float()
        margin = abs(float(logits[plain] - logits[other]))
        rivals = {plain, other} <= set(logits.topk(3).indices.tolist())
        margin = margin if rivals else float("inf")
    tie = margin <= TIE_MARGIN[pipeline.target.dtype]
    return Difference(
        prompt=prompt,
        position=at,
        plain_token=plain,
        speculative_token=other,
        margin=margin,
        verdict="near-tie" if tie else "bug",
    )
