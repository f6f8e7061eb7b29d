"""Replies with their clocks: one batch of prompts decoded together, phase by phase.

Knows nothing about tasks, baselines or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.core import Completion, Row, SamplingParams
from paceline.decode.loop import Seconds
from paceline.pipeline import Pipeline, outputs_of

PHASES = tuple(field.name for field in fields(Seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One reply and its share of the batch's time: a pass is shared equally by its live rows."""

    prompt_ids: list[int]
    reply: Completion
    seconds: Seconds  # after the prefill round, as the reply's counts are
    prefill: float  # seconds of the first round
    passes: float  # share of the passes after the prefill; 1 each where the row was alone

    @property
    def decoded(self) -> int:
        """Tokens committed after the prefill round, in ``seconds.total``."""
        return sum(r.committed for r in self.reply.rounds[1:])


def traced(
    pipeline: Pipeline,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    each: Callable[[Row], None] = lambda row: None,
) -> list[Trace]:
    """Decode all prompts as one batch; ``each`` sees every row after each of its rounds.

    The rows start together, so that the first round is the prefill of all of them. Phases are host
    time: on an accelerator a phase ends when its work is issued, only the total is certain.

    Raises:
        ValueError: a request that cannot be served, or parameters for several samples.
    """
    rows = pipeline.rows(prompts, params)
    if len(rows) != len(prompts):
        raise ValueError("one reply is timed per prompt; n must be 1")
    clocks = [Seconds() for _ in rows]
    prefill, passes = [0.0] * len(rows), [0.0] * len(rows)
    session = pipeline.session(max(1, len(rows)))
    for row in rows:
        if row.finish_reason is None:
            session.add(row)
    while session.rows:
        session.seconds = Seconds()
        committed = session.step()
        for row, _ in committed:
            if len(row.rounds) == 1:
                prefill[row.request] = session.seconds.total / len(committed)
            else:
                passes[row.request] += 1 / len(committed)
                for phase in PHASES:
                    share = getattr(session.seconds, phase) / len(committed)
                    setattr(clocks[row.request], phase, getattr(clocks[row.request], phase) + share)
            each(row)
    return [
        Trace(
            prompt_ids=output.prompt_token_ids,
            reply=output.outputs[0],
            seconds=clock,
            prefill=first,
            passes=share,
        )
        for output, clock, first, share in zip(
            outputs_of(rows), clocks, prefill, passes, strict=True
        )
    ]
