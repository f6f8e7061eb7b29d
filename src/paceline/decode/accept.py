"""The accept rules: which drafts are kept, and the bonus token that follows them.

Knows nothing about logits, models or text; it sees drafts and distributions only.

Both leave the target's distribution exactly as it was. ``match`` is legal for any draft; with the
same seed its replies equal plain decoding token for token. ``rejection`` (speculative sampling,
Leviathan et al. 2023) needs the exact law each draft was sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.core import Draft, Law, Row, Verdict
from paceline.decode.warp import inverse_cdf


def match(draft: Draft, law: Law, rows: Sequence[Row]) -> Verdict:
    """Draw the target's token at each node and walk to the child that carries it.

    On a miss that very sample is the bonus token; drawing again would bias the output.
    """
    all_tokens, all_parents = draft.tokens_BN.tolist(), draft.parents_BN.tolist()
    uniforms: list[float] = []
    for row, size, parents in zip(rows, draft.sizes_B, all_parents, strict=True):
        if row.params.temperature == 0:  # a one-hot law needs no number
            uniforms += [0.0] * (size + 1)
            continue
        depths = [0]
        for parent in parents[:size]:
            depths.append(depths[parent + 1] + 1)
        uniforms += [row.noise.uniform("target", len(row.tokens) + depth) for depth in depths]
    drawn = law.sample(uniforms)
    tokens, paths, first = [], [], 0
    for b, size in enumerate(draft.sizes_B):
        children = {
            (parent, token): node
            for node, (parent, token) in reversed(
                list(enumerate(zip(all_parents[b][:size], all_tokens[b][:size], strict=True)))
            )
        }
        path: list[int] = []
        node = -1
        while True:
            token = drawn[first + node + 1]
            if token < 0:
                law.probs(first + node + 1)  # raises: this node has no distribution
            child = children.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        tokens.append([all_tokens[b][n] for n in path] + [token])
        paths.append(path)
        first += size + 1
    return Verdict(tokens=tokens, paths=paths)


def rejection(draft: Draft, law: Law, rows: Sequence[Row]) -> Verdict:
    """Accept draft d with probability min(1, p(d) / q(d)); else draw from (p - q)+ and stop.

    Raises ValueError for a draft without its law, or one that is not a chain.
    """
    if draft.probs_BNV is None and any(draft.sizes_B):
        raise ValueError("rejection needs drafts with their exact law; use accept='match'")
    if any(
        parents[:size] != list(range(-1, size - 1))
        for parents, size in zip(draft.parents_BN.tolist(), draft.sizes_B, strict=True)
    ):
        raise ValueError("rejection is exact for chains only; use accept='match' for trees")
    tokens, paths, first = [], [], 0
    for b, (row, size) in enumerate(zip(rows, draft.sizes_B, strict=True)):
        accepted: list[int] = []
        bonus = None
        for node, token in enumerate(draft.tokens_BN[b].tolist()[:size]):
            assert draft.probs_BNV is not None
            p, q = law.probs(first + node), draft.probs_BNV[b, node].float()
            place = len(row.tokens) + node
            if row.noise.uniform("accept", place) * float(q[token]) < float(p[token]):
                accepted.append(token)
                continue
            residual = (p - q.to(p.device)).clamp_min_(0)
            mass = float(residual.sum())
            if math.isnan(mass):
                raise ValueError(f"request {row.request}: the drafter's law holds NaN")
            law_of_bonus = residual if mass > 0 else p
            bonus = inverse_cdf(law_of_bonus[None], [row.noise.uniform("target", place)])[0]
            break
        if bonus is None:
            place = len(row.tokens) + size
            last = law.probs(first + size)[None]
            bonus = inverse_cdf(last, [row.noise.uniform("target", place)])[0]
        tokens.append(accepted + [bonus])
        paths.append(list(range(len(accepted))))
        first += size + 1
    return Verdict(tokens=tokens, paths=paths)


def draw(probs_NV: torch.Tensor, row: Row, first_position: int) -> list[int]:
    """Draft tokens sampled from a drafter's laws, by the row's own "draft" numbers."""
    numbers = [row.noise.uniform("draft", first_position + i) for i in range(len(probs_NV))]
    return inverse_cdf(probs_NV, numbers)
