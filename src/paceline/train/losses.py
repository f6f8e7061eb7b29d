"""Cross-entropy through a frozen head without keeping logits, and the block position weights.

Does not know drafters or data. Letters: T positions, V' head rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def position_weights(labels_RAk: Tensor, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for draft offsets k = 1.., 0 where the label is -100 (paper eq. 4)."""
    weights = torch.exp(-torch.arange(labels_RAk.shape[-1], device=labels_RAk.device) / gamma)
    return weights * (labels_RAk != -100)


Rule = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""`rule(part, q [t, V'])` -> each position's loss fp32 [t] and its slope by the logits [t, V'].

q, the drafter's probabilities, may be overwritten with the slope.
"""


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_TD: Tensor, head_VD: Tensor, weights_T: Tensor, rule: Rule, chunk: int
    ) -> Tensor:
        """Both loss and gradient in one pass: the head is frozen, so no logits need be kept."""
        grads = torch.empty_like(states_TD)
        loss = states_TD.new_zeros((), dtype=torch.float32)
        for at in range(0, len(states_TD), chunk):
            part = slice(at, at + chunk)
            q = (states_TD[part] @ head_VD.T).softmax(-1)  # fp32 inside, also for bf16
            each, slope = rule(part, q)
            loss = loss + (each * weights_T[part]).sum()
            grads[part] = (slope @ head_VD) * weights_T[part, None].to(head_VD.dtype)
        ctx.save_for_backward(grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        return grads * outputs[0].to(grads.dtype), None, None, None, None


def frozen_head_ce(
    states_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weights_T: Tensor, chunk: int = 512
) -> Tensor:
    """Weighted sum of cross-entropies, fp32 scalar; a label < 0 or a weight of 0 counts nothing.

    The caller divides the weights by their sum over all processes and micro-batches. Without any
    supervised position loss and gradient are zero (never NaN).
    """
    known = labels_T.clamp_min(0)

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        labels = known[part]
        at = (torch.arange(len(labels), device=labels.device), labels)
        chosen = q[at].float()
        q[at] = (chosen - 1).to(q.dtype)  # not scatter_: on a CPU that copies the whole matrix
        return -chosen.clamp_min(1e-37).log(), q

    return _frozen_head(states_TD, head_VD, weights_T * (labels_T >= 0), rule, chunk)


def frozen_head_distance(
    states_TD: Tensor,
    head_VD: Tensor,
    teacher_TD: Tensor,
    weights_T: Tensor,
    kind: str,
    chunk: int = 512,
) -> Tensor:
    """Weighted sum of distances to the target's distribution, fp32 scalar.

    ``teacher_TD`` are the states that the target's head saw for the same tokens; both laws are taken
    over the rows of ``head_VD`` (of a reduced vocabulary: given that the token is in it). ``kind`` is
    kl, KL(target || drafter), or tv, the total variation: one minus the chance that a sampled draft
    is accepted.
    """

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        p = (teacher_TD[part] @ head_VD.T).softmax(-1)
        if kind == "kl":
            each = (p * (p / q.clamp_min(1e-37)).clamp_min(1e-37).log()).float().sum(-1)
            return each, q - p
        each = (p - q).float().abs().sum(-1) / 2
        sign = (q - p).sign_() / 2
        return each, q * (sign - (q * sign).float().sum(-1, keepdim=True).to(q.dtype))

    return _frozen_head(states_TD, head_VD, weights_T, rule, chunk)


def _frozen_head(
    states_TD: Tensor, head_VD: Tensor, weights_T: Tensor, rule: Rule, chunk: int
) -> Tensor:
    # Positions of weight 0 stay in: matrix kernels are built per shape; dropping a few costs more.
    loss: Tensor = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        states_TD, head_VD, weights_T, rule, chunk
    )
    return loss


def leading_correct(
    states_TD: Tensor, head_VD: Tensor, labels_Bk: Tensor, chunk: int = 4096
) -> Tensor:
    """Length [B] of each block's leading run of right greedy drafts; states are [B * k, D]."""
    drafts = torch.cat([(part @ head_VD.T).max(-1).indices for part in states_TD.split(chunk)])
    return (drafts.view_as(labels_Bk) == labels_Bk).long().cumprod(-1).sum(-1)
