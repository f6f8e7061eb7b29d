"""One evaluation pass for a preflight: the user's prompts decoded with a drafter, and what rounds cost.

Does not know verdicts or how figures are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.core import Completion, SamplingParams
from paceline.data.formats import Message, RowError
from paceline.evaluate.asking import encode
from paceline.evaluate.methods import Method, parse_method
from paceline.evaluate.preflight import Domain, RoundCosts, domain_of
from paceline.evaluate.tasks import Question, Task
from paceline.evaluate.traces import Trace, traced
from paceline.pipeline import Pipeline

COST_PROMPTS = 4  # decoded plainly, with the drafter and with the longer block, to time rounds
COST_TOKENS = 48
Prompt = tuple[str, list[int]]  # domain, ids


def check_method(text: str) -> Method:
    """A method that drafts blocks and cuts nothing: a cut draft says nothing about its end.

    Raises ValueError for any other.
    """
    method = parse_method(text)
    if method.drafter != "dflash":
        raise ValueError(
            f"preflight looks at block drafters: dflash or dflash:FOLDER, not {text!r}"
        )
    if cuts := [name for name, _ in method.stages if name in ("first", "length", "cost")]:
        raise ValueError(f"{text}: leave out {', '.join(cuts)}; whole blocks are looked at")
    return method


def prompts_of(
    pipeline: Pipeline, tasks: Sequence[Task], tokens: int, tell: Callable[[str], None]
) -> list[Prompt]:
    """First turns with their domain: the category, else the task. What is too long is told and left.

    Raises ValueError if none is left.
    """
    found: list[Prompt] = []
    for task in tasks:
        left = 0
        for question in task.questions:
            ids = _ids(pipeline, question, tokens)
            left += ids is None
            if ids is not None:
                found.append((question.category or task.name, ids))
        if left:
            tell(f"task {task.name}: {left} prompts left out: too long, or refused by the template")
    if not found:
        raise ValueError("no usable prompt is left")
    return found


def _ids(pipeline: Pipeline, question: Question, tokens: int) -> list[int] | None:
    turn: list[Message] = [dict(message) for message in question.turns[0]]  # type: ignore[misc]
    try:
        ids = encode(pipeline, turn, question.tools)
    except RowError:
        return None
    return ids if len(ids) + tokens <= pipeline.target.max_length else None


def decoded(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch_size: int,
    progress: Callable[[int, int], None],
) -> list[tuple[str, Completion]]:
    """Every reply with its domain."""
    found: list[tuple[str, Completion]] = []
    for at in range(0, len(prompts), batch_size):
        part = prompts[at : at + batch_size]
        outputs = pipeline.generate([ids for _, ids in part], params)
        found += [(name, out.outputs[0]) for (name, _), out in zip(part, outputs, strict=True)]
        progress(len(found), len(prompts))
    return found


def domains_of(replies: Iterable[tuple[str, Completion]], block_size: int) -> list[Domain]:
    """By domain, in order of their names."""
    groups: dict[str, list[Completion]] = {}
    for name, reply in replies:
        groups.setdefault(name, []).append(reply)
    return [domain_of(name, group, block_size) for name, group in sorted(groups.items())]


def measured_costs(
    target: Any, method: Method, prompts: Sequence[Prompt], params: SamplingParams, longer: int
) -> RoundCosts:
    """Median seconds of rounds: plain, with the drafter's block, and with the longer one.

    The longer block is drafted and verified for real by the drafter as it is: what a round of it costs
    does not depend on how much is accepted. A refiner that is tied to its block is left out of all.
    """
    few = [ids for _, ids in prompts[:COST_PROMPTS]]
    short = SamplingParams(
        max_tokens=min(COST_TOKENS, params.max_tokens), temperature=params.temperature, seed=0
    )
    name = "dflash" if method.choice is None else f"dflash:{method.choice}"
    base = parse_method(name).pipeline(target)
    assert base.drafter is not None
    block = base.drafter.config.block_size  # type: ignore[attr-defined]
    wide = parse_method(f"{name}+block:{longer}").pipeline(target)
    pipelines = [Pipeline(target=target), base, wide]
    times: list[list[tuple[float, float]]] = [[], [], []]
    for pipeline in pipelines:
        traced(pipeline, few, SamplingParams(max_tokens=4))  # kernels are chosen
    for _ in range(3):
        for at, pipeline in enumerate(pipelines):
            times[at] += [_per_round(trace) for trace in traced(pipeline, few, short)]
    draft, rest = (
        [statistics.median(pair[part] for pair in each) for each in times] for part in (0, 1)
    )
    return RoundCosts(
        plain=rest[0],
        draft=draft[1],
        verify=((block - 1, rest[1]), (longer - 1, rest[2] + draft[2] - draft[1])),
    )


def _per_round(trace: Trace) -> tuple[float, float]:
    """Seconds of drafting and of all else, a round of the whole batch."""
    passes = max(trace.passes, 1e-9)
    seconds = trace.seconds
    return seconds.draft / passes, (seconds.total - seconds.draft) / passes
