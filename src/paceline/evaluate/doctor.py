"""Is this drafter for this target, whole, and of any use? All checks together, and a live one.

Does not know formats or single faults; without the live check no model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.core import SamplingParams
from paceline.evaluate.doctor_alarm import ENOUGH, Alarm
from paceline.evaluate.doctor_checks import CHECKS
from paceline.evaluate.doctor_facts import Finding, error, read_drafter, read_target
from paceline.evaluate.doctor_tensors import TENSOR_CHECKS


@dataclass(kw_only=True)
class Examination:
    """What was found, and what the live check saw (or why there was none)."""

    target: str
    drafter: str
    format: str
    findings: list[Finding] = field(default_factory=list)
    live: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """No error; warnings and notes are none."""
        return not any(one.level == "error" for one in self.findings)

    def describe(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        return {
            "schema": {"name": "paceline-doctor", "version": 1},
            "target": self.target,
            "drafter": self.drafter,
            "format": self.format,
            "healthy": self.healthy,
            "findings": [asdict(one) for one in self.findings],
            "live": self.live,
        }


def examine(target: str, drafter: str | Path) -> Examination:
    """All checks that need no model.

    Raises ValueError when either cannot be read.
    """
    from paceline.api import packaged_drafters

    folder = packaged_drafters().get(str(drafter), Path(drafter))
    mine, theirs = read_drafter(folder), read_target(target)
    found = Examination(target=target, drafter=str(drafter), format=mine.format)
    for check in (*CHECKS, *TENSOR_CHECKS):
        found.findings += check(mine, theirs)
    return found


def live_check(
    found: Examination, seconds: float, dtype: str = "auto", prompts: Sequence[str] | None = None
) -> None:
    """Decode built-in prompts with the drafter until enough drafts were judged or time is up.

    Adds an error when acceptance is at chance. Only for what Paceline drafts with, and only without
    errors: a drafter that cannot be right need not be tried.
    """
    if found.format not in ("dflash", "specforge"):
        found.live = {"ran": False, "why": f"Paceline does not draft with {found.format} folders"}
        return
    if not found.healthy:
        found.live = {"ran": False, "why": "there are errors to mend first"}
        return
    import paceline
    from paceline.evaluate.tasks import BUILTIN, read_task

    start = time.monotonic()
    pipeline = paceline.load(found.target, found.drafter, dtype=dtype)
    alarm = Alarm()
    asked: list[Any] = (
        list(prompts)
        if prompts is not None
        else [
            [dict(message) for message in question.turns[0]]
            for question in read_task("builtin", BUILTIN).questions
        ]
    )
    rounds, kept = 0, 0
    for prompt in asked:
        if time.monotonic() - start > seconds or rounds >= 8 * ENOUGH:
            break
        ids = pipeline.encode(prompt)
        reply = pipeline.generate([ids], SamplingParams(max_tokens=48))[0].outputs[0]
        alarm.add(reply.rounds[1:])
        rounds += len(reply.rounds) - 1
        kept += sum(one.accepted for one in reply.rounds[1:])
    found.live = {
        "ran": True,
        "seconds": time.monotonic() - start,
        "rounds": rounds,
        "accepted_drafts_per_round": kept / rounds if rounds else None,
    }
    if alarm.message:
        found.findings.append(
            error(
                "no-use",
                "live check",
                alarm.message,
                "compare taps, rotary base, mask id and tokenizer with the training run; then train",
            )
        )
