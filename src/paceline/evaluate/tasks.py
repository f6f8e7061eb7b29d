"""Benchmark tasks: prompts with categories and turns, from our own file, public files or a user's.

Knows nothing about models or methods. Which prompts a limit keeps depends on the file alone.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.formats import Conversation, Message, RowError, parse_row, raw_rows

BUILTIN = Path(__file__).with_name("builtin.jsonl")
FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "humaneval": "humaneval.jsonl",
    "spec_bench": "spec_bench.jsonl",
}
# Spec-Bench reports its eight MT-bench categories as one of six subtasks.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row: ``turns`` are asked one after another, each after the model's reply to the last.

    A turn is the messages to append before the model answers.
    """

    row: int  # 0-based among the file's rows, malformed ones included
    category: str | None
    turns: tuple[tuple[Message, ...], ...]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Questions in the order of the file. ``left_out`` counts the rows that are none, by reason."""

    name: str
    rows: int
    questions: tuple[Question, ...]
    left_out: dict[str, int]

    @property
    def categories(self) -> dict[str, int]:
        """Category -> requests (turns); empty where the file has none."""
        counts: Counter[str] = Counter()
        for question in self.questions:
            if question.category is not None:
                counts[question.category] += len(question.turns)
        return dict(counts)

    @property
    def requests(self) -> int:
        """Turns of all questions."""
        return sum(len(question.turns) for question in self.questions)

    def describe(self) -> dict[str, Any]:
        """The task as it stands in the bench's JSON."""
        asked = [[q.row, q.category, q.turns, q.tools] for q in self.questions]
        text = json.dumps(asked, sort_keys=True)
        return {
            "name": self.name,
            "rows": self.rows,
            "prompts": len(self.questions),
            "requests": self.requests,
            "left_out": self.left_out,
            "categories": self.categories,
            "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def keep(
        self,
        fits: Callable[[Question], str | None],
        tell: Callable[[str], None] = lambda line: None,
    ) -> Task:
        """Without the questions for which ``fits`` names a reason; they are counted and told by it.

        Raises ValueError if none is left.
        """
        kept, out = [], Counter(self.left_out)
        for question in self.questions:
            reason = fits(question)
            if reason is None:
                kept.append(question)
            else:
                out[reason] += 1
        if not kept:
            raise ValueError(f"task {self.name}: no usable prompt ({dict(out)})")
        if new := out - Counter(self.left_out):
            tell(f"task {self.name}: prompts left out: {_counts(new)}")
        return replace(self, questions=tuple(kept), left_out=dict(out))

    def limited(self, limit: int | None) -> Task:
        """At most ``limit`` questions: each category by its size, evenly spread over the file."""
        if limit is None or limit >= len(self.questions):
            return self
        groups: dict[str | None, list[Question]] = {}
        for question in self.questions:
            groups.setdefault(question.category, []).append(question)
        shares = _shares([len(group) for group in groups.values()], limit)
        chosen = [
            group[(2 * i + 1) * len(group) // (2 * share)]
            for group, share in zip(groups.values(), shares, strict=True)
            for i in range(share)
        ]
        return replace(self, questions=tuple(sorted(chosen, key=lambda question: question.row)))


def _shares(sizes: Sequence[int], limit: int) -> list[int]:
    """``limit`` split by size: largest remainders, the earlier of equals first."""
    total = sum(sizes)
    shares = [limit * size // total for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: -(limit * sizes[i] % total))
    for i in order[: limit - sum(shares)]:
        shares[i] += 1
    return shares


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in reasons.items())


def load_tasks(
    names: Sequence[str],
    tasks_dir: Path | None,
    limit: int | None,
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Task]:
    """Tasks by name (``builtin``, a public one in ``tasks_dir``) or by JSONL file.

    Malformed rows are left out, counted, and told once a task; so are a limit larger than the task
    and a ``tasks_dir`` that no task is read from.

    Raises:
        ValueError: an unknown name, a missing file, a task without any usable prompt, two tasks of
            one name.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    files = [find_task(name, tasks_dir) for name in names]
    labels = [label for label, _ in files]
    if not files or len(set(labels)) < len(labels):
        raise ValueError(f"tasks must be named once each; got {', '.join(labels) or 'none'}")
    if tasks_dir is not None and not set(names) & set(FILES):
        tell(f"--tasks-dir is not used: none of the tasks is one of {', '.join(FILES)}")
    tasks = []
    for label, file in files:
        task = read_task(label, file)
        if task.left_out:
            tell(f"task {label}: rows left out: {_counts(task.left_out)}")
        if limit is not None and limit > len(task.questions):
            tell(f"task {label} has {len(task.questions)} prompts, fewer than the limit {limit}")
        tasks.append(task.limited(limit))
    return tasks


def find_task(name: str, tasks_dir: Path | None) -> tuple[str, Path]:
    """Label and file of a task. Raises ValueError that says which file is missing where."""
    if name == "builtin":
        return name, BUILTIN
    if name in FILES:
        if tasks_dir is None:
            raise ValueError(f"task {name} needs --tasks-dir, the folder with {FILES[name]}")
        if not (tasks_dir / FILES[name]).is_file():
            raise ValueError(f"task {name}: {tasks_dir / FILES[name]} does not exist")
        return name, tasks_dir / FILES[name]
    if Path(name).is_file():
        return Path(name).name.removesuffix(".gz").rpartition(".")[0] or Path(name).name, Path(name)
    known = ["builtin", *FILES]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise ValueError(
        f"no task {name!r}, and no such file; {hint} (a path given here may not contain ',')"
    )


def read_task(label: str, file: Path) -> Task:
    """Every usable row of a file of any shape that ``data.formats`` reads."""
    questions, left_out, rows = [], Counter[str](), 0
    for place, row in raw_rows(file):
        try:
            if isinstance(row, RowError):
                raise row
            found = parse_row(row, place=place, source=label)
            category = _category(label, row.get("category"))
            questions.append(
                Question(row=rows, category=category, turns=_turns(found), tools=found.tools)
            )
        except RowError as error:
            left_out[error.reason] += 1
        rows += 1
    if not questions:
        raise ValueError(f"{file}: no usable prompt ({dict(left_out) or 'the file is empty'})")
    return Task(name=label, rows=rows, questions=tuple(questions), left_out=dict(left_out))


def _category(label: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise RowError("bad-category", f"category is {value!r}, not a name")
    return "mt_bench" if label == "spec_bench" and value in MT_BENCH else value


def _turns(conversation: Conversation) -> tuple[tuple[Message, ...], ...]:
    """History as the row has it up to the last question; user messages in a row are turns.

    A reply at the end is left out: the model writes its own.
    """
    messages = conversation.messages
    while messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    asked = max((i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    turns: list[list[Message]] = [messages[:asked]]
    speaks = False
    for message in messages[asked:]:
        if message["role"] == "user" and speaks:
            turns.append([])
        speaks = speaks or message["role"] == "user"
        turns[-1].append(message)
    return tuple(tuple(turn) for turn in turns)
