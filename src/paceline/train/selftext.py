"""Lets the target answer prompts in batches and writes corpus rows, so that it trains on its own text.

Does not know drafters; it is a plain generator for small models, not a serving engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def write_replies(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    out: Path,
    *,
    source: str,
    temperature: float,
    max_new_tokens: int,
    batch_size: int = 64,
    seed: int = 0,
    max_minutes: float = 1e9,
    report: Callable[[dict[str, float]], None] = lambda _: None,
) -> None:
    """Append one corpus row per prompt to `out` (JSON lines), greedily at temperature 0.

    Prompts go through the target's chat template. Batches are appended whole, so a stopped run
    leaves a readable file.
    """
    torch.manual_seed(seed)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]
    began, tokens = time.monotonic(), 0
    for at in range(0, len(prompts), batch_size):
        if time.monotonic() - began > 60 * max_minutes:
            break
        replies = _generate(model, chats[at : at + batch_size], temperature, max_new_tokens)
        with out.open("a") as stream:
            for i, reply in enumerate(replies, start=at):
                row = {
                    "source": source,
                    "prompt": prompts[i],
                    "temperature": temperature,
                    "prompt_ids": list(chats[i]),
                    "response_ids": reply,
                    "finish": "length" if len(reply) == max_new_tokens else "stop",
                }
                stream.write(json.dumps(row) + "\n")
        tokens += sum(map(len, replies))
        report({"rows": at + len(replies), "tokens_per_s": tokens / (time.monotonic() - began)})


@torch.no_grad()
def _generate(
    model: Any, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int
) -> list[list[int]]:
    end = model.generation_config.eos_token_id
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), end)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        tokens[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
    out = model.generate(
        input_ids=tokens,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=end,
        **({"do_sample": False} | how),
    )
    replies = []
    for row in out[:, width:].tolist():
        replies.append(row[: row.index(end) + 1] if end in row else row)
    return replies
