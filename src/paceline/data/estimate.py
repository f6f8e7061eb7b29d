"""How much a run will take: rows, tokens, bytes of features, hours at a measured rate.

Knows nothing about files; it counts what it is given.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paceline.core import SamplingParams
from paceline.pipeline import Pipeline

FEATURE_BYTES = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Totals; hours are None where no rate (tokens per second) is known."""

    rows: int
    tokens: int
    supervised: int
    feature_bytes: int
    capture_rate: float | None = None
    generate_rate: float | None = None

    def at(self, capture_rate: float | None, generate_rate: float | None) -> Estimate:
        """The same totals at these rates, in tokens per second."""
        return replace(self, capture_rate=capture_rate, generate_rate=generate_rate)

    def measured(
        self,
        pipeline: Pipeline,
        prompts: Sequence[list[int]],
        batch_size: int,
        seconds: float,
        *,
        capture: bool = False,
    ) -> Estimate:
        """The same totals at rates measured now, about ``seconds`` each."""
        rate = measure_capture(pipeline.target, prompts, seconds) if capture else None
        drawn = measure_generation(pipeline, prompts, batch_size=batch_size, seconds=seconds)
        return self.at(rate, drawn)

    @property
    def capture_hours(self) -> float | None:
        """One forward over every token."""
        return self.tokens / self.capture_rate / 3600 if self.capture_rate else None

    @property
    def generate_hours(self) -> float | None:
        """Every supervised token drawn."""
        return self.supervised / self.generate_rate / 3600 if self.generate_rate else None

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "capture_hours": self.capture_hours,
            "generate_hours": self.generate_hours,
        }

    def lines(self) -> list[str]:
        """For people."""
        out = [
            f"{self.rows:,} rows, {self.tokens:,} tokens, {self.supervised:,} of them replies",
            f"features: {_size(self.feature_bytes)} (tokens x taps x hidden x {FEATURE_BYTES} bytes)",
        ]
        for what, rate, hours in (
            ("capture", self.capture_rate, self.capture_hours),
            ("generation", self.generate_rate, self.generate_hours),
        ):
            if rate and hours is not None:
                out.append(f"{what}: {_time(hours)} at {rate:,.0f} tokens/s")
        return out


def estimate(
    lengths: Iterable[tuple[int, int]],
    *,
    taps: int,
    hidden_size: int,
    capture_rate: float | None = None,
    generate_rate: float | None = None,
) -> Estimate:
    """Add up rows given as (prompt tokens, reply tokens). Rates are tokens per second."""
    rows = prompt = reply = 0
    for before, after in lengths:
        rows, prompt, reply = rows + 1, prompt + before, reply + after
    return Estimate(
        rows=rows,
        tokens=prompt + reply,
        supervised=reply,
        feature_bytes=(prompt + reply) * taps * hidden_size * FEATURE_BYTES,
        capture_rate=capture_rate,
        generate_rate=generate_rate,
    )


@torch.inference_mode()
def measure_capture(target: Any, rows: Sequence[Sequence[int]], seconds: float = 3.0) -> float:
    """Tokens per second of the target's layers over these rows, one at a time, without its head.

    A lower bound: capture batches rows and stops behind the last tap.
    """
    decoder = target.model.get_decoder()
    tokens, spent = 0, 0.0
    for index in range(10**6):
        ids = list(rows[index % len(rows)])[: target.max_length]
        began = time.perf_counter()
        decoder(input_ids=torch.tensor([ids], device=target.device), use_cache=False)
        if index:  # the first call builds kernels
            tokens, spent = tokens + len(ids), spent + time.perf_counter() - began
        if spent >= seconds:
            break
    return tokens / spent


def measure_generation(
    pipeline: Pipeline, prompts: Sequence[Sequence[int]], *, batch_size: int, seconds: float = 3.0
) -> float:
    """Reply tokens per second of a full batch after its first round, prompts as given."""
    room = pipeline.target.max_length - 64  # a reply has to fit behind it
    many = [list(prompts[i % len(prompts)])[-room:] for i in range(batch_size)]
    session = pipeline.session(batch_size)
    for row in pipeline.rows(many, SamplingParams(max_tokens=10**6, ignore_eos=True)):
        session.add(row)
    session.step()
    began, tokens = time.perf_counter(), 0
    while session.rows and time.perf_counter() - began < seconds:
        tokens += sum(len(ids) for _, ids in session.step())
    return tokens / max(time.perf_counter() - began, 1e-9)


def _size(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _time(hours: float) -> str:
    if hours * 3600 < 120:
        return f"{hours * 3600:.0f} seconds"
    return f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.1f} hours"
