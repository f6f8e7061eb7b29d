"""Measures methods against plain decoding, both in one process, chunk by chunk, resumable.

Knows nothing about how drafts are made, what a task's file looks like, or how figures are shown.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from paceline.core import SamplingParams
from paceline.data.fingerprint import fingerprint_of
from paceline.data.formats import Message, RowError
from paceline.data.template import Template
from paceline.evaluate.entries import Entry, summarise
from paceline.evaluate.methods import parse_methods
from paceline.evaluate.tasks import Question, Task, find_task, load_tasks
from paceline.evaluate.traces import Trace, traced
from paceline.evaluate.verify import ExactArithmetic, judge
from paceline.pipeline import Pipeline

SCHEMA = {"name": "paceline-bench", "version": 1}
WARM_UP_TOKENS = 16
SHOWN_CHANGES = 4
CPU_FEATURES = frozenset(
    ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16")
    + ("amx_int8", "asimd", "sve", "sve2", "bf16", "i8mm")
)


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """What a bench measures; see ``paceline bench --help``.

    Raises:
        ValueError: an empty or repeated value, or one out of its range.
    """

    target: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    tasks_dir: Path | None = None
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    limit: int | None = None
    max_new_tokens: int = 256
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("tasks", "batch_sizes", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name each value once; got {values!r}")
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch size must be at least 1; got {min(self.batch_sizes)}")
        if self.max_new_tokens < 2:
            raise ValueError("max_new_tokens must be at least 2: the prefill makes the first")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)


@dataclass(kw_only=True)
class SideFile:
    """Finished chunks on disk, so that the same bench goes on where it stopped.

    The file beside the result appears whole or not at all. ``path`` None keeps nothing.

    Raises:
        ValueError: the file holds chunks of another bench; the message says what differs.
    """

    path: Path | None
    header: Mapping[str, Any]
    chunks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            was, self.chunks = found["header"], found["chunks"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}: not a bench's side file ({error!r}); delete it"
            ) from None
        changes = _changes(was, json.loads(json.dumps(self.header)))
        if len(changes) > SHOWN_CHANGES:
            changes[SHOWN_CHANGES:] = [f"{len(changes) - SHOWN_CHANGES} more"]
        if changes:
            raise ValueError(
                f"{self.path} holds the unfinished results of another bench ({'; '.join(changes)}); "
                "finish that one with its own command, write to another file, or delete it"
            )

    def add(self, key: str, entries: Sequence[Entry]) -> None:
        """Keep a finished chunk."""
        self.chunks[key] = [asdict(entry) for entry in entries]
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        work = self.path.with_name(self.path.name + ".tmp")
        work.write_text(
            json.dumps({"header": self.header, "chunks": self.chunks}), encoding="utf-8"
        )
        os.replace(work, self.path)

    def remove(self) -> None:
        """Forget the chunks: the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _changes(was: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two headers, as `name was x, is now y`."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*was, *(key for key in now if key not in was)]
        lists = [_changes(was.get(key), now.get(key), f"{name} {key}".strip()) for key in keys]
        return sum(lists, [])
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        lists = [
            _changes(a, b, f"{name} {a.get('name', '') if isinstance(a, dict) else i}")
            for i, (a, b) in enumerate(zip(was, now, strict=True))
        ]
        return sum(lists, [])
    return [] if was == now else [f"{name} was {was}, is now {now}"]


def side_path(out: Path) -> Path:
    """Where the unfinished chunks of ``out`` are."""
    return out.with_name(out.name + ".partial")


@dataclass(kw_only=True)
class Bench:
    """Pipelines by method name (``plain`` among them), tasks, and where finished chunks go."""

    pipelines: Mapping[str, Pipeline]
    tasks: Sequence[Task]
    arguments: BenchArguments
    side: SideFile
    tell: Callable[[str], None] = lambda line: None
    progress: Callable[[int, int], None] = lambda done, total: None  # replies

    def __post_init__(self) -> None:
        self._exact = ExactArithmetic(self.pipelines["plain"].target)
        self._warm: set[int] = set()

    def run(self) -> list[Entry]:
        """Every reply of every method, chunk by chunk; those of the side file are not repeated."""
        settings = list(
            product(self.arguments.temperatures, self.arguments.batch_sizes, self.tasks)
        )
        total = sum(task.requests for _, _, task in settings) * len(self.pipelines)
        done, found = 0, []
        for temperature, batch_size, task in settings:
            for chunk, at in enumerate(range(0, len(task.questions), batch_size)):
                questions = task.questions[at : at + batch_size]
                key = f"{task.name}/{temperature}/{batch_size}/{chunk}"
                if key not in self.side.chunks:
                    self._warm_up(batch_size, questions)
                    place = {"task": task.name, "batch_size": batch_size, "chunk": chunk}
                    place["temperature"] = temperature
                    self.side.add(key, self._measure(questions, place))
                entries = [Entry(**record) for record in self.side.chunks[key]]
                found += entries
                done += len(entries)
                self.progress(done, total)
            self.tell(f"{task.name}, batch {batch_size}, T {temperature:g}: done")
        return found

    def _measure(self, questions: Sequence[Question], place: dict[str, Any]) -> list[Entry]:
        """One chunk: every turn by every method, the order reversed every other time.

        Later turns follow plain's reply, so that all methods answer the same prompts.
        """
        talks: list[list[Message]] = [[] for _ in questions]
        entries = []
        for turn in range(max(len(question.turns) for question in questions)):
            live = [i for i, question in enumerate(questions) if turn < len(question.turns)]
            for i in live:
                talks[i] += questions[i].turns[turn]
            prompts = [self._encode(talks[i], questions[i].tools) for i in live]
            params = [self._params(questions[i], turn, place["temperature"]) for i in live]
            order = list(self.pipelines)[:: -1 if (place["chunk"] + turn) % 2 else 1]
            traces = {name: traced(self.pipelines[name], prompts, params) for name in order}
            for name in self.pipelines:
                for i, trace, base, chosen in zip(
                    live, traces[name], traces["plain"], params, strict=True
                ):
                    where = {"method": name, "row": questions[i].row, "turn": turn}
                    where |= {"category": questions[i].category}
                    entries.append(self._entry(trace, base, chosen, where | place))
            for i, base in zip(live, traces["plain"], strict=True):
                talks[i].append({"role": "assistant", "content": base.reply.text})
        return entries

    def _entry(
        self, trace: Trace, base: Trace, params: SamplingParams, place: dict[str, Any]
    ) -> Entry:
        wanted, got, difference = base.reply.token_ids, trace.reply.token_ids, None
        if wanted != got:
            pipeline = self.pipelines[place["method"]]
            start = trace.prompt_ids
            difference = judge(pipeline, self._exact, place["row"], start, wanted, got, params)
            if difference.verdict == "bug":
                self.tell(
                    f"bug: {place['method']}, {place['task']} row {place['row']} turn "
                    f"{place['turn']}, batch {place['batch_size']}, T {place['temperature']}: "
                    f"token {difference.position} is {difference.speculative_token} instead of "
                    f"{difference.plain_token}, margin {difference.margin}, "
                    f"rounding {difference.rounding}"
                )
        return Entry.of(trace, difference, **place)

    def _encode(self, messages: list[Message], tools: Any) -> list[int]:
        return encode(self.pipelines["plain"], messages, tools)

    def _params(self, question: Question, turn: int, temperature: float) -> SamplingParams:
        """The seed belongs to the request, so that every method draws the same numbers."""
        tokens, seed = self.arguments.max_new_tokens, 1000 * question.row + turn
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)

    def _warm_up(self, batch_size: int, questions: Sequence[Question]) -> None:
        """Once a process and batch size: kernels are chosen and memory is found, uncounted."""
        if batch_size in self._warm:
            return
        self._warm.add(batch_size)
        tokens = min(WARM_UP_TOKENS, self.arguments.max_new_tokens)
        prompts = [self._encode(list(q.turns[0]), q.tools) for q in questions]
        for pipeline in self.pipelines.values():
            traced(pipeline, prompts, SamplingParams(max_tokens=tokens))


def encode(pipeline: Pipeline, messages: list[Message], tools: Any = None) -> list[int]:
    """Ids of a conversation by the target's chat template; without one a single text as it is.

    Raises RowError if the template refuses, or is missing where there is more than one text.
    """
    tokenizer = pipeline.target.tokenizer
    if tokenizer is None:
        raise ValueError("this target has no tokenizer; a bench needs one")
    if tokenizer.chat_template:
        return Template(tokenizer=tokenizer).prompt(messages, tools)
    if len(messages) > 1 or tools:
        raise RowError("no-chat-template", "the target has no chat template for a conversation")
    return pipeline.encode(str(messages[0]["content"]))


def refusal(pipeline: Pipeline, question: Question, max_new_tokens: int) -> str | None:
    """Why this target cannot be asked this question in full, in a word; None if it can."""
    talk: list[Message] = []
    for turn in question.turns:
        talk += [*turn, {"role": "assistant", "content": "-"}]  # stands for the reply
    try:
        size = len(encode(pipeline, talk[:-1], question.tools))
    except RowError as error:
        return error.reason
    room = pipeline.target.max_length - len(question.turns) * max_new_tokens
    return None if size <= room else "too-long"


def run_bench(
    arguments: BenchArguments,
    out: Path | None,
    *,
    tell: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], SideFile]:
    """Load everything, measure, and return the document of docs/bench.md and the side file.

    The caller writes the document and then removes the side file.

    Raises:
        ValueError: an unknown method, stage or task, a missing file, or another bench's side file.
    """
    import paceline

    methods = parse_methods(arguments.methods)
    for name in arguments.tasks:
        find_task(name, arguments.tasks_dir)
    target = paceline.load(arguments.target, None, dtype=arguments.dtype).target
    pipelines = {method.name: method.pipeline(target) for method in methods}

    def fits(question: Question) -> str | None:
        return refusal(pipelines["plain"], question, arguments.max_new_tokens)

    tasks = load_tasks(arguments.tasks, arguments.tasks_dir, arguments.limit, fits=fits, tell=tell)
    described = [method.describe(target) for method in methods]
    head = header(arguments, target, described, tasks)
    side = SideFile(path=None if out is None else side_path(out), header=head)
    if side.chunks:
        tell(f"{side.path}: going on after {len(side.chunks)} finished chunks")
    bench = Bench(
        pipelines=pipelines,
        tasks=tasks,
        arguments=arguments,
        side=side,
        tell=tell,
        progress=progress,
    )
    return document(head, bench.run()), side


def header(
    arguments: BenchArguments, target: Any, methods: list[dict[str, Any]], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Everything of the document but its figures: what must agree for two benches to be one."""
    return {
        "schema": SCHEMA,
        "environment": environment(target),
        "target": {
            "name": Path(target.name).name,
            "architecture": type(target.model).__name__,
            "parameters": sum(weight.numel() for weight in target.model.parameters()),
            "layers": target.num_layers,
            "vocab_size": target.vocab_size,
            "context": target.max_length,
            "fingerprint": asdict(fingerprint_of(target.name, target.tokenizer)),
        },
        "arguments": {
            "methods": [method["name"] for method in methods],
            "tasks": [task.name for task in tasks],
            "batch_sizes": list(arguments.batch_sizes),
            "temperatures": list(arguments.temperatures),
            "limit": arguments.limit,
            "max_new_tokens": arguments.max_new_tokens,
        },
        "methods": methods,
        "tasks": [task.describe() for task in tasks],
    }


def document(head: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """The whole of docs/bench.md."""
    shown = [entry.shown() for entry in entries]
    return {**head, "runs": summarise(entries), "replies": shown}


def environment(target: Any) -> dict[str, Any]:
    """Versions and the kind of machine; neither its name nor any path."""
    versions = {name: importlib.metadata.version(name) for name in ("paceline", "transformers")}
    return {
        **versions,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": target.device.type,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(target.dtype, "fp32"),
        "cpu_features": _cpu_features(),
    }


def _cpu_features() -> list[str]:
    """What Linux says of the first processor, as far as it matters for matrix products."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(CPU_FEATURES.intersection(flags.split()))
