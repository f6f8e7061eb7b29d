"""The command `bench`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.common import DtypeOption, JsonOption, TargetOption, TokensOption, write_json


def bench(
    target: TargetOption = "smollm2",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain (always run), ngram, dflash (the packaged one), "
            "dflash:FOLDER, model:NAME; +stage[:argument] adds a stage."
        ),
    ] = "plain,ngram,dflash",
    tasks: Annotated[
        str,
        typer.Option(
            help="Comma-separated: builtin, gsm8k, humaneval, spec_bench, or JSONL files."
        ),
    ] = "builtin",
    tasks_dir: Annotated[
        Path | None, typer.Option(help="Folder with the public tasks' files.")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Comma-separated: rows decoded together.")] = "1",
    temperature: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0",
    limit: Annotated[int | None, typer.Option(help="At most so many prompts a task.")] = None,
    max_new_tokens: TokensOption = 256,
    dtype: DtypeOption = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Of PyTorch on the CPU.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure drafts against plain decoding, side by side; exit code 1 if they change a reply.

    With --json the same command goes on where it was stopped.

    Example: paceline bench --methods ngram,dflash --batch-size 1,8 --temperature 0,1 --json b.json
    """
    from paceline.evaluate.bench import BenchArguments, run_bench

    arguments = BenchArguments(
        target=target,
        methods=_listed(methods),
        tasks=_listed(tasks),
        tasks_dir=tasks_dir,
        batch_sizes=tuple(_number("--batch-size", int, text) for text in _listed(batch_size)),
        temperatures=tuple(_number("--temperature", float, text) for text in _listed(temperature)),
        limit=limit,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
    )
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with _progress() as progress:
        found, side = run_bench(arguments, json_file, tell=_tell, progress=progress)
    write_json(json_file, found)
    side.remove()
    show(found)
    if any(run["bugs"] for run in found["runs"]):
        raise typer.Exit(1)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _number(option: str, kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a number") from None


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; the value is a function to call with replies done and in all."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("replies"), Remaining())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(found: dict[str, Any]) -> None:
    """Two tables on stdout: every task's totals, then the categories."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file is not as narrow as a terminal may be
    here, tokens = found["environment"], found["arguments"]["max_new_tokens"]
    head = (
        f"{found['target']['name']}, {here['device']}, {here['dtype']}, {here['threads']} threads"
    )
    line = f"{head}, at most {tokens} new tokens"
    console.print(line, markup=False, emoji=False, highlight=False)
    runs = sorted(found["runs"], key=lambda run: (run["temperature"], run["batch_size"]))
    console.print(_totals([run for run in runs if run["category"] is None]))
    split = [run for run in runs if run["category"] is not None and run["method"] != "plain"]
    if split:
        console.print(_categories(split))


def _totals(runs: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("task", "method")
    for name in ("batch", "T", "requests", "acceptance length", "tok/s", "speed-up", "median"):
        table.add_column(name, justify="right")
    for name in ("identical", "near-ties", "bugs", "loops", "speed-up without"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            Text(run["task"]),  # names are the user's: a Text has no markup
            Text(run["method"]),
            str(run["batch_size"]),
            f"{run['temperature']:g}",
            str(run["requests"]),
            f"{run['acceptance_length_pooled']:.2f}",
            _shown(run["tokens_per_second"], ".1f"),
            _shown(run["speedup_vs_plain"], ".2f", "x"),
            _shown(run["speedup_median"], ".2f", "x"),
            str(run["identical_to_plain"]),
            str(run["near_ties"]),
            Text(str(run["bugs"]), style="red" if run["bugs"] else ""),
            f"{run['looping_share']:.0%}",
            _shown(run["without_loops"]["speedup_vs_plain"], ".2f", "x"),
        )
    return table


def _categories(runs: list[dict[str, Any]]) -> Any:
    """A column a method: acceptance length and speed-up."""
    from rich.table import Table
    from rich.text import Text

    methods = list(dict.fromkeys(run["method"] for run in runs))
    table = Table("task", "category", "batch", "T", "requests")
    for method in methods:
        table.add_column(Text(f"{method}: length, speed-up"), justify="right")
    rows: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        setting = (str(run["batch_size"]), f"{run['temperature']:g}", str(run["requests"]))
        length, faster = run["acceptance_length_pooled"], run["speedup_vs_plain"]
        cell = f"{length:.2f}  {_shown(faster, '.2f', 'x')}"
        rows.setdefault((run["task"], run["category"], *setting), []).append(cell)
    for place, cells in rows.items():
        table.add_row(*map(Text, place), *cells)
    return table


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
