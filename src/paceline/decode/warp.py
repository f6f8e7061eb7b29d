"""Turns logits into target distributions: temperature, cuts, penalties, bias, constraints.

Knows nothing about models, drafters or accept rules; it is the one place where sampling
parameters act.

Order of effects at a node: repetition penalty, presence and frequency penalties, logit_bias,
min_tokens, logits_processors, temperature, top_k, top_p, min_p. Whatever depends on earlier
tokens sees the node's own path: prompt, output and the draft tokens from the root to the node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.core import Draft, Row, SamplingParams

_CHUNK = 256  # of scores, in `top`


class TargetLaw:
    """Distributions of T packed nodes. A greedy node is one-hot and is stored as its index.

    ``dense_SV`` holds the sampled nodes only; ``nodes_S`` says which packed nodes they are.
    ``faults`` are nodes without a distribution: behind a draft that can never be accepted a
    constraint may leave no token. They are an error only if an accept rule arrives there.
    """

    def __init__(
        self,
        points_T: list[int],
        nodes_S: list[int],
        dense_SV: Tensor,
        faults: Mapping[int, Exception] | None = None,
    ) -> None:
        self._points_T, self._nodes_S, self._dense_SV = points_T, nodes_S, dense_SV
        self._place = {node: place for place, node in enumerate(nodes_S)}
        self._faults = dict(faults or {})

    def sample(self, uniforms: Sequence[float]) -> list[int]:
        """One token per node: the first whose cumulative probability exceeds the number.

        -1 at a node without a distribution; ``probs`` of that node says why.
        """
        tokens = [-1 if i in self._faults else point for i, point in enumerate(self._points_T)]
        drawn = inverse_cdf(self._dense_SV, [uniforms[node] for node in self._nodes_S])
        for node, token in zip(self._nodes_S, drawn, strict=True):
            tokens[node] = token
        return tokens

    def probs(self, node: int) -> Tensor:
        """The dense distribution [V] of one node, fp32. Raises if the node has none."""
        if node in self._faults:
            raise self._faults[node]
        if node in self._place:
            return self._dense_SV[self._place[node]]
        out = self._dense_SV.new_zeros(self._dense_SV.shape[-1])
        out[self._points_T[node]] = 1.0
        return out


def inverse_cdf(probs_TV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draw one token per row; a token of probability 0 is never returned."""
    cumulative = probs_TV.double().cumsum(-1)
    drawn = torch.tensor(uniforms, dtype=torch.float64, device=probs_TV.device)
    level = drawn[:, None] * cumulative[:, -1:]
    tokens: list[int] = torch.searchsorted(cumulative, level, right=True).flatten().tolist()
    return tokens


def top(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Largest values and their indices along the last axis: the first of equals, NaN before all others.

    As `Tensor.max(-1)`, which on CPUs looks at one number at a time; maxima of chunks do not, and only
    the winning chunk is searched.
    """
    width = scores.shape[-1]
    if width % _CHUNK:
        whole = scores.max(-1)
        return whole.values, whole.indices
    chunks = scores.unflatten(-1, (width // _CHUNK, _CHUNK))
    chunk = chunks.amax(-1).max(-1).indices
    won = chunks.take_along_dim(chunk[..., None, None], -2).squeeze(-2).max(-1)
    return won.values, won.indices + chunk * _CHUNK


def warp(logits_TV: Tensor, draft: Draft, rows: Sequence[Row]) -> TargetLaw:
    """Target distributions of every row's root and draft nodes, rows behind one another.

    Raises ValueError naming the request when the logits at a root are NaN or leave no token
    possible; at a draft node that is an error only once the node is reached (`TargetLaw`).
    """
    changed, faults = logits_TV.float(), dict[int, Exception]()
    if not all(is_plain(row.params, len(row.output)) for row in rows):
        changed = _change(changed, draft, rows, faults)
    highest, likeliest = top(changed)
    levels = highest.tolist()
    groups: dict[SamplingParams, list[int]] = {}
    first = 0
    for row, size in zip(rows, draft.sizes_B, strict=True):
        for node in range(first, first + size + 1):
            if not math.isfinite(levels[node]):
                text = (
                    f"request {row.request}: the target's logits are NaN or infinite, or its "
                    "sampling parameters leave no token possible"
                )
                faults.setdefault(node, ValueError(text))
        if first in faults:
            raise faults[first]
        if row.params.temperature > 0:
            sound = [node for node in range(first, first + size + 1) if node not in faults]
            groups.setdefault(_cuts(row.params), []).extend(sound)
        first += size + 1
    # Rows that share temperature and cuts are shaped together: calls per setting, not per row.
    dense = [shape_probs(changed[nodes], params) for params, nodes in groups.items()]
    nodes_S = [node for nodes in groups.values() for node in nodes]
    return TargetLaw(likeliest.tolist(), nodes_S, torch.cat([changed[:0], *dense]), faults)


def _cuts(params: SamplingParams) -> SamplingParams:
    """The part of the parameters that ``shape_probs`` reads, as a key."""
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )


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
    scores = logits_NV.float()
    # Relative to the maximum, a tiny temperature underflows to one-hot instead of inf - inf.
    scores = (scores - scores.amax(-1, keepdim=True)) / params.temperature
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


def _change(
    logits: Tensor, draft: Draft, rows: Sequence[Row], faults: dict[int, Exception]
) -> Tensor:
    """Apply everything that looks at tokens, node by node, for the rows that ask for it.

    A processor may refuse a path that the target would never take: noted in ``faults``.
    """
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
                try:
                    logits[first + node] = _change_node(logits[first + node], row, path)
                except Exception as error:
                    if not path:
                        raise
                    faults[first + node] = error
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
