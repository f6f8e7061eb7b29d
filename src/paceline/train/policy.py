"""What a batch is supervised with: labels and weights of its positions, by the loss that is trained.

Does not know optimisers, files or where rows come from. Letters: R rows, A anchors per row, k = b - 1
drafts, T = R * A * k positions, D hidden width.

Sources: DFlash, arXiv 2602.06036, section 4.2 (weights that decay along the block); AdaFlash, arXiv
2607.19223; Draft-OPD, arXiv 2605.29343, and its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.train.blocks import Blocks
from paceline.train.config import FRESH_WEIGHT, TrainConfig
from paceline.train.features import FeatureRow
from paceline.train.losses import Rule, ce_rule, distance_rule, mixed_rule, position_weights
from paceline.train.policy_losses import (
    Clipped,
    TokenStream,
    adaflash_rule,
    directed_rule,
    tokens_rule,
)
from paceline.train.rounds import Rounds
from paceline.train.suffixes import Branch, teacher_states
from paceline.train.trainee import Head, Trainee


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Labels and weights [R, A, k] of some rows' blocks; each kind of weight sums to 1 over the step.

    ``rejected_RAk`` are the weights of rejected drafts, where the loss looks at them: at the correction's
    slot both may stand. ``weight_sum`` is the whole step's sum before the division.
    """

    labels_RAk: Tensor  # rows of the head, below 0 where there is none
    weights_RAk: Tensor
    blocks_RA: Tensor  # weights of whole blocks, also of those whose first word no draft can be
    weight_sum: float
    rejected_RAk: Tensor | None = None
    rounds: Rounds | None = None
    clipped: Clipped = field(default_factory=Clipped)

    def take(self, rows: Sequence[int], *, weigh: bool = True) -> Supervised:
        """Some of the rows; not ``weigh``: their weights are 0. What is clipped counts for all."""
        at = list(rows)
        rejected = self.rejected_RAk
        return replace(
            self,
            labels_RAk=self.labels_RAk[at],
            weights_RAk=self.weights_RAk[at] * weigh,
            blocks_RA=self.blocks_RA[at] * weigh,
            rejected_RAk=None if rejected is None else rejected[at] * weigh,
            rounds=None if self.rounds is None else self.rounds.take(at),
        )

    @property
    def total_RAk(self) -> Tensor:
        """All weight at each position."""
        weights = self.weights_RAk
        return weights if self.rejected_RAk is None else weights + self.rejected_RAk


def supervise(
    config: TrainConfig,
    head: Head,
    blocks: Blocks,
    rounds: Rounds | None = None,
    *,
    gamma: float | None = None,
    widened_from: int | None = None,
) -> Supervised:
    """Supervision of all blocks of a step; ``rounds`` are needed for the losses of judged drafts.

    ``gamma`` is this step's decay (None: the config's). With ``widened_from`` there is none: slots below
    it weigh 1, fresh ones `FRESH_WEIGHT`.
    """
    labels, keep = head.labels(blocks), blocks.keep_RA[..., None]
    whole_RA = (blocks.keep_RA & (blocks.labels_RAk[..., 0] >= 0)).float()
    whole_RA /= whole_RA.sum().clamp_min(1)
    if not config.loss.startswith("draft_opd"):
        if widened_from is None:
            weights = position_weights(labels, config.gamma if gamma is None else gamma) * keep
        else:
            weights = step_weights(labels, widened_from) * keep
        total = weights.sum()
        return Supervised(
            labels_RAk=labels,
            weights_RAk=weights / total.clamp_min(1e-9),
            blocks_RA=whole_RA,
            weight_sum=float(total),
            rounds=rounds,
        )
    assert rounds is not None
    how = config.distil
    decay = how.decay ** torch.arange(labels.shape[-1])
    first = (rounds.accepted_RAk & keep).float()
    second = (rounds.rejected_RAk & keep) * decay
    if config.loss == "draft_opd":  # the mean of two means
        whole = how.accepted + how.rejected
        first = how.accepted / whole * first / first.sum().clamp_min(1e-9)
        second = how.rejected / whole * second / second.sum().clamp_min(1e-9)
        total = torch.ones(())
    else:  # pooled by token, the correction among the committed ones
        known = (rounds.accepted_RAk | rounds.corrected_RAk) & (labels >= 0) & keep
        said = head.to_draft[rounds.proposals_RAk.clamp_min(0)] >= 0
        first, second = how.accepted * known.float(), how.rejected * second * said
        total = first.sum() + second.sum()
        first, second = (part / total.clamp_min(1e-9) for part in (first, second))
    return Supervised(
        labels_RAk=labels,
        weights_RAk=first,
        blocks_RA=whole_RA,
        weight_sum=float(total),
        rejected_RAk=second,
        rounds=rounds,
    )


def step_weights(labels_RAk: Tensor, widened_from: int) -> Tensor:
    """Flat step: 1 for the drafts of the old block, `FRESH_WEIGHT` for those behind; 0 without a label.

    Source: DBloom, arXiv 2608.30427, section on the loss shape.
    """
    weights = torch.ones(labels_RAk.shape[-1])
    weights[widened_from - 1 :] = FRESH_WEIGHT
    return weights * (labels_RAk >= 0)


def make_rule(
    config: TrainConfig, given: Supervised, head: Head, teacher_TD: Tensor | None
) -> tuple[Rule, Tensor]:
    """The rule of the configured loss and the weights [T] to use it with."""
    device, how = head.rows_VD.device, config.distil
    labels, weights = (part.flatten().to(device) for part in (given.labels_RAk, given.total_RAk))
    if config.loss == "draft_opd_code":
        return tokens_rule(_streams(given, head)), torch.ones_like(weights)
    if teacher_TD is None:
        return ce_rule(labels), weights
    if config.refiner is not None:
        distance = distance_rule(teacher_TD, head.rows_VD, "tv")
        return mixed_rule(ce_rule(labels), distance, config.refiner.tv), weights
    if config.loss == "adaflash":
        rule = adaflash_rule(
            teacher_TD,
            head.rows_VD,
            alpha=how.alpha,
            temperature=how.temperature,
            clip=how.clip,
            clip_mode=how.clip_mode,
            weight_sum=given.weight_sum,
            counted_T=weights > 0,
            clipped=given.clipped,
        )
        return rule, weights
    if config.loss == "draft_opd":
        assert given.rejected_RAk is not None
        rejected = given.rejected_RAk.flatten().to(device) > 0
        accepted_reverse, rejected_reverse = (way == "reverse" for way in how.directions)
        reverse = rejected & rejected_reverse | ~rejected & accepted_reverse
        return directed_rule(teacher_TD, head.rows_VD, reverse), weights
    return distance_rule(teacher_TD, head.rows_VD, config.loss), weights


def _streams(given: Supervised, head: Head) -> list[TokenStream]:
    rounds, rejected = given.rounds, given.rejected_RAk
    assert rounds is not None and rejected is not None
    drafts = head.to_draft[rounds.proposals_RAk.clamp_min(0)]
    parts = (
        ("bernoulli", given.labels_RAk, rounds.committed_logprobs_RAk, given.weights_RAk),
        ("k3", drafts, rounds.proposal_logprobs_RAk, rejected),
    )
    device = head.rows_VD.device
    return [
        TokenStream(
            ids_T=ids.flatten().to(device),
            logprobs_T=said.flatten().to(device),
            weights_T=weights.flatten().to(device),
            kind=kind,
        )
        for kind, ids, said, weights in parts
    ]


def judged_teacher(
    trainee: Trainee, rows: Sequence[FeatureRow], blocks: Blocks, rounds: Rounds
) -> Tensor:
    """States [T, D] that the target's head sees for each judged draft, given the drafts before it."""
    assert trainee.frozen is not None
    k = blocks.block_size - 1
    out = torch.zeros(*blocks.labels_RAk.shape, trainee.shape.hidden_size, dtype=trainee.dtype)
    out = out.to(trainee.ranks.device)
    for r, item in enumerate(rows):
        kept = blocks.keep_RA[r].nonzero().flatten().tolist()
        order = sorted(kept, key=lambda a: int(blocks.anchors_RA[r, a]))
        branches = [_branch(blocks, rounds, r, a) for a in order]
        if branches:
            states = teacher_states(trainee.frozen, item.row.tokens.tolist(), branches, k)
            out[r, order] = states.to(out)
    return out.flatten(0, 2)


def _branch(blocks: Blocks, rounds: Rounds, r: int, a: int) -> Branch:
    """A block's judged drafts; where there was no round, the accepted run that was moved there."""
    proposals = [token for token in rounds.proposals_RAk[r, a].tolist() if token >= 0]
    rejected = rounds.rejected_RAk[r, a]
    accepted = int(rejected.int().argmax()) if bool(rejected.any()) else len(proposals)
    if not proposals:
        accepted = int(rounds.accepted_RAk[r, a].sum())
        proposals = blocks.labels_RAk[r, a, :accepted].tolist()
    return Branch(anchor=int(blocks.anchors_RA[r, a]), accepted=accepted, proposals=proposals)
