"""What acceptance length serving will have: the target's own held-out replies, drafted again.

Does not know optimisers, files or decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from paceline.drafters.dflash import DFlashModule
from paceline.train.blocks import every, make_blocks
from paceline.train.features import FeatureRow
from paceline.train.losses import leading_run
from paceline.train.objectives import best_drafts, previous_ids, refiner_of
from paceline.train.trainee import Trainee

_ROWS = 4  # drafted together


@dataclass(frozen=True, kw_only=True)
class Served:
    """Committed tokens and the verify rounds that commit them, summed over replies."""

    committed_tokens: float = 0.0
    verify_rounds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per round, the bonus token included, pooled; 1 without any round."""
        return self.committed_tokens / self.verify_rounds if self.verify_rounds else 1.0

    def __add__(self, other: Served) -> Served:
        return Served(
            committed_tokens=self.committed_tokens + other.committed_tokens,
            verify_rounds=self.verify_rounds + other.verify_rounds,
        )


def walk(runs: Sequence[int]) -> Served:
    """The rounds of one reply of n + 1 tokens, from the leading right drafts at its first n.

    The first token is the prompt's prefill. A round that starts at token i commits its right drafts
    and a bonus token, as far as the reply goes, and the next round starts at the last of them.
    """
    at = rounds = 0
    while at < len(runs):
        at, rounds = min(at + runs[at] + 1, len(runs)), rounds + 1
    return Served(committed_tokens=len(runs), verify_rounds=rounds)


@torch.no_grad()
def served_estimate(
    trainee: Trainee, rows: Sequence[FeatureRow], block_size: int, limit: int
) -> dict[str, Served]:
    """Figures per source of up to ``limit`` greedy rows; all processes must call this together.

    Every position of a reply is drafted, then `walk` visits those where decoding would have been: on
    the target's own greedy reply that is exactly what greedy decoding accepts, near ties of lower
    precision aside. A token outside the draft vocabulary is wrong, as it will be.
    """
    greedy = spread([item for item in rows if item.row.greedy], limit)
    sources = sorted({item.row.source for item in greedy})
    counts = {name: Served() for name in sources}
    for item, runs in runs_of(trainee, greedy, block_size):
        counts[item.row.source] += walk(runs)
    ranks = trainee.ranks
    committed = ranks.sum(*(counts[name].committed_tokens for name in sources))
    rounds = ranks.sum(*(counts[name].verify_rounds for name in sources))
    return {
        name: Served(committed_tokens=c, verify_rounds=r)
        for name, c, r in zip(sources, committed, rounds, strict=True)
    }


def spread(rows: Sequence[FeatureRow], limit: int) -> list[FeatureRow]:
    """Up to ``limit`` rows, the sources in turn: a small one counts, too."""
    of_source: dict[str, list[FeatureRow]] = {}
    for item in rows:
        of_source.setdefault(item.row.source, []).append(item)
    turns = zip_longest(*of_source.values())
    return [item for turn in turns for item in turn if item is not None][:limit]


def runs_of(
    trainee: Trainee, rows: Sequence[FeatureRow], block_size: int
) -> Iterator[tuple[FeatureRow, list[int]]]:
    """This process's rows, each with the leading right drafts at all its reply tokens but the last.

    All processes must go through it together. Figures beyond `served_estimate`'s are made of it.
    """
    ordered = sorted(rows, key=lambda item: len(item.row.reply))  # similar sizes together
    parts = [ordered[at : at + _ROWS] for at in range(0, len(ordered), _ROWS)]
    ranks = trainee.ranks
    for turn in range(-(-len(parts) // ranks.world)):
        # Sharded weights are gathered in every forward, so all processes run equally many.
        number = turn * ranks.world + ranks.rank
        part = parts[min(number, len(parts) - 1)]
        found = _part_runs(trainee, part, block_size)
        if number < len(parts):
            yield from zip(part, found, strict=True)


def _part_runs(trainee: Trainee, part: Sequence[FeatureRow], block_size: int) -> list[list[int]]:
    places = max(1, *(len(item.row.reply) - 1 for item in part))
    anchors = -(-places // 32) * 32
    blocks = make_blocks(
        [item.row for item in part],
        anchors=anchors,
        block_size=block_size,
        choose=every,
        limit=trainee.shape.max_position_embeddings,
    )
    features, _ = trainee.inputs(part, blocks)
    prev, head = previous_ids(part, blocks).to(features.device), trainee.head

    def drafts(states_nbD: Tensor, drafter: DFlashModule) -> Tensor:
        refiner = next((refiner_of(drafter, kind) for kind in trainee.shape.refiners), None)
        return best_drafts(states_nbD, head, prev, refiner, trainee.shape.num_jacobi_passes)

    right = trainee.model(blocks, features, drafts) == head.labels(blocks).flatten(0, 1).to(prev)
    runs = leading_run(right).view(len(part), anchors)
    return [line[:kept].tolist() for line, kept in zip(runs, blocks.keep_RA.sum(1), strict=True)]
