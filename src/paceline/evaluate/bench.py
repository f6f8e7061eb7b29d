"""Measures methods against plain decoding, both in one process, chunk by chunk, resumable.

Knows nothing about how drafts are made, what a task's file looks like, or how figures are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from paceline.core import SamplingParams
from paceline.data.fingerprint import fingerprint_of
from paceline.data.formats import Message, RowError
from paceline.evaluate.asking import encode, refusal
from paceline.evaluate.doctor_alarm import Alarm, can_alarm
from paceline.evaluate.entries import Entry, counted, summarise
from paceline.evaluate.machine import check_device, environment
from paceline.evaluate.methods import parse_methods
from paceline.evaluate.side import SideFile, side_path
from paceline.evaluate.tasks import Question, Task, load_tasks
from paceline.evaluate.traces import traced
from paceline.evaluate.verify import ExactArithmetic, judge
from paceline.pipeline import Pipeline

SCHEMA = {"name": "paceline-bench", "version": 2}
WARM_UP_TOKENS = 16
MEASUREMENTS = 3  # of every chunk where a setting has fewer chunks than that: a median needs some


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
    device: str = "cpu"
    accept: str = "match"

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("methods is empty; name at least one, plain for the baseline alone")
        if self.accept not in ("match", "rejection"):
            raise ValueError(f"accept {self.accept!r} is not match or rejection")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1; got {self.limit}")
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one table row holds constant, and the chunks of questions that are decoded together."""

    temperature: float
    batch_size: int
    task: Task

    @property
    def chunks(self) -> list[tuple[Question, ...]]:
        """The task's questions, ``batch_size`` at a time."""
        questions, size = self.task.questions, self.batch_size
        return [questions[at : at + size] for at in range(0, len(questions), size)]

    @property
    def repeats(self) -> int:
        """How often every chunk is timed."""
        return MEASUREMENTS if len(self.chunks) < MEASUREMENTS else 1

    @property
    def key(self) -> str:
        """Its parts in the side file."""
        return f"{self.task.name}/{self.temperature}/{self.batch_size}"

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.task.name}, batch {self.batch_size}, T {self.temperature:g}"


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
        self._warm: set[tuple[int, float]] = set()
        self._done = 0
        alarmed = [name for name, pipeline in self.pipelines.items() if can_alarm(pipeline)]
        self._alarms = {name: Alarm() for name in alarmed}
        self.ended: dict[str, dict[int, str]] = {task.name: {} for task in self.tasks}

    @property
    def settings(self) -> list[Setting]:
        """In the order they are measured."""
        every = product(self.arguments.temperatures, self.arguments.batch_sizes, self.tasks)
        return [Setting(temperature=t, batch_size=b, task=task) for t, b, task in every]

    def run(self) -> list[Entry]:
        """Every reply of every method; the parts in the side file are not measured again.

        Afterwards ``ended`` has, by task and row, why a question was not asked to its last turn.
        """
        found: list[Entry] = []
        for setting in self.settings:
            found += self._judged(setting, self._timed(setting))
            self.tell(f"{setting.label}: done")
        return found

    def _timed(self, setting: Setting) -> list[Entry]:
        """One setting's replies, chunk by chunk, all of it again where it has few chunks."""
        total = sum(each.task.requests * each.repeats for each in self.settings)
        found: list[Entry] = []
        for repeat, (chunk, questions) in product(
            range(setting.repeats), enumerate(setting.chunks)
        ):
            key = f"{setting.key}/{repeat}/{chunk}"
            if key not in self.side.parts:
                self._warm_up(setting, questions)
                entries, ended = self._measure(setting, chunk, repeat)
                records = [asdict(entry) for entry in entries]
                self.side.add(key, {"entries": records, "ended": ended})
            part = self.side.parts[key]
            for row, reason in part["ended"]:
                self._end(setting.task.name, row, reason)
            found += [Entry(**record) for record in part["entries"]]
            self._watch(found[-len(part["entries"]) :])
            asked = sum(len(question.turns) for question in questions)
            self._done += asked * len(self.pipelines)
            self.progress(self._done, total * len(self.pipelines))
        return found

    def _watch(self, entries: Sequence[Entry]) -> None:
        """Tell once of a method whose drafter contributes nothing."""
        for entry in entries:
            if entry.method in self._alarms and entry.repeat == 0:
                said = self._alarms[entry.method].add(entry.reply.rounds)
                if said is not None:
                    self.tell(f"warning: {entry.method}: {said}")

    def _end(self, task: str, row: int, reason: str) -> None:
        known = self.ended[task]
        if reason not in known.values():
            self.tell(f"task {task}, row {row}: ended early ({reason}); others are only counted")
        known.setdefault(row, reason)

    def _measure(
        self, setting: Setting, chunk: int, repeat: int
    ) -> tuple[list[Entry], list[tuple[int, str]]]:
        """One chunk: every turn by every method, each time beginning with another method.

        Later turns follow plain's reply, so that all methods answer the same prompts. Also returns
        the rows of questions that the target cannot be asked any further, each with the reason.
        """
        questions = setting.chunks[chunk]
        talks: list[list[Message]] = [[] for _ in questions]
        entries: list[Entry] = []
        ended: dict[int, str] = {}
        names, first = list(self.pipelines), repeat * len(setting.chunks) + chunk
        for turn in range(max(len(question.turns) for question in questions)):
            live, prompts = [], []
            for i, question in enumerate(questions):
                if turn >= len(question.turns) or question.row in ended:
                    continue
                talks[i] += question.turns[turn]
                try:
                    prompts.append(self._prompt(talks[i], question.tools))
                    live.append(i)
                except RowError as error:
                    ended[question.row] = f"turn-{turn + 1}-{error.reason}"
            if not live:
                break
            params = [self._params(questions[i].row, turn, setting.temperature) for i in live]
            start = (first + turn) % len(names)
            order = names[start:] + names[:start]
            traces = {name: traced(self.pipelines[name], prompts, params) for name in order}
            place = {"task": setting.task.name, "batch_size": setting.batch_size, "turn": turn}
            place |= {"temperature": setting.temperature, "chunk": chunk, "repeat": repeat}
            place |= {"together": len(live)}
            for name in names:
                for i, trace in zip(live, traces[name], strict=True):
                    of = {"method": name, "row": questions[i].row}
                    of |= {"category": questions[i].category}
                    entries.append(Entry.of(trace, **of, **place))
            for i, base in zip(live, traces["plain"], strict=True):
                talks[i].append({"role": "assistant", "content": base.reply.text})
        return entries, list(ended.items())

    def _judged(self, setting: Setting, entries: list[Entry]) -> list[Entry]:
        """What differs from plain, judged once the setting is timed: the umpire's copy of the weights
        in fp32 must not be in the way, nor stay."""
        key, exact = f"{setting.key}/judged", ExactArithmetic(self.pipelines["plain"].target)
        plain = {e.request: e for e in entries if e.method == "plain" and e.repeat == 0}
        split = [
            i
            for i, e in enumerate(entries)
            if e.repeat == 0 and e.token_ids != plain[e.request].token_ids
        ]
        if split and key not in self.side.parts:
            found = [self._judge(exact, entries[i], plain[entries[i].request]) for i in split]
            self.side.add(key, found)
        for i, difference in zip(split, self.side.parts.get(key, ()), strict=True):
            entries[i] = replace(entries[i], difference=difference)
            self._tell_bug(entries[i])
        return entries

    def _judge(self, exact: ExactArithmetic, entry: Entry, plain: Entry) -> dict[str, Any]:
        params = self._params(entry.row, entry.turn, entry.temperature)
        pipeline, start = self.pipelines[entry.method], entry.prompt_ids
        wanted, got = plain.token_ids, entry.token_ids
        if pipeline.accept == "rejection" and entry.temperature > 0:
            return other_draw(wanted, got)
        return asdict(judge(pipeline, exact, entry.row, start, wanted, got, params))

    def _tell_bug(self, entry: Entry) -> None:
        found = entry.difference
        if found is not None and found["verdict"] == "bug":
            self.tell(
                f"bug: {entry.method}, {entry.task} row {entry.row} turn {entry.turn}, batch "
                f"{entry.batch_size}, T {entry.temperature}: token {found['position']} is "
                f"{found['speculative_token']} instead of {found['plain_token']}, margin "
                f"{found['margin']}, rounding {found['rounding']}"
            )

    def _prompt(self, messages: list[Message], tools: Any) -> list[int]:
        """Ids of a conversation so far. Raises RowError if the template or the context refuses."""
        plain = self.pipelines["plain"]
        ids = encode(plain, messages, tools)
        if len(ids) + self.arguments.max_new_tokens > plain.target.max_length:
            raise RowError("too-long")
        return ids

    def _params(self, row: int, turn: int, temperature: float) -> SamplingParams:
        """The seed belongs to the request, so that every method draws the same numbers."""
        tokens, seed = self.arguments.max_new_tokens, 1000 * row + turn
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)

    def _warm_up(self, setting: Setting, questions: Sequence[Question]) -> None:
        """Once a process, batch size and temperature: kernels are chosen and memory is found."""
        if (setting.batch_size, setting.temperature) in self._warm:
            return
        self._warm.add((setting.batch_size, setting.temperature))
        tokens = min(WARM_UP_TOKENS, self.arguments.max_new_tokens)
        params = SamplingParams(max_tokens=tokens, temperature=setting.temperature, seed=0)
        prompts = []
        for question in questions:
            with suppress(RowError):  # counted when it is measured
                prompts.append(self._prompt(list(question.turns[0]), question.tools))
        for pipeline in self.pipelines.values():
            traced(pipeline, prompts, params)


def other_draw(wanted: Sequence[int], got: Sequence[int]) -> dict[str, Any]:
    """The verdict on a sampled reply under rejection, which draws other numbers than plain does."""
    pairs = zip(wanted, got, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
    tokens = [ids[at] if at < len(ids) else None for ids in (wanted, got)]
    return {
        "verdict": "draw",
        "position": at,
        "plain_token": tokens[0],
        "speculative_token": tokens[1],
        "margin": None,
        "rounding": None,
    }


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
        ValueError: an unknown method, stage or task, a file that is missing or holds no prompt, a
            device that is not there, or another bench's side file.
    """
    import paceline

    methods = parse_methods(arguments.methods)
    check_device(arguments.device)
    tasks = load_tasks(arguments.tasks, arguments.tasks_dir, arguments.limit, tell=tell)
    target = paceline.load(
        arguments.target, None, dtype=arguments.dtype, device=arguments.device
    ).target
    pipelines = {method.name: method.pipeline(target, arguments.accept) for method in methods}

    def fits(question: Question) -> str | None:
        return refusal(pipelines["plain"], question, arguments.max_new_tokens)

    tasks = [task.keep(fits, tell) for task in tasks]
    described = [method.describe(target, arguments.accept) for method in methods]
    head = header(arguments, target, described, tasks)
    side = SideFile(path=None if out is None else side_path(out), header=head)
    if side.parts:
        tell(f"{side.path}: going on after {len(side.parts)} finished parts")
    bench = Bench(
        pipelines=pipelines,
        tasks=tasks,
        arguments=arguments,
        side=side,
        tell=tell,
        progress=progress,
    )
    entries = bench.run()
    return document(head, entries, bench.ended), side


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
            "accept": arguments.accept,
        },
        "methods": methods,
        "tasks": [task.describe() for task in tasks],
    }


def document(
    head: Mapping[str, Any],
    entries: Sequence[Entry],
    ended: Mapping[str, Mapping[int, str]],
) -> dict[str, Any]:
    """The whole of docs/bench.md; ``ended`` goes into the tasks' ``left_out``."""
    tasks = [
        task | {"left_out": task["left_out"] | Counter(ended[task["name"]].values())}
        for task in head["tasks"]
    ]
    shown = [entry.shown() for entry in counted(entries)]
    return {**head, "tasks": tasks, "runs": summarise(entries), "replies": shown}
