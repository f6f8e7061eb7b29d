"""Commits accepted tokens to a row: EOS, stop ids, stop strings, length limits, logprobs.

Knows nothing about drafts or caches; it sees the tokens of one round in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.core import Round, Row, TokenLogprobs


def commit_row(
    row: Row, tokens: Sequence[int], drafted: int, logits_TV: Tensor, nodes: Sequence[int]
) -> list[int]:
    """Append the round's tokens up to the first end; returns the ids really committed.

    ``nodes[i]`` is the packed node whose distribution ``tokens[i]`` came from. A stop inside the
    budget beats the length limit that the same round would cross. ``stop_reason`` is the id or
    string that ended the reply.
    """
    committed: list[int] = []
    for token, node in zip(tokens, nodes, strict=True):
        row.tokens.append(token)
        committed.append(token)
        if row.params.logprobs is not None:
            row.logprobs.append(token_logprobs(logits_TV[node], token, row.params.logprobs))
        ends = token in row.stop_ids  # then the text stays whole, whatever string it completes
        may_stop = not ends and len(row.output) >= row.params.min_tokens
        stopped = row.text.push(token, may_stop=may_stop) if row.text is not None else None
        if ends:
            row.finish_reason, row.stop_reason = "stop", token
        elif stopped is not None:
            row.finish_reason, row.stop_reason = "stop", stopped
        elif len(row.tokens) >= row.limit:
            row.finish_reason = "length"
        if row.finish_reason is not None:
            break
    accepted = min(len(tokens) - 1, len(committed))
    row.rounds.append(Round(drafted=drafted, accepted=accepted, committed=len(committed)))
    return committed


def token_logprobs(logits_V: Tensor, token: int, top: int) -> TokenLogprobs:
    """Natural-log probabilities under unmodified logits, computed in fp32."""
    logprobs = logits_V.float().log_softmax(-1)
    best = logprobs.topk(min(top, len(logprobs))) if top else None
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best else ()
    return TokenLogprobs(token=token, logprob=float(logprobs[token]), top=tuple(pairs))
