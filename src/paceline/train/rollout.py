"""Rolls out a drafter in training: the target decodes with it, and every round is written down.

Knows the decode loop through a pipeline that it is given; does not know losses, checkpoints or commands.

Source: Draft-OPD, arXiv 2605.29343 (what a rollout records); AdaFlash, arXiv 2607.19223 (one process
rolls out with the newest weights while another trains).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core import Draft, SamplingParams, Verdict
from paceline.core import Row as LiveRow
from paceline.pipeline import Pipeline
from paceline.train.corpus import Row
from paceline.train.records import Judged, Record, RecordWriter

Newer = Callable[[int], "tuple[int, Pipeline] | None"]
"""`newer(than)`: the newest weights' version and a pipeline with them, if it is a later one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One reply to roll out. ``params`` is for one sample and at least one token."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """An endless line of jobs over the prompts of rows: job ``id`` is always the same.

    Each pass over the rows has an order of its own. Sampled replies differ from pass to pass.
    """

    rows: Sequence[Row]
    seed: int
    temperature: float
    max_tokens: int

    def job(self, number: int) -> Job:
        """The job of an id."""
        turn, at = divmod(number, len(self.rows))
        order = list(range(len(self.rows)))
        random.Random(self.seed * 1_000_003 + turn).shuffle(order)
        row = self.rows[order[at]]
        return Job(
            id=number,
            prompt=row.tokens[: row.start].tolist(),
            source=row.source,
            params=SamplingParams(
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                seed=self.seed * 1_000_003 + number,
            ),
        )


@dataclass(kw_only=True)
class _Reply:
    """What is known of a live row. Taps keep the target's dtype: new weights may want them again."""

    job: Job
    taps: list[Tensor] = field(default_factory=list)
    rounds: list[Judged] = field(default_factory=list)


class Roller:
    """Rows that decode together with the newest weights, and the records they become.

    Weights may be changed between rounds: the replies go on, drafted by the new ones, which first see
    the whole context. Replies are exact whatever the weights, as in any pipeline.

    Raises ValueError for drafts that are no chains.
    """

    def __init__(self, pipeline: Pipeline, *, slots: int, version: int = 0) -> None:
        if pipeline.drafter is None:
            raise ValueError("a rollout needs a drafter")
        self._pipeline, self.version = pipeline, version
        self._session = pipeline.session(slots)
        self._session.watch = self._watch
        self._replies: dict[int, _Reply] = {}  # by slot

    @property
    def free(self) -> int:
        """How many more replies can be rolled out at once."""
        return len(self._session.free)

    @property
    def busy(self) -> bool:
        """Whether any reply is unfinished."""
        return bool(self._session.rows)

    def use(self, version: int, pipeline: Pipeline) -> None:
        """Go on with other weights of the same shape."""
        session = self._session
        if pipeline.drafter is None or pipeline.drafter.taps != session.taps:
            raise ValueError(f"version {version} taps other layers of the target")
        self._pipeline, self.version = pipeline, version
        session.drafter, session.stages = pipeline.drafter, pipeline.stages
        session.state = pipeline.drafter.new_state(session.slots)
        for row in session.rows:
            row.features[:] = self._replies[row.slot].taps

    def add(self, job: Job) -> None:
        """Begin a reply; a slot must be free. Raises ValueError for what cannot be served."""
        (row,) = self._pipeline.rows([list(job.prompt)], job.params)
        if row.finish_reason is not None:
            raise ValueError(f"prompt {job.id}: max_tokens must be at least 1")
        self._session.add(row)
        self._replies[row.slot] = _Reply(job=job)

    def step(self) -> list[Record]:
        """One round of all live rows; the replies that it finished."""
        finished = []
        for row, ids in self._session.step():
            reply = self._replies[row.slot]
            reply.rounds[-1] = _trimmed(reply.rounds[-1], len(ids))
            if row.finish_reason is not None:
                finished.append(_record(self._replies.pop(row.slot), row))
        return finished

    def _watch(self, rows: Sequence[LiveRow], draft: Draft, scored: Any, verdict: Verdict) -> None:
        """Write down what the target said of every draft, and copy the taps of what is accepted."""
        tokens, parents = draft.tokens_BN.tolist(), draft.parents_BN.tolist()
        nodes: list[int] = []
        named: list[int] = []
        first = 0
        for b, size in enumerate(draft.sizes_B):
            if parents[b][:size] != list(range(-1, size - 1)):
                raise ValueError("rollouts record chains; leave the tree stage out")
            nodes += [*range(first, first + size), first + len(verdict.paths[b])]
            named += [*tokens[b][:size], verdict.tokens[b][-1]]
            first += size + 1
        said = _logprobs(scored.logits_TV, nodes, named)
        first = at = 0
        for b, (row, size) in enumerate(zip(rows, draft.sizes_B, strict=True)):
            reply, accepted = self._replies[row.slot], len(verdict.paths[b])
            reply.rounds.append(
                Judged(
                    anchor=len(row.tokens) - 1,
                    proposals=tuple(tokens[b][:size]),
                    logprobs=tuple(said[at : at + size]),
                    accepted=accepted,
                    correction=said[at + size],
                    version=self.version,
                )
            )
            at += size + 1
            waiting = len(row.tokens) - self._session.cache.lengths[row.slot]
            if scored.taps_TF is not None:
                reply.taps.append(scored.taps_TF[first : first + waiting + accepted].clone())
            first += waiting + size


def _logprobs(logits_TV: Tensor, nodes: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The log-probability of each token at its node, from unmodified logits in fp32."""
    at = torch.tensor(nodes, device=logits_TV.device)
    named = torch.tensor(tokens, device=logits_TV.device)
    chosen = logits_TV[at, named].float() - logits_TV.float().logsumexp(-1)[at]
    found: list[float] = chosen.tolist()
    return found


def _trimmed(judged: Judged, committed: int) -> Judged:
    """The round as far as the reply goes: behind its last token nothing was judged."""
    if committed > judged.accepted:
        return judged
    return replace(
        judged,
        proposals=judged.proposals[:committed],
        logprobs=judged.logprobs[:committed],
        accepted=committed,
        correction=None,
    )


def _record(reply: _Reply, row: LiveRow) -> Record:
    last = len(row.tokens) - 1
    taps = torch.cat(reply.taps)[:last] if reply.taps else torch.empty(last, 0)
    return Record(
        id=reply.job.id,
        tokens=np.asarray(row.tokens, dtype=np.int32),
        start=row.prompt_length,
        source=reply.job.source,
        temperature=row.params.temperature,
        features=taps.to("cpu", torch.bfloat16),
        rounds=tuple(reply.rounds),
    )


def roll_out(
    pipeline: Pipeline,
    jobs: Iterable[Job],
    *,
    slots: int,
    version: int = 0,
    progress: Callable[[int], None] = lambda _done: None,
) -> list[Record]:
    """Roll out all jobs, ``slots`` at a time; records in the order of the jobs."""
    waiting = list(jobs)[::-1]
    order = [job.id for job in reversed(waiting)]
    roller = Roller(pipeline, slots=min(slots, max(1, len(waiting))), version=version)
    done: dict[int, Record] = {}
    while waiting or roller.busy:
        while waiting and roller.free:
            roller.add(waiting.pop())
        done |= {record.id: record for record in roller.step()}
        progress(len(done))
    return [done[number] for number in order]


def write_rollouts(
    writer: RecordWriter,
    pipeline: Pipeline,
    job: Callable[[int], Job],
    *,
    below: int,
    slots: int,
    version: int = 0,
    progress: Callable[[int], None] = lambda _done: None,
) -> None:
    """Write shards until all ids below ``below`` are there; what is there already is kept.

    ``progress`` gets the number of finished replies, those there already included.
    """
    while writer.next_id < below:
        first = writer.next_id
        jobs = [job(first + i) for i in range(writer.origin.records_per_shard)]

        def tell(done: int, first: int = first) -> None:
            progress(first + done)

        writer.write(roll_out(pipeline, jobs, slots=slots, version=version, progress=tell))


def roll_out_forever(
    writer: RecordWriter,
    newer: Newer,
    job: Callable[[int], Job],
    *,
    slots: int,
    max_ahead: int,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _text: None,
    poll_seconds: float = 0.2,
) -> None:
    """Roll out jobs for a reader in another process until it is done, or ``stopped`` says so.

    Begins at the first id that is not written, so it may be killed and started again at any moment.
    Takes newer weights between rounds. Waits for the first weights, and whenever the next id would be
    ``max_ahead`` or more ahead of the ids that the reader has taken; that must be two shards at least.

    Raises ValueError for prompts that cannot be served, records of another kind and a full disk.
    """
    size = writer.origin.records_per_shard
    if max_ahead < 2 * size:
        raise ValueError(f"max_ahead is {max_ahead}, but must be at least two shards of {size}")

    def over() -> bool:
        return writer.done or stopped()

    first = newer(-1)
    while first is None:
        if over():
            return
        time.sleep(poll_seconds)
        first = newer(-1)
    roller = Roller(first[1], slots=slots, version=first[0])
    say(f"rolling out from record {writer.next_id} on, with version {first[0]}")
    upcoming, done = writer.next_id, dict[int, Record]()
    while not over():
        if (fresh := newer(roller.version)) is not None:
            roller.use(*fresh)
            say(f"version {fresh[0]} from record {upcoming} on")
        allowed = writer.taken + max_ahead
        while roller.free and upcoming < allowed:
            roller.add(job(upcoming))
            upcoming += 1
        if not roller.busy:
            time.sleep(poll_seconds)
            continue
        done |= {record.id: record for record in roller.step()}
        while all(number in done for number in range(writer.next_id, writer.next_id + size)):
            begin = writer.next_id
            writer.write([done.pop(number) for number in range(begin, begin + size)])
            say(f"records {begin} to {begin + size - 1} are written")
