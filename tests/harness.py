"""Small exact worlds for the laws: a table LM, a target around it, drafters that follow a script.

Does not know any real model, tokenizer or drafter architecture.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core import (
    AcceptRule,
    Completion,
    Draft,
    DraftContext,
    Drafter,
    Noise,
    Row,
    SamplingParams,
)
from paceline.decode import loop
from paceline.decode.reference import golden
from paceline.decode.warp import inverse_cdf, shape_probs


@dataclass(frozen=True)
class TableLM:
    """Next-token logits are ``table[a, b]`` after the last two tokens a, b (a = 0 if only one)."""

    table_VVV: Tensor

    @staticmethod
    def random(vocab: int, seed: int, scale: float = 1.5) -> TableLM:
        """Independent normal logits for every pair of tokens."""
        generator = torch.Generator().manual_seed(seed)
        return TableLM(torch.randn(vocab, vocab, vocab, generator=generator) * scale)

    @staticmethod
    def cycle(vocab: int, eos_after: int | None = None, strength: float = 9.0) -> TableLM:
        """0, 1, 2, ... vocab - 2, 0, ...; the EOS id vocab - 1 follows token ``eos_after``."""
        table = torch.zeros(vocab, vocab, vocab)
        for last in range(vocab):
            following = vocab - 1 if last == eos_after else (last + 1) % (vocab - 1)
            table[:, last, following] = strength
            table[:, last] -= torch.arange(vocab) * 1e-3  # no ties
        return TableLM(table)

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self.table_VVV.shape[-1]

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] of the token after ids."""
        return self.table_VVV[ids[-2] if len(ids) > 1 else 0, ids[-1]]

    def contexts(
        self, ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The last two tokens at the root and at each draft node, along its own path."""
        pairs = [(ids[-2] if len(ids) > 1 else 0, ids[-1])]
        for token, parent in zip(tokens, parents, strict=True):
            pairs.append((pairs[parent + 1][1], token))
        return pairs

    def node_logits(
        self, ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Tensor:
        """Logits [M, V] of one row's root and draft nodes."""
        index = torch.tensor(self.contexts(ids, tokens, parents))
        return self.table_VVV[index[:, 0], index[:, 1]]


@dataclass
class TableCache:
    """A cache that only counts."""

    lengths: list[int]

    def keep_path(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Nothing is stored, so there is nothing to move."""


@dataclass
class Scored:
    """What the loop reads after scoring."""

    logits_TV: Tensor
    taps_TF: Tensor | None = None


@dataclass
class TableTarget:
    """``loop.Scorer`` around a table LM."""

    model: TableLM

    def new_cache(self, slots: int) -> TableCache:
        """One length per slot."""
        return TableCache([0] * slots)

    def score(self, draft: Draft, rows: Sequence[Row], cache: Any, taps: Sequence[int]) -> Scored:
        """Logits of all nodes, rows behind one another."""
        pairs: list[tuple[int, int]] = []
        tokens, parents = draft.tokens_BN.tolist(), draft.parents_BN.tolist()
        for row, size, t, p in zip(rows, draft.sizes_B, tokens, parents, strict=True):
            pairs += self.model.contexts(row.tokens[-2:], t[:size], p[:size])
        index = torch.tensor(pairs)
        return Scored(self.model.table_VVV[index[:, 0], index[:, 1]])


Truth = Mapping[int, Sequence[int]]  # request -> the reply that plain decoding gives


@dataclass
class Scripted:
    """Drafts ``block`` tokens, of which ``pattern[round]`` are right, the next one surely wrong.

    It peeks at the true reply. With ``siblings`` every right token comes after a wrong sibling
    (a tree). ``wrong`` is the token it lies with, where that is not by chance the truth.
    """

    truth: Truth
    vocab: int
    block: int
    pattern: Sequence[int] = (10**9,)
    wrong: int | None = None
    siblings: bool = False
    name: str = "scripted"
    taps: tuple[int, ...] = ()
    samples: bool = False

    def new_state(self, slots: int) -> None:
        """It remembers nothing: the round is read off the row."""

    def release(self, state: Any, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, ctx: DraftContext) -> Draft:
        """One chain or tree per row."""
        drafts = [self._draft(row) for row in ctx.rows]
        width = max(len(tokens) for tokens, _ in drafts)
        return Draft(
            tokens_BN=torch.tensor([t + [0] * (width - len(t)) for t, _ in drafts]),
            parents_BN=torch.tensor([p + [-1] * (width - len(p)) for _, p in drafts]),
            sizes_B=[len(tokens) for tokens, _ in drafts],
        )

    def _draft(self, row: Row) -> tuple[list[int], list[int]]:
        ahead = list(self.truth[row.request][len(row.output) :])[: self.block]
        ahead += [0] * (self.block - len(ahead))
        right = self.pattern[len(row.rounds) % len(self.pattern)]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth, true in enumerate(ahead):
            lie = (true + 1) % self.vocab
            if self.wrong is not None and self.wrong != true:
                lie = self.wrong
            if self.siblings:
                tokens.append(lie)
                parents.append(parent)
            tokens.append(lie if depth == right else true)
            parents.append(parent)
            parent = len(tokens) - 1
        return tokens, parents


@dataclass
class TableDrafter:
    """Samples chains from its own table, shaped like the target's law, and says so (probs_BNV)."""

    model: TableLM
    block: int
    name: str = "table"
    taps: tuple[int, ...] = ()
    samples: bool = True

    def new_state(self, slots: int) -> None:
        """It remembers nothing."""

    def release(self, state: Any, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, ctx: DraftContext) -> Draft:
        """Token by token for all rows at once; all rows share the sampling parameters."""
        rows, params = ctx.rows, ctx.rows[0].params
        last = torch.tensor([(row.tokens[-2] if len(row.tokens) > 1 else 0) for row in rows])
        now = torch.tensor([row.tokens[-1] for row in rows])
        tokens, probs = [], []
        for step in range(self.block):
            q_BV = shape_probs(self.model.table_VVV[last, now], params)
            numbers = [row.noise.uniform("draft", len(row.tokens) + step) for row in rows]
            drawn = inverse_cdf(q_BV, numbers)
            last, now = now, torch.tensor(drawn)
            tokens.append(now)
            probs.append(q_BV)
        return Draft.chain(torch.stack(tokens, 1), [self.block] * len(rows), torch.stack(probs, 1))


class FreshNoise(Noise):
    """Independent numbers without an address: cheap rows for tests of distributions."""

    def __init__(self, source: random.Random) -> None:
        self._next = source.random

    def uniform(self, stream: str, position: int) -> float:
        """The next number."""
        return self._next()


def new_row(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Sequence[int] = (),
    request: int = 0,
    noise: Noise | None = None,
    text: Any = None,
    context: int = 10**6,
) -> Row:
    """A row as the engine admits it."""
    ids = frozenset(() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
    limit = min(len(prompt) + params.max_tokens, context)
    return Row(
        slot=0,
        tokens=list(prompt),
        prompt_length=len(prompt),
        params=params,
        noise=noise or Noise(params.seed),
        stop_ids=ids,
        limit=limit,
        request=request,
        text=text,
        finish_reason="length" if len(prompt) >= limit else None,
    )


def decode(
    model: TableLM, rows: Sequence[Row], drafter: Drafter | None, accept: AcceptRule, slots: int = 8
) -> list[Row]:
    """Run the real loop over the table LM until every row is finished."""
    session = loop.Session(
        target=TableTarget(model), drafter=drafter, accept=accept, slots=min(slots, len(rows) or 1)
    )
    for _ in loop.run(session, rows):
        pass
    return list(rows)


def truths(
    model: TableLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    eos: Sequence[int] = (),
    tokenizer: Any = None,
) -> list[Completion]:
    """The golden reply of every request."""
    return [
        golden(
            model.next_logits,
            prompt,
            p,
            stop_ids=() if p.ignore_eos else eos,
            tokenizer=tokenizer,
        )
        for prompt, p in zip(prompts, params, strict=True)
    ]


Make = Callable[[Truth], Drafter]


def drafters(vocab: int, block: int, eos: int = 0) -> dict[str, Make]:
    """Every scripted drafter of one block size."""

    def make(**options: Any) -> Make:
        return lambda truth: Scripted(truth=truth, vocab=vocab, block=block, **options)

    return {
        "oracle": make(),
        "liar": make(pattern=(0,)),
        "pattern": make(pattern=(0, 3, 7, 1)),
        "eos-liar": make(pattern=(1, 0, 2), wrong=eos),
        "tree": make(siblings=True, pattern=(2, 5, 0, 1)),
    }
