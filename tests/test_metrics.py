"""Every acceptance figure on traces made by hand.

Does not know real models; the prefix rule and the trimming run through the real loop.
"""

from __future__ import annotations

import pytest
import torch

from harness import Scripted, TableLM, decode, new_row
from paceline.core import Completion, Draft, Round, Row, SamplingParams
from paceline.decode.accept import match
from paceline.evaluate.metrics import acceptance, loops, without_loops
from paceline.pipeline import outputs_of

PREFILL = Round(drafted=0, accepted=0, committed=1)


def reply(accepts: list[int], *, drafted: int = 7, ids: list[int] | None = None) -> Completion:
    """A reply of untrimmed rounds."""
    rounds = [Round(drafted=drafted, accepted=a, committed=a + 1) for a in accepts]
    return Completion(
        index=0,
        text="",
        token_ids=ids or [0] * (1 + sum(r.committed for r in rounds)),
        finish_reason="length",
        stop_reason=None,
        logprobs=None,
        rounds=[PREFILL, *rounds],
    )


def finished(row: Row) -> Completion:
    """The reply of one decoded row."""
    return outputs_of([row])[0].outputs[0]


def test_matches_after_a_rejection_are_not_accepted() -> None:
    class Drafter(Scripted):
        def propose(self, ctx):
            count = len(ctx.rows[0].output)
            right = [self.truth[0][count + i] for i in range(4)]
            tokens = [t if ok else 10 for t, ok in zip(right, [1, 0, 1, 1], strict=True)]
            return Draft.chain(torch.tensor([tokens]), [4])

    model = TableLM.cycle(11)
    truth = [t % 10 for t in range(1, 40)]
    row = new_row([0], SamplingParams(max_tokens=9))  # the prefill and four rounds
    decode(model, [row], Drafter(truth={0: truth}, vocab=11, block=4), match)
    assert row.output == truth[:9]
    figures = acceptance([finished(row)])
    assert {accepted for _, accepted in figures.draft_rounds} == {1}
    assert figures.acceptance_length_pooled == 2.0


def test_end_of_text_inside_the_last_round_both_conventions() -> None:
    model = TableLM.cycle(31, eos_after=15)  # 1 .. 15 and then EOS, id 30
    truth = [*range(1, 16), 30, 5, 6, 7, 8, 9]
    # The prefill round accepts nothing; then 3, 0, 7 and 2, of which the second is EOS.
    drafter = Scripted(truth={0: truth}, vocab=31, block=7, pattern=(0, 3, 0, 7, 2))
    row = new_row([0], SamplingParams(max_tokens=60), eos=[30])
    decode(model, [row], drafter, match)
    assert row.output == truth[:16]
    done = finished(row)
    assert [r.accepted for r in done.rounds] == [0, 3, 0, 7, 2]
    figures = acceptance([done])
    assert len(done.token_ids) == 1 + figures.committed_tokens == 16
    assert (figures.verify_rounds, figures.accepted_drafts) == (4, 12)
    assert figures.acceptance_length_full_bonus == 1 + 12 / 4
    assert figures.acceptance_length_pooled == 15 / 4


def test_end_of_text_as_the_first_accepted_draft() -> None:
    rounds = [Round(drafted=7, accepted=a, committed=c) for a, c in ((3, 4), (0, 1), (7, 8))]
    last = Round(drafted=7, accepted=1, committed=1)  # two matched, the first of them was EOS
    done = reply([], ids=[0] * 15)
    done.rounds.extend([*rounds, last])
    figures = acceptance([done])
    assert len(done.token_ids) == 1 + figures.committed_tokens
    assert figures.acceptance_length_full_bonus == 1 + 11 / 4
    assert figures.acceptance_length_pooled == 14 / 4
    assert figures.committed_rounds == {4: 1, 1: 2, 8: 1}


def test_runs_are_counted_per_block_not_multiplied() -> None:
    groups = [acceptance([reply(list(runs), drafted=3)]) for runs in ((3, 1), (2, 0))]
    both = groups[0] + groups[1]
    assert both.accepted_drafts_per_round == 1.5
    assert [g.accepted_drafts_per_round for g in groups] == [2.0, 1.0]
    assert [s["unconditional"] for s in both.slot_acceptance] == [0.75, 0.5, 0.25]
    assert [s["conditional"] for s in both.slot_acceptance] == [3 / 4, 2 / 3, 1 / 2]
    assert both.acceptance_rate == 6 / 12 and both.waste == 6 / 12
    assert both.verified_tokens == 16 and both.verified_per_committed == 16 / 10
    assert both.figures()["histogram"] == {"1": 1, "2": 1, "3": 1, "4": 1}


def test_short_and_long_request_both_means() -> None:
    short, long = reply([4, 4]), reply([0] * 1000)
    assert len(short.token_ids) == 11 and len(long.token_ids) == 1001
    figures = acceptance([short, long])
    assert figures.acceptance_length_pooled == pytest.approx(1010 / 1002)
    assert figures.acceptance_length_request_mean == (5 + 1) / 2


@pytest.mark.parametrize("split", [1, 2, 3, 6])
def test_no_figure_depends_on_the_split(split: int) -> None:
    replies = [reply(runs) for runs in ([3, 1], [2], [0, 0, 5], [], [7, 7, 1], [1])]
    whole = acceptance(replies).figures()
    parts = [acceptance(replies[at : at + split]) for at in range(0, 6, split)]
    total = sum(parts[1:], parts[0]).figures()
    lengths = [f.pop("acceptance_length_request_mean") for f in (whole, total)]
    assert total == whole and lengths[0] == pytest.approx(lengths[1])
    assert whole["requests"] == 6


def test_prefill_alone_has_no_rounds_and_no_zero_division() -> None:
    figures = acceptance([reply([])]).figures()
    assert figures["verify_rounds"] == 0 and figures["slot_acceptance"] == []
    ratios = [name for name, value in figures.items() if value is None]
    assert ratios == [
        "acceptance_length_pooled",
        "acceptance_length_request_mean",
        "acceptance_length_full_bonus",
        "accepted_drafts_per_round",
        "acceptance_rate",
        "waste",
        "drafted_per_committed",
        "verified_per_committed",
    ]


def test_a_position_is_judged_by_the_rounds_that_drafted_it() -> None:
    """Two short drafts, kept whole, and a long one: position 3 was tried once, and hit."""
    done = reply([])
    counts = ((2, 2), (2, 2), (5, 3), (0, 0))
    done.rounds.extend(Round(drafted=d, accepted=a, committed=a + 1) for d, a in counts)
    slots = acceptance([done]).slot_acceptance
    assert [slot["position"] for slot in slots] == [1, 2, 3, 4, 5]
    assert [slot["drafted"] for slot in slots] == [3, 3, 1, 1, 1]
    assert [slot["reached"] for slot in slots] == [3, 3, 1, 1, 0]
    assert [slot["accepted"] for slot in slots] == [3, 3, 1, 0, 0]
    assert [slot["conditional"] for slot in slots] == [1, 1, 1, 0, None]
    assert [slot["unconditional"] for slot in slots] == [3 / 4, 3 / 4, 1 / 4, 0, 0]
    nothing = acceptance([reply([0, 0], drafted=0)]).figures()
    assert nothing["slot_acceptance"] == []
    assert nothing["acceptance_rate"] is None and nothing["waste"] is None
    assert nothing["acceptance_length_pooled"] == 1


def test_loops_need_four_times_in_the_last_64() -> None:
    gram = [1, 2, 3, 4, 5, 6, 7, 8]
    apart = [[*gram, 100 + i] for i in range(5)]
    four = sum(apart[:4], [])
    assert loops(four) and loops([5] * 11)
    assert not loops(sum(apart[:3], [])) and not loops([5] * 10) and not loops([1, 2])
    assert not loops(four + list(range(200, 240)))  # the loop ended before the last 64 tokens
    assert not loops([5] * 11 + list(range(200, 264)))


def test_figures_without_looping_replies() -> None:
    looping = reply([7, 7], ids=[5] * 17)
    honest = reply([1, 0], ids=[1, 2, 3, 4])
    kept = without_loops([looping, honest])
    assert kept == [honest]
    assert acceptance(kept).acceptance_length_pooled == 1.5
    assert acceptance([looping, honest]).acceptance_length_pooled == 19 / 4
