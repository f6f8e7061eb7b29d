"""What the target would have said behind rejected drafts: one packed forward for all blocks of a reply.

Does not know losses, rows on disk or drafters. Letters: A blocks, k = b - 1 drafts, D hidden width.

A draft behind the first wrong one stands behind a prefix that the reply never had, so its law is in no
state of the reply. All blocks share the reply's own tokens; each hangs its rejected drafts behind the
last token that it shares with the reply, as one branch of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.attention import Packed, RaggedCache
from paceline.target import Target

_NODES = 1024  # of one forward, about: its mask is nodes squared


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A block of a reply: the first ``accepted`` of its ``proposals`` are the reply's own next tokens."""

    anchor: int
    accepted: int
    proposals: Sequence[int]

    @property
    def root(self) -> int:
        """Position of the last token that it shares with the reply."""
        return self.anchor + self.accepted

    @property
    def tail(self) -> list[int]:
        """The drafts that later drafts stand behind and the reply does not have."""
        return list(self.proposals[self.accepted : -1])


class _Enough(Exception):
    """Raised where the head would begin."""


def teacher_states(
    target: Target, tokens: Sequence[int], branches: Sequence[Branch], k: int
) -> Tensor:
    """The states [A, k, D] that the target's head would see for each proposal of each branch.

    State j is the one behind the anchor and the first j proposals; zeros where there is no proposal.
    Branches must come in the order of their anchors. Long replies take several forwards, each of which
    goes on where the last one's first branch begins.
    """
    out = torch.zeros(len(branches), k, target.hidden_size, dtype=target.dtype)
    out = out.to(target.device)
    cache, known = target.new_cache(1), 0  # the cache holds the reply's tokens up to here
    for group in _groups(branches):
        start = min(known, branches[group[0]].anchor)
        known = _run(target, tokens, branches, group, start, cache, out)
    return out


def _groups(branches: Sequence[Branch]) -> list[range]:
    """Ranges of branches with about _NODES nodes together, the reply's own included."""
    found, first = [], 0
    nodes = 0
    for i, branch in enumerate(branches):
        own = branch.root - branches[first].anchor
        nodes += len(branch.tail)
        if i > first and nodes + own > _NODES:
            found.append(range(first, i))
            first, nodes = i, len(branch.tail)
    return [*found, range(first, len(branches))] if branches else []


def _run(
    target: Target,
    tokens: Sequence[int],
    branches: Sequence[Branch],
    group: range,
    start: int,
    cache: RaggedCache,
    out: Tensor,
) -> int:
    """One forward: the reply from ``start`` on to the last root of the group, and its branches.

    Returns where that part of the reply ends.
    """
    chosen = [branches[i] for i in group]
    end = max(branch.root for branch in chosen) + 1
    ids, positions = list(tokens[start:end]), list(range(start, end))
    own = len(ids)
    count = own + sum(len(branch.tail) for branch in chosen)
    seen = torch.zeros(count, count, dtype=torch.bool)
    seen[:own, :own] = torch.ones(own, own, dtype=torch.bool).tril()
    wanted: list[int] = []
    places: list[tuple[int, int]] = []
    for i, branch in zip(group, chosen, strict=True):
        first, tail = len(ids), branch.tail
        ids += tail
        positions += range(branch.root + 1, branch.root + 1 + len(tail))
        seen[first : first + len(tail), : branch.root + 1 - start] = True
        chain = torch.ones(len(tail), len(tail), dtype=torch.bool).tril()
        seen[first : first + len(tail), first : first + len(tail)] = chain
        shared = min(branch.accepted + 1, len(branch.proposals))
        wanted += range(branch.anchor - start, branch.anchor - start + shared)
        wanted += range(first, first + len(tail))
        places += [(i, j) for j in range(shared + len(tail))]
    device = target.device
    batch = Packed(
        ids_T=torch.tensor(ids, device=device),
        positions_T=torch.tensor(positions, device=device),
        slots=[0],
        starts=[start],
        counts=[count],
        ancestors=[seen.to(device)],
    )
    if wanted:
        at = torch.tensor(places, device=device)
        found = _states(target, batch, cache, torch.tensor(wanted, device=device))
        out[at[:, 0], at[:, 1]] = found
    return end if wanted else start


def _states(target: Target, batch: Packed, cache: RaggedCache, wanted: Tensor) -> Tensor:
    """What the head would see of the wanted nodes [n, D]; it does not run."""
    found: list[Tensor] = []

    def keep(_module: Any, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0][0].clone())
        raise _Enough

    hook = target.head.register_forward_pre_hook(keep)
    try:
        target.forward(batch, cache, wanted)
    except _Enough:
        pass
    finally:
        hook.remove()
    return found[0]
