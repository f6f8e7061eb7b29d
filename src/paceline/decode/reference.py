"""The golden loop: one token at a time, no cache, no drafts. Slow on purpose.

Knows nothing of the fast loop; it shares only the noise numbers and the distribution's definition
with it, written out again with transformers' own processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core import Completion, Noise, SamplingParams, TokenLogprobs


def golden(
    next_logits: Callable[[list[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: Iterable[int] = (),
    limit: int = 2**31,
    tokenizer: Any = None,
) -> Completion:
    """Decode one reply. ``next_logits(ids)`` is the model's [V] after ids; ``limit`` its context."""
    stop = set(stop_ids) | set(params.stop_token_ids)
    ids, start, noise = list(prompt), len(prompt), Noise(params.seed)
    logprobs: list[TokenLogprobs] = []
    reason, text = "length", ""
    why: int | str | None = None
    while len(ids) - start < params.max_tokens and len(ids) < limit:
        raw = next_logits(ids).float()
        probs = _distribution(raw, ids, start, params, stop)
        if params.temperature == 0:
            token = int(probs.argmax())
        else:
            mass = probs.double().cumsum(0)
            level = noise.uniform("target", len(ids)) * float(mass[-1])
            token = next(i for i, m in enumerate(mass.tolist()) if m > level)
        ids.append(token)
        if params.logprobs is not None:
            logs = raw.log_softmax(-1)
            top = logs.topk(min(params.logprobs, len(logs))) if params.logprobs else None
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True) if top else ()
            logprobs.append(
                TokenLogprobs(token=token, logprob=float(logs[token]), top=tuple(pairs))
            )
        old = len(text.rstrip("\ufffd"))  # half a character is no text yet
        if tokenizer is not None:
            text = tokenizer.decode(ids[start:], skip_special_tokens=True)
        if token in stop:
            reason, why = "stop", token
            break
        ends = [(text.find(s, max(0, old - len(s) + 1)), s) for s in params.stop]
        hits = [(at, s) for at, s in ends if at >= 0]
        if hits and len(ids) - start >= params.min_tokens:
            at, why = min(hits)
            reason, text = "stop", text[:at]
            break
    return Completion(
        index=0,
        text=text,
        token_ids=ids[start:],
        finish_reason=reason,
        stop_reason=why,
        logprobs=logprobs if params.logprobs is not None else None,
        rounds=[],
    )


def _distribution(
    raw: Tensor, ids: list[int], start: int, params: SamplingParams, stop: set[int]
) -> Tensor:
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    tokens: Any = torch.tensor([ids])
    scores: Any = raw[None].clone()
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(tokens, scores)
    for token in range(scores.shape[-1]):
        count = ids[start:].count(token)
        if count:
            scores[0, token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in (params.logit_bias or {}).items():
        scores[0, token] += bias
    if len(ids) - start < params.min_tokens:
        for token in stop:
            scores[0, token] = float("-inf")
    for processor in params.logits_processors:
        scores = processor(tokens, scores)
    if params.temperature == 0:
        return scores[0]
    scores = TemperatureLogitsWarper(params.temperature)(tokens, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(tokens, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(tokens, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(tokens, scores)
    return scores[0].softmax(-1)
