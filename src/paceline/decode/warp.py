"""Turns logits into target distributions: temperature, cuts, penalties, bias, constraints.

Knows nothing about models, drafters or accept rules; it is the one place where sampling
parameters act.

Order of effects at a node: repetition penalty, presence and frequency penalties, logit_bias,
min_tokens, logits_processors, temperature, top_k, top_p, min_p. Whatever depends on earlier
tokens sees the node's own path: prompt, output and the draft tokens from the root to the node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core import Draft, Row, SamplingParams


class TargetLaw:
    """Distributions of T packed nodes. A greedy node is one-hot and is stored as its index."""

    def __init__(self, points: list[int], dense: dict[int, Tensor], vocab: int, like: Tensor):
        self._points, self._dense, self._vocab, self._like = points, dense, vocab, like

    def sample(self, uniforms: Sequence[float]) -> list[int]:
        """One token per node: the first whose cumulative probability exceeds the number."""
        tokens = list(self._points)
        if self._dense:
            nodes = list(self._dense)
            probs = torch.stack([self._dense[node] for node in nodes])
            drawn = inverse_cdf(probs, [uniforms[node] for node in nodes])
            for node, token in zip(nodes, drawn, strict=True):
                tokens[node] = token
        return tokens

    def probs(self, node: int) -> Tensor:
        """The dense distribution [V] of one node, fp32."""
        if node in self._dense:
            return self._dense[node]
        out = torch.zeros(self._vocab, dtype=torch.float32, device=self._like.device)
        out[self._points[node]] = 1.0
        return out


def inverse_cdf(probs_TV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draw one token per row; a token of probability 0 is never returned."""
    cumulative = probs_TV.double().cumsum(-1)
    drawn = torch.tensor(uniforms, dtype=torch.float64, device=probs_TV.device)
    level = drawn[:, None] * cumulative[:, -1:]
    tokens: list[int] = torch.searchsorted(cumulative, level, right=True).flatten().tolist()
    return tokens


def warp(logits_TV: Tensor, draft: Draft, rows: Sequence[Row]) -> TargetLaw:
    """Target distributions of every row's root and draft nodes, rows behind one another.

    Raises ValueError naming the request when a row's logits are NaN or leave no token possible.
    """
    logits = logits_TV.float()
    points: list[int] = []
    dense: dict[int, Tensor] = {}
    first = 0
    plain = all(is_plain(row.params, len(row.output)) for row in rows)
    changed = logits if plain else _change(logits, draft, rows)
    top = changed.max(-1)
    points = top.indices.tolist()
    values = top.values.tolist()
    for row, size in zip(rows, draft.sizes_B, strict=True):
        for value in values[first : first + size + 1]:
            if value != value or value == float("-inf"):
                raise ValueError(
                    f"request {row.request}: the target's logits are NaN, or its sampling "
                    "parameters leave no token possible"
                )
        if row.params.temperature > 0:
            probs = shape_probs(changed[first : first + size + 1], row.params)
            dense.update({first + node: probs[node] for node in range(size + 1)})
        first += size + 1
    return TargetLaw(points, dense, logits.shape[-1], logits)


def is_plain(params: SamplingParams, emitted: int) -> bool:
    """Whether nothing besides temperature and cuts changes this row's logits."""
    return not (
        params.has_penalties
        or params.logit_bias
        or params.logits_processors
        or emitted < params.min_tokens
    )


def shape_probs(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top_k, top_p, min_p, then softmax in fp32 [N, V]; at least one token stays.

    Temperature must be above 0. Drafters that sample use it for their own law, too.
    """
    scores = logits_NV.float() / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if params.top_p < 1.0:
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ranked.softmax(-1)
        cut = mass.cumsum(-1) - mass >= params.top_p
        cut[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), float("-inf"))
    probs = scores.softmax(-1)
    if params.min_p > 0.0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _change(logits: Tensor, draft: Draft, rows: Sequence[Row]) -> Tensor:
    """Apply everything that looks at tokens, node by node, for the rows that ask for it."""
    logits = logits.clone()
    first = 0
    for b, (row, size) in enumerate(zip(rows, draft.sizes_B, strict=True)):
        if not is_plain(row.params, len(row.output)):
            parents = draft.parents_BN[b].tolist()[:size]
            tokens = draft.tokens_BN[b].tolist()[:size]
            paths: list[list[int]] = [[]]
            for parent, token in zip(parents, tokens, strict=True):
                paths.append(paths[parent + 1] + [token])
            for node, path in enumerate(paths):
                logits[first + node] = _change_node(logits[first + node], row, path)
        first += size + 1
    return logits


def _change_node(logits_V: Tensor, row: Row, path: list[int]) -> Tensor:
    params = row.params
    history, output = row.tokens + path, row.output + path
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(history)), device=logits_V.device)
        old = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if params.presence_penalty or params.frequency_penalty:
        index = torch.tensor(output, dtype=torch.int64, device=logits_V.device)
        counts = torch.bincount(index, minlength=len(logits_V)).to(logits_V.dtype)
        logits_V = logits_V - params.presence_penalty * (counts > 0)
        logits_V = logits_V - params.frequency_penalty * counts
    for token, bias in (params.logit_bias or {}).items():
        logits_V[token] += bias
    if len(output) < params.min_tokens and row.stop_ids:
        logits_V[sorted(row.stop_ids)] = float("-inf")
    for processor in params.logits_processors:
        ids = torch.tensor([history], device=logits_V.device)
        logits_V = processor(ids, logits_V[None])[0]
    return logits_V
