"""What the data commands share: options, problems that print themselves, counts, a progress bar.

Knows no command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.common import progress_bar

# What the tokenizer is asked for itself, so no template argument.
_OURS = {"conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "messages"}
_OURS |= {"return_dict", "return_tensors", "return_assistant_tokens_mask", "continue_final_message"}
SHOWN = 20  # problems printed in full; all are counted, and all are in the JSON file

FileArgument = Annotated[
    str, typer.Argument(help="JSON lines, a JSON array, .gz of either, or a datasets name.")
]
OutOption = Annotated[Path, typer.Option(help="The file to append to; the same command resumes.")]
ArgsOption = Annotated[
    list[str] | None,
    typer.Option("--template-arg", help="key=value for the chat template, repeatable."),
]
LimitOption = Annotated[int | None, typer.Option(help="Only the first so many conversations.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Replies decoded together.")]
TapsOption = Annotated[int, typer.Option(min=1, help="How many target layers will be captured.")]
MeasureOption = Annotated[float, typer.Option(min=0, help="Seconds of measuring speed; 0: none.")]


def parse_arguments(settings: list[str] | None) -> dict[str, Any]:
    """key=value pairs; values are JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--template-arg {setting!r}: write key=value")
        if key in _OURS:
            raise ValueError(f"--template-arg {key}: that is not for the template to be told")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def telling_problems() -> Any:
    """Problems that print themselves, the first ones."""
    from paceline.data.formats import Problems

    problems = Problems()

    def report(line: str) -> None:
        if len(problems.rows) <= SHOWN:
            typer.echo(line, err=True)
        elif len(problems.rows) == SHOWN + 1:
            typer.echo("... further problems are counted only (--json lists them)", err=True)

    problems.report = report
    return problems


def tell(problems: Any) -> None:
    """Print how many rows were left out, by reason."""
    for reason, number in problems.counts.most_common():
        typer.echo(f"left out, {reason}: {number}")


def left_out(problems: Any) -> dict[str, Any]:
    """The same for JSON, with every row."""
    return {"left_out": dict(problems.counts), "problems": problems.rows}


def finish(counts: dict[str, int], problems: Any, out: Path) -> None:
    """Print the counts; ``refuse_nothing`` comes after the JSON is written."""
    typer.echo(f"{out}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    tell(problems)


def refuse_nothing(counts: Mapping[str, Any], problems: Any) -> None:
    """ValueError with the reasons if a run ends without a single row."""
    if not counts["rows"] and not counts["repeated"]:
        why = ", ".join(f"{n} {reason}" for reason, n in problems.counts.most_common())
        raise ValueError(f"no row written: {why or 'the file has none'}")


@contextmanager
def row_bar(total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar that begins at ``done`` rows; the value is to be called with each row's tokens."""
    with progress_bar() as (_, move):
        rows, tokens = done, 0
        move("rows", rows, total)

        def step(count: int) -> None:
            nonlocal rows, tokens
            rows, tokens = rows + 1, tokens + count
            move(f"rows, {tokens} tokens", rows, total)

        yield step
