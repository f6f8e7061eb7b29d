"""What the commands share: option types, a progress bar, figures written as JSON.

Knows no command.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.pipeline import Pipeline

TargetOption = Annotated[str, typer.Option(help="Folder, hub id, GGUF file, or smollm2.")]
DrafterOption = Annotated[
    str, typer.Option(help="Packaged name, DFlash folder, ngram, model:NAME, none or default.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(help="In place of --drafter: a method of `bench`, such as dflash+xpress:3."),
]
AcceptOption = Annotated[
    str, typer.Option(help="match, or rejection: drafts are sampled, more of them kept above T 0.")
]
DtypeOption = Annotated[
    str, typer.Option(help="bf16, fp16, fp32; auto: bf16 if the machine has it.")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write the figures here, too.")
]
TokensOption = Annotated[int, typer.Option(min=1, help="At most this many new tokens per reply.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this share.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same reply.")]


def load_pipeline(
    target: str, drafter: str, method: str | None, dtype: str, accept: str = "match"
) -> Pipeline:
    """What `--drafter` or `--method` name, loaded.

    Raises ValueError for both at once, and whatever either name is wrong about.
    """
    import paceline

    if method is None:
        return paceline.load(target, drafter, dtype=dtype, accept=accept)
    if drafter != "default":
        raise ValueError("give --drafter or --method, not both: a method names its drafter")
    from paceline.evaluate.methods import parse_method

    found = parse_method(method)
    return found.pipeline(paceline.load(target, None, dtype=dtype).target, accept)


@contextmanager
def progress_bar() -> Iterator[tuple[Any, Callable[[str, int, int | None], None]]]:
    """The console on stderr, and what moves a bar there: (text, done, total or None).

    Where stderr is no terminal there is no bar.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def move(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield console, move


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write figures to a file that appears whole or not at all."""
    if path is not None:
        write_text(path, json.dumps(figures, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file (UTF-8) that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
