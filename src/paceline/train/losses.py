"""Cross-entropy through a frozen head without keeping logits, and the block position weights.

Does not know drafters or data. Letters: T positions, V' head rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def frozen_head_loss(
    states_TD: Tensor, head_VD: Tensor, weights_T: Tensor, rule: Rule, chunk: int = 512
) -> Tensor:
    """Weighted sum of a rule's losses through the frozen head, fp32 scalar.

    The caller divides the weights by their sum over all processes and micro-batches. Without any
    weight loss and gradient are zero (never NaN).
    """
    # Positions of weight 0 stay in: matrix kernels are built per shape; dropping a few costs more.
    loss: Tensor = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        states_TD, head_VD, weights_T, rule, chunk
    )
    return loss


class _RefinedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_TD: Tensor,
        latents_PTr: Tensor,
        readout_Vr: Tensor,
        head_VD: Tensor,
        weights_T: Tensor,
        shares: Sequence[float],
        rule: Rule,
        chunk: int,
    ) -> Tensor:
        """The base logits are computed once for all passes, and their slopes go back together."""
        grads, latent_grads = torch.empty_like(states_TD), torch.empty_like(latents_PTr)
        readout_grads = torch.zeros_like(readout_Vr, dtype=torch.float32)
        loss = states_TD.new_zeros((), dtype=torch.float32)
        for at in range(0, len(states_TD), chunk):
            part = slice(at, at + chunk)
            base = states_TD[part] @ head_VD.T
            weight = weights_T[part]
            each, total = rule(part, base.softmax(-1))
            loss = loss + shares[0] * (each * weight).sum()
            total = total * (shares[0] * weight)[:, None].to(total.dtype)
            for p, share in enumerate(shares[1:]):
                latent = latents_PTr[p, part]
                each, slope = rule(part, torch.addmm(base, latent, readout_Vr.T).softmax(-1))
                loss = loss + share * (each * weight).sum()
                slope.mul_((share * weight)[:, None].to(slope.dtype))
                latent_grads[p, part] = slope @ readout_Vr
                readout_grads += slope.T @ latent
                total += slope
            grads[part] = total @ head_VD
        ctx.save_for_backward(grads, latent_grads, readout_grads.to(readout_Vr.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        found = (grads * outputs[0].to(grads.dtype) for grads in ctx.saved_tensors)
        return (*found, None, None, None, None, None)


def refined_head_loss(
    states_TD: Tensor,
    latents_PTr: Tensor,
    readout_Vr: Tensor,
    head_VD: Tensor,
    weights_T: Tensor,
    shares: Sequence[float],
    rule: Rule,
    chunk: int = 128,
) -> Tensor:
    """Weighted sum of a rule's losses of base logits and of P refined ones, fp32 scalar.

    Logits of pass p are ``states @ head' + latents[p] @ readout'``; ``shares`` weighs the base logits'
    loss first, then each pass's. Gradients reach states, latents and readout; the head is frozen.
    """
    loss: Tensor = _RefinedHead.apply(  # type: ignore[no-untyped-call]
        states_TD, latents_PTr, readout_Vr, head_VD, weights_T, shares, rule, chunk
    )
    return loss


def ce_rule(labels_T: Tensor) -> Rule:
    """Cross-entropy of labels, which index the head's rows; a label < 0 needs a weight of 0."""
    known = labels_T.clamp_min(0)

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        labels = known[part]
        at = (torch.arange(len(labels), device=labels.device), labels)
        chosen = q[at].float()
        q[at] = (chosen - 1).to(q.dtype)  # not scatter_: on a CPU that copies the whole matrix
        return -chosen.clamp_min(1e-37).log(), q

    return rule


def distance_rule(teacher_TD: Tensor, head_VD: Tensor, kind: str) -> Rule:
    """Distances to the target's distribution: ``kind`` is kl, KL(target || drafter), or tv, the total
    variation: one minus the chance that a sampled draft is accepted.

    ``teacher_TD`` are the states that the target's head saw for the same tokens; both laws are taken
    over the rows of ``head_VD`` (of a reduced vocabulary: given that the token is in it).
    """
    kept: list[tuple[slice, Tensor]] = []  # several passes ask for the same part

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        if not kept or kept[0][0] != part:
            kept[:] = [(part, (teacher_TD[part] @ head_VD.T).softmax(-1))]
        p = kept[0][1]
        if kind == "kl":
            each = (p * (p / q.clamp_min(1e-37)).clamp_min(1e-37).log()).float().sum(-1)
            return each, q - p
        d = q - p
        each = d.abs().sum(-1, dtype=torch.float32) / 2
        sign = d.sign_()
        mean = (q * sign).sum(-1, keepdim=True, dtype=torch.float32).to(q.dtype)
        return each, sign.sub_(mean).mul_(q).mul_(0.5)

    return rule


def mixed_rule(first: Rule, second: Rule, share: float) -> Rule:
    """``(1 - share) first + share second``."""

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        second_each, second_slope = second(part, q)  # does not write to q
        each, slope = first(part, q)
        slope = slope.mul_(1 - share).add_(second_slope, alpha=share)
        return (1 - share) * each + share * second_each, slope

    return rule


def frozen_head_ce(
    states_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weights_T: Tensor, chunk: int = 512
) -> Tensor:
    """Weighted sum of cross-entropies, fp32 scalar; a label < 0 or a weight of 0 counts nothing."""
    weights = weights_T * (labels_T >= 0)
    return frozen_head_loss(states_TD, head_VD, weights, ce_rule(labels_T), chunk)


def frozen_head_distance(
    states_TD: Tensor,
    head_VD: Tensor,
    teacher_TD: Tensor,
    weights_T: Tensor,
    kind: str,
    chunk: int = 512,
) -> Tensor:
    """Weighted sum of distances to the target's distribution (`distance_rule`), fp32 scalar."""
    rule = distance_rule(teacher_TD, head_VD, kind)
    return frozen_head_loss(states_TD, head_VD, weights_T, rule, chunk)


def leading_run(right_nk: Tensor) -> Tensor:
    """Length [n] of the leading run of right drafts of each block."""
    return right_nk.long().cumprod(-1).sum(-1)
