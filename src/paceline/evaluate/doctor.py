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
from paceline.drafters.dflash import DFlashConfig
from paceline.evaluate.doctor_alarm import ENOUGH, Alarm
from paceline.evaluate.doctor_checks import CHECKS
from paceline.evaluate.doctor_facts import (
    DrafterFacts,
    Finding,
    error,
    read_drafter,
    read_target,
    warning,
)
from paceline.evaluate.doctor_serving import SERVING_CHECKS
from paceline.evaluate.doctor_tensors import TENSOR_CHECKS

OURS = ("dflash", "specforge")  # formats that Paceline drafts with


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
    if not folder.is_dir():
        known = ", ".join(packaged_drafters())
        raise ValueError(
            f"no drafter {str(drafter)!r}: neither a folder nor a packaged one ({known})"
        )
    mine, theirs = read_drafter(folder), read_target(target)
    found = Examination(target=target, drafter=str(drafter), format=mine.format)
    for check in (*CHECKS, *SERVING_CHECKS, *TENSOR_CHECKS):
        found.findings += check(mine, theirs)
    if found.healthy and found.format in OURS:
        found.findings += refusal(mine)
    return found


def refusal(drafter: DrafterFacts) -> list[Finding]:
    """What Paceline's own reader has against a config with which no check finds fault.

    A missing key is an error: readers guess it, and differently. What Paceline lacks, others may have.
    """
    try:
        DFlashConfig.from_dict(drafter.raw)
    except (ValueError, TypeError) as problem:
        said = f"Paceline's reader refuses it: {problem}"
        if "lacks" in said:
            return [error("config-refused", "config.json", said, "write the key as trained")]
        return [warning("config-refused", "config.json", said, "use an engine that has this")]
    return []


def _why_not(found: Examination) -> str | None:
    """Why there is no live check; None if there can be one."""
    if found.format not in OURS:
        return f"Paceline does not draft with {found.format} folders"
    if not found.healthy:
        return "there are errors to mend first"
    if any(one.code == "config-refused" for one in found.findings):
        return "Paceline cannot read it"
    return None


def live_check(
    found: Examination, seconds: float, dtype: str = "auto", prompts: Sequence[str] | None = None
) -> None:
    """Decode built-in prompts with the drafter until enough drafts were judged or time is up.

    Adds an error when acceptance is at chance. Only for what Paceline drafts with, and only without
    errors: a drafter that cannot be right need not be tried.
    """
    if (why := _why_not(found)) is not None:
        found.live = {"ran": False, "why": why}
        return
    import paceline
    from paceline.evaluate.tasks import BUILTIN, read_task

    try:
        pipeline = paceline.load(found.target, found.drafter, dtype=dtype)
    except (ValueError, OSError) as problem:
        found.live = {"ran": False, "why": "the drafter cannot be loaded"}
        fix = "what a check above does not name, this message does: export the drafter again"
        found.findings.append(error("load-refused", "live check", str(problem), fix))
        return
    start = time.monotonic()  # loading is not what is tried
    alarm = Alarm()
    questions = read_task("builtin", BUILTIN).questions
    builtin = [[dict(message) for message in question.turns[0]] for question in questions]
    asked: list[Any] = builtin if prompts is None else list(prompts)
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
    if rounds < ENOUGH:
        fix = "give more --seconds"
        found.findings.append(
            warning("live-short", "live check", f"{rounds} rounds are too few to say", fix)
        )
    if alarm.message:
        found.findings.append(
            error(
                "no-use",
                "live check",
                alarm.message,
                "compare taps, rotary base, mask id and tokenizer with the training run; then train",
            )
        )
