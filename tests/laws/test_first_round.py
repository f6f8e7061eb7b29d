"""A row's first round is its prefill: nothing is drafted in it, whatever its neighbours do.

Does not know any real model.
"""

from __future__ import annotations

import pytest

from harness import TableDrafter, TableLM, TableTarget, decode, drafters, new_row, truths
from paceline.core import Draft, DraftContext, SamplingParams
from paceline.decode import loop
from paceline.decode.accept import match, rejection
from paceline.drafters.ngram import NgramDrafter

PROMPTS = [[1, 2], [3], [5, 0, 4], [2, 2, 7, 1], [6, 6, 6]]


@pytest.mark.parametrize("name", [*drafters(11, 4), "ngram"])
def test_rows_that_join_later_begin_without_drafts(name: str) -> None:
    """Two slots for five rows of different lengths: fresh rows and drafted ones share rounds."""
    model = TableLM.random(11, seed=4)
    params = [SamplingParams(max_tokens=9 + 3 * b) for b in range(5)]
    gold = truths(model, PROMPTS, params)
    if name == "ngram":
        drafter = NgramDrafter(num_drafts=3)
    else:
        drafter = drafters(11, 4)[name]({b: g.token_ids for b, g in enumerate(gold)})
    rows = [new_row(PROMPTS[b], params[b], request=b) for b in range(5)]
    decode(model, rows, drafter, match, slots=2)
    assert [row.output for row in rows] == [g.token_ids for g in gold]
    assert [row.rounds[0].drafted for row in rows] == [0] * 5
    assert all(any(r.drafted for r in row.rounds[1:]) for row in rows)


def test_a_fresh_neighbour_moves_no_row_s_drafts_or_their_law() -> None:
    """Rejection reads the law of each draft: row by row it must stay the row's own."""
    model, other = TableLM.random(11, seed=1), TableLM.random(11, seed=2)
    params = [SamplingParams(temperature=0.9, max_tokens=6 + 5 * b, seed=b) for b in range(4)]
    together = [new_row(PROMPTS[b], params[b], request=b) for b in range(4)]
    decode(model, together, TableDrafter(other, block=3), rejection, slots=3)
    for b, row in enumerate(together):
        alone = new_row(PROMPTS[b], params[b], request=b)
        decode(model, [alone], TableDrafter(other, block=3), rejection)
        assert (row.output, row.rounds) == (alone.output, alone.rounds)


def test_neither_drafter_nor_stage_is_shown_a_fresh_row() -> None:
    model, shown = TableLM.cycle(11), []

    def stage(draft: Draft, ctx: DraftContext) -> Draft:
        shown.append([row.request for row in ctx.rows])
        assert len(draft.sizes_B) == len(ctx.rows)
        return Draft.chain(draft.tokens_BN[:, :1], [1] * len(ctx.rows))

    oracle = drafters(11, 4)["oracle"]({b: [(b + 1 + i) % 10 for i in range(20)] for b in (0, 1)})
    session = loop.Session(
        target=TableTarget(model), drafter=oracle, accept=match, stages=(stage,), slots=2
    )
    rows = [new_row([b], SamplingParams(max_tokens=8), request=b) for b in (0, 1)]
    session.add(rows[0])
    session.step()
    session.add(rows[1])
    session.step()
    session.step()
    assert shown == [[0], [0, 1]]
    assert [r.accepted for r in rows[0].rounds] == [0, 1, 1]
    assert [r.accepted for r in rows[1].rounds] == [0, 1]
    assert rows[0].output == [1, 2, 3, 4, 5]
