"""The loss of a batch of blocks: of the drafter, of a refiner with it, of a length head behind them.

Does not know optimisers, files or where rows and anchors come from. Letters: R rows, A anchors per row,
b block size, k = b - 1 drafts, n = R * A blocks, T = n * k draft positions, D hidden width, r rank of a
refiner, V' head rows.

Sources: DFlash, arXiv 2602.06036, section 4.2; xPress, arXiv 2608.02438 (teacher-forced, free-running and
base terms); AdaFlash, arXiv 2607.19223 (length labels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.dflash import DFlashModule
from paceline.train.blocks import Blocks
from paceline.train.config import Refiner, TrainConfig
from paceline.train.features import FeatureRow
from paceline.train.losses import Rule, frozen_head_loss, leading_run, refined_head_loss
from paceline.train.policy import Supervised, judged_teacher, make_rule
from paceline.train.trainee import Head, Trainee


def batch_loss(
    config: TrainConfig,
    trainee: Trainee,
    rows: Sequence[FeatureRow],
    blocks: Blocks,
    head: Head,
    supervised: Supervised,
) -> Tensor:
    """The weighted loss of some rows' blocks, fp32 scalar; ``supervised`` is of the same rows."""
    device = trainee.ranks.device
    features, teacher = trainee.inputs(rows, blocks, config.needs_teacher)
    if config.loss == "draft_opd":
        assert supervised.rounds is not None
        teacher = judged_teacher(trainee, rows, blocks, supervised.rounds)
    prev = previous_ids(rows, blocks).to(device)

    def finish(states_nbD: Tensor, drafter: DFlashModule) -> Tensor:
        """Runs inside the module's forward, so that sharded and shared masters are at hand."""
        drafts = states_nbD[:, 1:].flatten(0, 1)
        loss = drafts.new_zeros((), dtype=torch.float32)
        refined = None if config.refiner is None else refiner_of(drafter, config.refiner.kind)
        if not config.heads_only:
            rule, weights = make_rule(config, supervised, head, teacher)
            if refined is None:
                loss = frozen_head_loss(drafts, head.rows_VD, weights, rule)
            else:
                assert config.refiner is not None
                loss = _refined_loss(config.refiner, refined, states_nbD, head, prev, weights, rule)
        if config.length_head is not None:
            labels = supervised.labels_RAk.flatten(0, 1).to(device)
            right = best_drafts(states_nbD, head, prev, refined) == labels
            weights = supervised.blocks_RA.flatten().to(device)
            loss = loss + _length_loss(drafter, states_nbD, leading_run(right), weights)
        return loss

    loss: Tensor = trainee.model(blocks, features, finish)
    return loss


def previous_ids(rows: Sequence[FeatureRow], blocks: Blocks) -> Tensor:
    """Target ids [n, b] of the token before each slot, as the text has them; zeros past its end."""
    before = torch.arange(-1, blocks.block_size - 1)
    lines = []
    for item, anchors in zip(rows, blocks.anchors_RA, strict=True):
        tokens = torch.from_numpy(item.row.tokens).long()
        at = anchors[:, None] + before
        known = tokens[at.clamp(0, len(tokens) - 1)]
        lines.append(known.where(at < len(tokens), 0))
    return torch.cat(lines)


def refiner_of(drafter: DFlashModule, kind: str) -> Any:
    """The drafter's bias head of that kind."""
    return drafter.get_submodule(f"{kind}_head")


def _refined_loss(
    settings: Refiner,
    refiner: Any,
    states_nbD: Tensor,
    head: Head,
    prev_nb: Tensor,
    weights_T: Tensor,
    rule: Rule,
) -> Tensor:
    """Base, teacher-forced and free-running terms; no gradient flows from a sweep to the one before."""
    fixed = refiner.fixed(states_nbD, states_nbD.mean(1))
    readout = head.readout(refiner)
    latents = [refiner.latent(fixed, prev_nb)[:, 1:].flatten(0, 1)]
    tokens = None
    for _ in range(settings.free_sweeps):
        tokens = _best(states_nbD, head, None if tokens is None else (latents[-1], readout))
        own = torch.cat((prev_nb[:, :2], head.ids_V[tokens[:, :-1]]), dim=1)
        latents.append(refiner.latent(fixed, own)[:, 1:].flatten(0, 1))
    each = settings.consistency / max(1, settings.free_sweeps)
    shares = [settings.base, 1.0, *[each] * settings.free_sweeps]
    drafts = states_nbD[:, 1:].flatten(0, 1)
    return refined_head_loss(
        drafts, torch.stack(latents), readout, head.rows_VD, weights_T, shares, rule
    )


@torch.no_grad()
def _best(
    states_nbD: Tensor, head: Head, bias: tuple[Tensor, Tensor] | None, chunk: int = 2048
) -> Tensor:
    """The most probable head rows [n, k]; ``bias`` are latents [T, r] and the readout [V', r]."""
    flat, found = states_nbD[:, 1:].flatten(0, 1), []
    for at in range(0, len(flat), chunk):
        logits = flat[at : at + chunk] @ head.rows_VD.T
        if bias is not None:
            logits = logits.addmm_(bias[0][at : at + chunk], bias[1].T)
        found.append(logits.max(-1).indices)
    return torch.cat(found).view(len(states_nbD), -1)


@torch.no_grad()
def best_drafts(
    states_nbD: Tensor, head: Head, prev_nb: Tensor, refiner: Any, sweeps: int | None = None
) -> Tensor:
    """What would be drafted greedily, as head rows [n, k]; only ``prev_nb[:, :2]`` is looked at.

    As the refine stage does it: sweeps until nothing changes, at most ``sweeps``; None: as many as make
    it the walk through the block.
    """
    tokens = _best(states_nbD, head, None)
    if refiner is None:
        return tokens
    fixed, readout = refiner.fixed(states_nbD, states_nbD.mean(1)), head.readout(refiner)
    limit = tokens.shape[1] if refiner.walks or sweeps is None else sweeps
    for _ in range(limit):
        own = torch.cat((prev_nb[:, :2], head.ids_V[tokens[:, :-1]]), dim=1)
        latents = refiner.latent(fixed, own)[:, 1:].flatten(0, 1)
        new = _best(states_nbD, head, (latents, readout))
        if torch.equal(new, tokens):
            break
        tokens = new
    return tokens


def _length_loss(
    drafter: DFlashModule, states_nbD: Tensor, runs_n: Tensor, weights_n: Tensor
) -> Tensor:
    """Weighed squared error of the predicted share; its truth: the anchor and accepted drafts, over b.

    States are detached: what a block is worth does not teach the drafter.
    """
    length: Any = drafter.get_submodule("thresh_head_two_model")
    shares = length(states_nbD.detach())
    truth = (runs_n + 1) / states_nbD.shape[1]
    return ((shares - truth).square() * weights_n).sum()
