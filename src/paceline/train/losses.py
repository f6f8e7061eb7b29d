"""Cross-entropy through a frozen head without keeping logits, and the block position weights.

Does not know drafters or data. Letters: T positions, V' head rows, D hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def position_weights(labels_RAk: Tensor, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for draft offsets k = 1.., 0 where the label is -100 (paper eq. 4)."""
    weights = torch.exp(-torch.arange(labels_RAk.shape[-1], device=labels_RAk.device) / gamma)
    return weights * (labels_RAk != -100)


class _FrozenHeadCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_TD: Tensor,
        head_VD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        chunk: int,
    ) -> Tensor:
        """Both loss and gradient in one pass: the head is frozen, so no logits need be kept."""
        grads = torch.empty_like(states_TD)
        loss = states_TD.new_zeros((), dtype=torch.float32)
        for at in range(0, len(states_TD), chunk):
            part = slice(at, at + chunk)
            labels, weights = labels_T[part], weights_T[part, None]
            slope = (states_TD[part] @ head_VD.T).softmax(-1)  # fp32 inside, also for bf16
            chosen = slope.gather(1, labels[:, None]).float()
            loss = loss - (chosen.clamp_min(1e-37).log() * weights).sum()
            # Not scatter_: on a CPU it copies the whole bf16 matrix.
            slope[torch.arange(len(labels), device=labels.device), labels] = (
                (chosen - 1).to(slope.dtype).squeeze(1)
            )
            grads[part] = (slope @ head_VD) * weights.to(head_VD.dtype)
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
    # Positions of weight 0 stay in: matrix kernels are built per shape; dropping a few costs more.
    loss: Tensor = _FrozenHeadCE.apply(  # type: ignore[no-untyped-call]
        states_TD, head_VD, labels_T.clamp_min(0), weights_T * (labels_T >= 0), chunk
    )
    return loss


def leading_correct(
    states_TD: Tensor, head_VD: Tensor, labels_Bk: Tensor, chunk: int = 4096
) -> Tensor:
    """Length [B] of each block's leading run of right greedy drafts; states are [B * k, D]."""
    drafts = torch.cat([(part @ head_VD.T).max(-1).indices for part in states_TD.split(chunk)])
    return (drafts.view_as(labels_Bk) == labels_Bk).long().cumprod(-1).sum(-1)
