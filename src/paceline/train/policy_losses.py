"""On-policy distillation losses as rules of the frozen head: AdaFlash's and Draft-OPD's.

Does not know drafters, records or where a teacher's states come from. Letters: T positions, V' head rows,
D hidden width; p is the target's law, q the drafter's, both over the rows of the head.

Sources: AdaFlash, arXiv 2607.19223, and its code (mixture and clip); Draft-OPD, arXiv 2605.29343 (forward
KL on accepted drafts, decayed reverse KL on the rejected suffix), and its code (log-probabilities of
single tokens). Rules are used with `losses.frozen_head_loss`; softmax and logarithms are in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.losses import Rule

_TINY = 1e-37
_SURE = math.log1p(-1e-6)  # log-probabilities end here: log(1 - p) stays finite
_FLOOR = -10.0
_MOST = 10.0  # one token's loss, in the code's version


@dataclass
class Clipped:
    """How much a clip cut off, as a pair that may be summed: entries cut, entries looked at."""

    cut: float = 0.0
    total: float = 0.0

    @property
    def ratio(self) -> float:
        """The share that was cut; 0 without any."""
        return self.cut / self.total if self.total else 0.0


def adaflash_rule(
    teacher_TD: Tensor,
    head_VD: Tensor,
    *,
    alpha: float,
    temperature: float,
    clip: float,
    clip_mode: str,
    weight_sum: float,
    counted_T: Tensor,
    clipped: Clipped,
) -> Rule:
    """``alpha`` CE(argmax p) + ``(1 - alpha)`` t^2 KL(q_t || p_t), each position's; t the temperature.

    ``clip_mode`` is ``none``; ``repo``, which cuts a position's divergence at ``clip * weight_sum`` nats:
    the published code divides by the sum of all position weights before it clips; or ``vocab_entry``,
    which cuts every summand q log(q / p) at ``clip``. What is cut has no slope. ``clipped`` counts
    among the positions of ``counted_T`` (bool).
    """

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        logits = (teacher_TD[part] @ head_VD.T).float()
        labels = logits.argmax(-1)
        log_p = (logits / temperature).log_softmax(-1)
        law = q.float()
        log_q = law.clamp_min(_TINY).log()
        at = (torch.arange(len(labels), device=labels.device), labels)
        ce = -log_q[at]
        if temperature != 1:
            log_q = (log_q / temperature).log_softmax(-1)
        soft = log_q.exp()
        ratio = log_q - log_p
        counted = counted_T[part]
        if clip_mode == "vocab_entry":
            entries = soft * ratio
            cut = entries > clip
            each = entries.clamp_max(clip).sum(-1)
            ratio = (ratio + 1).masked_fill_(cut, 0)
            clipped.cut += float(cut[counted].sum())
            clipped.total += float(counted.sum()) * entries.shape[-1]
        else:
            each = (soft * ratio).sum(-1)
        slope = soft * (ratio - (soft * ratio).sum(-1, keepdim=True)) * temperature
        each = each * temperature**2
        if clip_mode == "repo":
            cut = each > clip * weight_sum
            each = each.clamp_max(clip * weight_sum)
            slope.masked_fill_(cut[:, None], 0)
            clipped.cut += float((cut & counted).sum())
            clipped.total += float(counted.sum())
        slope.mul_(1 - alpha).add_(law, alpha=alpha)
        slope[at] -= alpha
        return alpha * ce + (1 - alpha) * each, slope.to(q.dtype)

    return rule


def directed_rule(teacher_TD: Tensor, head_VD: Tensor, reverse_T: Tensor) -> Rule:
    """KL(p || q), and KL(q || p) where ``reverse_T`` (bool) says so.

    ``teacher_TD`` must have seen what a draft stood behind: in a rejected suffix, the drafts before it.
    """

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (teacher_TD[part] @ head_VD.T).float().log_softmax(-1)
        law, p = q.float(), log_p.exp()
        ratio = law.clamp_min(_TINY).log() - log_p
        forward = -(p * ratio).sum(-1)
        reverse = (law * ratio).sum(-1)
        slope = torch.where(reverse_T[part, None], law * (ratio - reverse[:, None]), law.sub(p))
        return torch.where(reverse_T[part], reverse, forward), slope.to(q.dtype)

    return rule


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """One token per position with the target's log-probability of it.

    ``kind`` is ``bernoulli``, KL(p || q) between "this token" and "another"; or ``k3``, an estimate
    of the divergence from that token alone, e^(t - s) - (t - s) - 1 with s = log q and t = log p.
    """

    ids_T: Tensor  # rows of the head; below 0 where there is none
    logprobs_T: Tensor  # fp32
    weights_T: Tensor  # fp32; these are the weights of the loss
    kind: str


def tokens_rule(streams: Sequence[TokenStream]) -> Rule:
    """The weighted sum of all streams' losses at each position, to be used with weights of 1.

    As Draft-OPD's code has it: in ``bernoulli`` log-probabilities are kept between -10 and just below 0;
    a token's loss is at most 10. Where a bound is reached there is no slope.
    """

    def rule(part: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        lines = torch.arange(len(q), device=q.device)
        each = q.new_zeros(len(q), dtype=torch.float32)
        total = torch.zeros_like(each)
        pulls = []
        for stream in streams:
            ids = stream.ids_T[part]
            weights = stream.weights_T[part] * (ids >= 0)
            ids = ids.clamp_min(0)
            s = q[lines, ids].float().clamp_min(_TINY).log()
            loss, slope = _token_loss(stream.kind, s, stream.logprobs_T[part])
            each = each + weights * loss
            pull = weights * slope
            total = total + pull
            pulls.append((ids, pull))
        q.mul_(-total[:, None].to(q.dtype))  # d log q[y] / d logits is onehot(y) - q
        for ids, pull in pulls:
            q[lines, ids] += pull.to(q.dtype)
        return each, q

    return rule


def _token_loss(kind: str, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and its slope by s = log q; t = log p."""
    if kind == "k3":
        gap = t - s
        loss = gap.exp() - gap - 1
        slope = 1 - gap.exp()
        inside = loss < _MOST
    else:
        inside = (s > _FLOOR) & (s < _SURE)
        s, t = s.clamp(_FLOOR, _SURE), t.clamp(_FLOOR, _SURE)
        p, q = t.exp(), s.exp()
        loss = p * (t - s) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))
        slope = (q - p) / (1 - q)
        inside = inside & (loss < _MOST)
    return loss.clamp_max(_MOST), torch.where(inside, slope, 0.0)
