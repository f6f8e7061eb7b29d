"""Rollouts say what really happened: against plain decoding and plain forwards of a tiny target.

Does not know losses or training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Scripted
from paceline.core import Draft, SamplingParams
from paceline.decode.reference import golden
from paceline.drafters.dflash import DFlashConfig, DFlashModule, init_random
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.pipeline import Pipeline
from paceline.target import Target
from paceline.train.corpus import Row
from paceline.train.records import Origin, Record, RecordReader, RecordWriter
from paceline.train.rollout import (
    Job,
    Prompts,
    Roller,
    roll_out,
    roll_out_forever,
    write_rollouts,
)
from tiny import tiny_target

PROMPTS = [[3, 4, 5], [9, 9, 1, 9, 9, 1, 9], list(range(20)), [50]]
TAPS = (0, 1)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def rolled(target: Target, number: int, params: SamplingParams, **options: Any) -> Record:
    """One reply, of whose 5 drafts a round 0, 3, 5 or 1 are right; taps as for a trained drafter."""
    reply = golden(target.next_logits, PROMPTS[number], params).token_ids
    drafter = Scripted(
        truth={0: reply}, vocab=97, block=5, pattern=(3, 0, 3, 7, 1), taps=TAPS, **options
    )
    pipeline = Pipeline(target=target, drafter=drafter)
    job = Job(id=7, prompt=PROMPTS[number], params=params, source="maths")
    (record,) = roll_out(pipeline, [job], slots=2, version=3)
    assert record.tokens.tolist() == PROMPTS[number] + reply
    return record


def check(record: Record, target: Target) -> None:
    """Every number of a record from plain forwards without any cache."""
    tokens = record.tokens.tolist()
    assert record.rounds[0].anchor == record.start - 1 and not record.rounds[0].proposals
    at = record.start - 1
    for judged in record.rounds:
        assert judged.anchor == at and judged.version == record.version
        assert len(judged.logprobs) == len(judged.proposals) >= judged.accepted
        kept = list(judged.proposals[: judged.accepted])
        assert tokens[at + 1 : at + 1 + len(kept)] == kept
        prefix = tokens[: at + 1]
        for k, (proposal, said) in enumerate(zip(judged.proposals, judged.logprobs, strict=True)):
            law = target.next_logits(prefix + list(judged.proposals[:k])).log_softmax(-1)
            assert abs(float(law[proposal]) - said) < 1e-4
        at += len(kept)
        if judged.correction is not None:
            law = target.next_logits(tokens[: at + 1]).log_softmax(-1)
            assert abs(float(law[tokens[at + 1]]) - judged.correction) < 1e-4
            at += 1
    assert at == len(tokens) - 1, "rounds cover the reply"
    with torch.no_grad():
        states = target.model(
            torch.tensor([tokens]), output_hidden_states=True, use_cache=False
        ).hidden_states
    plain = torch.cat([states[tap + 1][0] for tap in TAPS], -1)[:-1]
    assert record.features.dtype == torch.bfloat16
    torch.testing.assert_close(record.features.float(), plain, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("number", range(4))
def test_a_record_holds_what_plain_forwards_say(
    target: Target, number: int, temperature: float
) -> None:
    params = SamplingParams(max_tokens=17, temperature=temperature, seed=number)
    record = rolled(target, number, params)
    check(record, target)
    assert (record.id, record.source, record.version) == (7, "maths", 3)
    drafted = record.rounds[1:]
    assert {judged.accepted for judged in drafted} >= {0, 3, 1}
    assert any(judged.accepted < len(judged.proposals) - 1 for judged in drafted), "whole suffix"


@pytest.mark.parametrize("cut", range(1, 17))
def test_nothing_behind_the_end_of_a_reply_is_recorded(target: Target, cut: int) -> None:
    """The reply ends by a stop id at every place a round may put it, and by its length."""
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 1}
    params = SamplingParams(max_tokens=17, **sampled)
    whole = golden(target.next_logits, PROMPTS[0], params).token_ids
    assert len(set(whole)) == 17, "each id ends the reply at another place"
    params = SamplingParams(max_tokens=17, stop_token_ids=(whole[cut],), **sampled)
    record = rolled(target, 0, params)
    assert len(record.tokens) == record.start + cut + 1
    check(record, target)
    last = record.rounds[-1]
    if last.correction is None:
        assert len(last.proposals) == last.accepted, "what follows the stop was not judged"
    check(rolled(target, 0, SamplingParams(max_tokens=cut, **sampled)), target)


def test_a_tree_is_refused(target: Target) -> None:
    params = SamplingParams(max_tokens=9)
    with pytest.raises(ValueError, match="chains"):
        rolled(target, 0, params, siblings=True)
    with pytest.raises(ValueError, match="needs a drafter"):
        Roller(Pipeline(target=target), slots=1)


def dflash(target: Target, seed: int) -> DFlashDrafter:
    config = DFlashConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        block_size=5,
        num_target_layers=3,
        mask_token_id=96,
        target_layer_ids=TAPS,
        max_position_embeddings=128,
    )
    module = DFlashModule(config)
    init_random(module, torch.Generator().manual_seed(seed), std=0.2)
    return DFlashDrafter(config, module.eval().requires_grad_(False), None, target)


def jobs(count: int) -> list[Job]:
    return [
        Job(id=i, prompt=PROMPTS[i % 4], params=SamplingParams(max_tokens=10 + i))
        for i in range(count)
    ]


def test_records_do_not_depend_on_the_batch(target: Target) -> None:
    pipeline = Pipeline(target=target, drafter=dflash(target, 0))
    together = roll_out(pipeline, jobs(6), slots=3)
    assert [record.id for record in together] == list(range(6))
    for record in together:
        (alone,) = roll_out(pipeline, [jobs(6)[record.id]], slots=1)
        assert alone.tokens.tolist() == record.tokens.tolist()
        for mine, theirs in zip(alone.rounds, record.rounds, strict=True):
            assert mine.proposals == theirs.proposals
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        check(record, target)


def test_new_weights_draft_from_the_whole_context(target: Target) -> None:
    """Behind a swap in mid-reply each block is what the new weights draft in a fresh session."""
    first, second = (Pipeline(target=target, drafter=dflash(target, seed)) for seed in (0, 1))
    roller = Roller(first, slots=3, version=0)
    for job in jobs(3):
        roller.add(job)
    found: list[Record] = []
    for turn in range(40):
        if turn == 4:
            roller.use(1, second)
        found += roller.step()
        if not roller.busy:
            break
    assert len(found) == 3
    for record in found:
        check_versions = [judged.version for judged in record.rounds]
        assert check_versions == [0] * 4 + [1] * (len(check_versions) - 4)
        assert record.version == 0
        for judged, pipeline in [(record.rounds[3], first), (record.rounds[5], second)]:
            prompt = record.tokens[: judged.anchor].tolist()
            params = SamplingParams(max_tokens=len(record.tokens) - len(prompt))
            (fresh,) = roll_out(pipeline, [Job(id=0, prompt=prompt, params=params)], slots=1)
            assert fresh.rounds[1].anchor == judged.anchor
            assert fresh.rounds[1].proposals == judged.proposals
    both = [
        [one.rounds[1].proposals for one in roll_out(pipeline, jobs(3), slots=3)]
        for pipeline in (first, second)
    ]
    assert both[0] != both[1], "the two drafters differ, so the test can fail"
    narrow = dflash(target, 0)
    narrow.taps = (0,)
    with pytest.raises(ValueError, match="taps other layers"):
        roller.use(2, Pipeline(target=target, drafter=narrow))


def test_a_job_is_a_function_of_its_number() -> None:
    rows = [
        Row(tokens=np.arange(i, i + 9), start=3, source=f"s{i}", temperature=0.0, held_out=False)
        for i in range(5)
    ]
    prompts = Prompts(rows=rows, seed=1, temperature=1.0, max_tokens=8)
    turns = [[prompts.job(turn * 5 + i) for i in range(5)] for turn in range(3)]
    for turn in turns:
        assert sorted(list(job.prompt)[0] for job in turn) == list(range(5)), "each prompt once"
    assert len({tuple(job.source for job in turn) for turn in turns}) > 1
    assert turns[1][2] == prompts.job(7)
    assert len({job.params.seed for turn in turns for job in turn}) == 15
    roller = Roller(Pipeline(target=tiny_target(), drafter=_Nothing()), slots=1)
    with pytest.raises(ValueError, match="at least 1"):
        roller.add(Job(id=0, prompt=[1], params=SamplingParams(max_tokens=0)))


def short(number: int) -> Job:
    params = SamplingParams(max_tokens=4 + number % 5)
    return Job(id=number, prompt=PROMPTS[number % 4], params=params)


ORIGIN = Origin(taps=TAPS, target="tiny", records_per_shard=2)


def test_a_producer_stays_within_its_bound_and_takes_new_weights(
    target: Target, tmp_path: Path
) -> None:
    """The reader takes one record at a time; the producer is never max_ahead ids ahead of it."""
    pipelines = [Pipeline(target=target, drafter=dflash(target, seed)) for seed in (0, 1)]
    reader, taken, asked, idle = RecordReader(tmp_path, ORIGIN), 0, list[int](), 0

    def job(number: int) -> Job:
        assert number < taken + 4, "four ids ahead at most"
        asked.append(number)
        return short(number)

    def newer(than: int) -> tuple[int, Pipeline] | None:
        version = min(1, taken // 5)
        return (version, pipelines[version]) if version > than else None

    def stopped() -> bool:
        nonlocal taken, idle
        if reader.available == taken + 4:
            idle += 1
        if taken < reader.available and (idle % 3 == 2 or reader.available < taken + 4):
            idle += 1
            taken += 1
            reader.tell(taken)
        return taken >= 12

    with RecordWriter(tmp_path, ORIGIN) as writer:
        how: dict[str, Any] = {"slots": 3, "stopped": stopped, "poll_seconds": 0.001}
        roll_out_forever(writer, newer, job, max_ahead=4, **how)
        with pytest.raises(ValueError, match="two shards"):
            roll_out_forever(writer, newer, job, max_ahead=3, **how)
        reader.tell(taken, done=True)
        roll_out_forever(writer, newer, job, max_ahead=4, **(how | {"stopped": lambda: False}))
    assert asked == list(range(len(asked))) and idle > 3
    found = [reader.read(number) for number in range(reader.available)]
    assert [record.id for record in found] == list(range(len(found))) and len(found) >= 12
    assert {record.version for record in found} == {0, 1}
    for record in found:
        check_tokens(record, target)


def check_tokens(record: Record, target: Target) -> None:
    """Whatever the weights and however they changed, the reply is plain decoding's."""
    job = short(record.id)
    plain = golden(target.next_logits, list(job.prompt), job.params).token_ids
    assert record.tokens.tolist() == [*job.prompt, *plain]


def test_a_producer_that_died_goes_on_where_the_records_end(target: Target, tmp_path: Path) -> None:
    pipeline = Pipeline(target=target, drafter=dflash(target, 0))
    reader, died = RecordReader(tmp_path, ORIGIN), 0
    for fatal in (1, 4, 5, 99):

        def job(number: int, fatal: int = fatal) -> Job:
            if number == fatal:
                raise MemoryError
            return short(number)

        with RecordWriter(tmp_path, ORIGIN) as writer:
            try:
                write_rollouts(writer, pipeline, job, below=7, slots=2)
            except MemoryError:
                died += 1
            assert reader.available == writer.next_id == {1: 0, 4: 4, 5: 4, 99: 8}[fatal]
    assert died == 3
    for number in range(8):
        check_tokens(reader.read(number), target)


class _Nothing:
    """A drafter that never drafts."""

    name, taps, samples = "nothing", (), False

    def new_state(self, slots: int) -> None:
        """None."""

    def release(self, state: Any, slot: int) -> None:
        """Nothing."""

    def propose(self, ctx: Any) -> Draft:
        """No drafts."""
        return Draft.empty(len(ctx.rows))
