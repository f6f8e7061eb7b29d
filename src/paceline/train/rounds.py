"""Blocks where rollouts had theirs: recorded anchors, what was accepted there and what was not.

Does not know losses or files. Letters as in `blocks`: R rows, A anchors per row, k = b - 1 drafts.

Source: Draft-OPD, arXiv 2605.29343 (replay), and its code (the random-anchor ablation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from paceline.train.blocks import Blocks
from paceline.train.records import Judged, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What the target said of each block's drafts. Offset k = 1 stands at index 0."""

    accepted_RAk: Tensor  # bool: a draft that was committed
    corrected_RAk: Tensor  # bool: the target's own token behind them, where a draft was rejected
    rejected_RAk: Tensor  # bool: a draft from the first wrong one on
    proposals_RAk: Tensor  # int64, -1 where nothing was judged
    proposal_logprobs_RAk: Tensor  # fp32, the target's given the proposals before
    committed_logprobs_RAk: Tensor  # fp32, the target's of the committed token

    def take(self, rows: Sequence[int]) -> Rounds:
        """Some of the rows."""
        at = list(rows)
        return Rounds(**{field.name: getattr(self, field.name)[at] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A block to be: where, how many drafts were accepted and corrected there, which were rejected."""

    anchor: int
    accepted: int
    corrected: bool
    judged: Judged | None  # None: the place is not where the round was


def recorded_blocks(
    records: Sequence[Record],
    *,
    block_size: int,
    anchors: int,
    limit: int,
    seeds: Sequence[Sequence[int]],
    shuffled: bool = False,
) -> tuple[Blocks, Rounds]:
    """A block at every round that drafted; at most ``anchors`` of them a row, drawn without replacement.

    Labels are the committed tokens, past the round's own, too. Judged drafts beyond the block size are
    left out, and so are blocks that reach position ``limit``. ``shuffled`` is the ablation: accepted
    runs keep their lengths but stand in another order, so at other anchors; rejected drafts stay.
    """
    chosen = []
    for record, seed in zip(records, seeds, strict=True):
        rng = np.random.default_rng(list(seed))
        places = _places(record, rng if shuffled else None)
        places = [place for place in places if place.anchor + block_size <= limit]
        if len(places) > anchors:
            drawn = np.sort(rng.choice(len(places), anchors, replace=False))
            places = [places[i] for i in drawn]
        chosen.append(places)
    A = max(1, *map(len, chosen))
    return _blocks(records, chosen, A, block_size - 1)


def _places(record: Record, rng: np.random.Generator | None) -> list[_Place]:
    drafted = [judged for judged in record.rounds if judged.proposals]
    true = [
        _Place(
            anchor=one.anchor,
            accepted=one.accepted,
            corrected=one.accepted < len(one.proposals) and one.correction is not None,
            judged=one,
        )
        for one in drafted
    ]
    if rng is None or not true:
        return true
    found, at = [], drafted[0].anchor
    for i in rng.permutation(len(true)).tolist():
        moved = true[i]
        found.append(
            _Place(anchor=at, accepted=moved.accepted, corrected=moved.corrected, judged=None)
        )
        one = drafted[i]
        at += one.accepted + (one.correction is not None)
    last = len(record.tokens) - 1  # a reply that ended in mid-round may be a token short elsewhere
    found = [place for place in found if place.anchor + place.accepted + place.corrected <= last]
    kept = [
        _Place(anchor=one.anchor, accepted=0, corrected=False, judged=one)
        for one in drafted
        if one.accepted < len(one.proposals)
    ]
    return found + kept


def _blocks(
    records: Sequence[Record], chosen: Sequence[Sequence[_Place]], A: int, k: int
) -> tuple[Blocks, Rounds]:
    R = len(records)
    anchors, ids = np.zeros((R, A), np.int64), np.zeros((R, A), np.int64)
    keep = np.zeros((R, A), bool)
    labels, proposals = np.full((R, A, k), -100, np.int64), np.full((R, A, k), -1, np.int64)
    flags = {name: np.zeros((R, A, k), bool) for name in ("accepted", "corrected", "rejected")}
    said, committed = np.zeros((R, A, k), np.float32), np.zeros((R, A, k), np.float32)
    for r, (record, places) in enumerate(zip(records, chosen, strict=True)):
        own = _committed_logprobs(record)
        anchors[r, len(places) :] = places[-1].anchor if places else 0
        for a, place in enumerate(places):
            anchors[r, a], keep[r, a] = place.anchor, True
            following = record.tokens[place.anchor + 1 : place.anchor + 1 + k]
            labels[r, a, : len(following)] = following
            committed[r, a, : len(following)] = own[place.anchor + 1 : place.anchor + 1 + k]
            flags["accepted"][r, a, : place.accepted] = True
            if place.corrected and place.accepted < k:
                flags["corrected"][r, a, place.accepted] = True
            if place.judged is not None:
                drafts = place.judged.proposals[:k]
                proposals[r, a, : len(drafts)] = drafts
                said[r, a, : len(drafts)] = place.judged.logprobs[:k]
                flags["rejected"][r, a, place.judged.accepted : len(drafts)] = True
        ids[r] = record.tokens[anchors[r]]
    blocks = Blocks(
        anchors_RA=torch.from_numpy(anchors),
        anchor_ids_RA=torch.from_numpy(ids),
        labels_RAk=torch.from_numpy(labels),
        keep_RA=torch.from_numpy(keep),
    )
    rounds = Rounds(
        accepted_RAk=torch.from_numpy(flags["accepted"]),
        corrected_RAk=torch.from_numpy(flags["corrected"]),
        rejected_RAk=torch.from_numpy(flags["rejected"]),
        proposals_RAk=torch.from_numpy(proposals),
        proposal_logprobs_RAk=torch.from_numpy(said),
        committed_logprobs_RAk=torch.from_numpy(committed),
    )
    return blocks, rounds


def _committed_logprobs(record: Record) -> np.typing.NDArray[np.float32]:
    """The target's log-probability of each reply token [S]; 0 for the prompt."""
    found = np.zeros(len(record.tokens), np.float32)
    for one in record.rounds:
        first = one.anchor + 1
        found[first : first + one.accepted] = one.logprobs[: one.accepted]
        if one.correction is not None:
            found[first + one.accepted] = one.correction
    return found
