"""The command `bench`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import (
    AcceptOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    TokensOption,
    progress_bar,
    write_json,
)

if TYPE_CHECKING:
    from paceline.evaluate.bench import BenchArguments
    from paceline.evaluate.side import SideFile

FEW, FEW_MARK = 3, "~"  # chunks of requests, and how a table marks fewer


def bench(
    target: TargetOption = "smollm2",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain (always run), ngram, dflash (the packaged one), "
            "dflash:FOLDER, model:NAME; +stage[:argument] adds a stage (+xpress, +xpress:3)."
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
    accept: AcceptOption = "match",
    limit: Annotated[int | None, typer.Option(help="At most so many prompts a task.")] = None,
    max_new_tokens: TokensOption = 256,
    dtype: DtypeOption = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Of PyTorch on the CPU.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure drafts against plain decoding, side by side; exit code 1 if they change a reply.

    With --json the same command goes on where it was stopped.

    Example: paceline bench --methods ngram,dflash --batch-size 1,8 --temperature 0,1 --json b.json
    """
    from paceline.evaluate.bench import BenchArguments

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
        device=device,
        accept=accept,
    )
    probe(json_file)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    found, side = _measured(arguments, json_file)
    write_json(json_file, found)
    side.remove()
    show(found)
    if any(run["bugs"] for run in found["runs"]):
        raise typer.Exit(1)


def _measured(arguments: BenchArguments, out: Path | None) -> tuple[dict[str, Any], SideFile]:
    """Run it with a bar; exit code 130 on Ctrl-C."""
    from paceline.evaluate.bench import run_bench
    from paceline.evaluate.side import side_path

    try:
        with progress_bar() as (_, move):
            progress = partial(move, "replies")
            return run_bench(arguments, out, tell=_tell, progress=progress)
    except KeyboardInterrupt:
        kept = out is not None and side_path(out).exists()
        _tell(f"stopped{'; the same command goes on after the finished chunks' * kept}")
        raise typer.Exit(130) from None


def probe(path: Path | None) -> None:
    """Make the folder of ``path`` and try to write there: better now than after hours.

    Raises:
        ValueError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error}; name another file") from None


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _number(option: str, kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a number") from None


def show(found: dict[str, Any]) -> None:
    """Two tables on stdout: every task's totals, then the categories; below, what they rest on."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file is not as narrow as a terminal may be

    def say(line: str) -> None:
        console.print(line, markup=False, emoji=False, highlight=False)

    here, tokens = found["environment"], found["arguments"]["max_new_tokens"]
    device = f"{here['device']} ({here['device_name']})"
    say(
        f"{found['target']['name']}, {device}, {here['dtype']}, {here['threads']} threads, "
        f"at most {tokens} new tokens"
    )
    runs = sorted(found["runs"], key=lambda run: (run["temperature"], run["batch_size"]))
    totals = [run for run in runs if run["category"] is None]
    split = [run for run in runs if run["category"] is not None and run["method"] != "plain"]
    console.print(_totals(totals))
    if split:
        console.print(_categories(split))
    for line in _remarks(totals, split):
        say(line)


def _totals(runs: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from paceline.evaluate.metrics import percent

    table = Table("task", "method")
    for name in ("batch", "T", "requests", "length", "full bonus", "tok/s", "speed-up", "median"):
        table.add_column(name, justify="right")
    for name in ("chunks", "identical", "near-ties", "bugs", "loops", "speed-up without"):
        table.add_column(name, justify="right")
    for run in runs:
        chunks, measured = run["chunks"], run["measurements"]
        repeats = f" x {measured // chunks}" if chunks and measured > chunks else ""
        table.add_row(
            Text(run["task"]),  # names are the user's: a Text has no markup
            Text(run["method"]),
            f"{run['batch_size']}{'*' if run['unfilled_requests'] else ''}",
            f"{run['temperature']:g}",
            str(run["requests"]),
            _shown(run["acceptance_length_pooled"], ".2f"),
            _shown(run["acceptance_length_full_bonus"], ".2f"),
            _shown(run["tokens_per_second"], ".1f"),
            _shown(run["speedup_vs_plain"], ".2f", "x"),
            _shown(run["speedup_median"], ".2f", "x"),
            f"{chunks}{repeats}{FEW_MARK if chunks < FEW else ''}",
            str(run["identical_to_plain"]),
            str(run["near_ties"]),
            Text(str(run["bugs"]), style="red" if run["bugs"] else ""),
            percent(run["looping_share"]),
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
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for run in runs:
        setting = (str(run["batch_size"]), f"{run['temperature']:g}", str(run["requests"]))
        length, faster = run["acceptance_length_pooled"], run["speedup_vs_plain"]
        cell = f"{_shown(length, '.2f')}  {_shown(faster, '.2f', 'x')}"
        few = FEW_MARK if run["chunks"] < FEW else ""
        cells = rows.setdefault((run["task"], run["category"], *setting), {})
        cells[run["method"]] = cell + few
    for place, cells in rows.items():
        table.add_row(*map(Text, place), *(cells.get(method, "-") for method in methods))
    return table


def _remarks(totals: list[dict[str, Any]], split: list[dict[str, Any]]) -> Iterator[str]:
    """What the marks in the tables mean, for those that are there."""
    said = dict.fromkeys(
        f"* {run['task']}: {run['unfilled_requests']} of {run['requests']} requests were decoded "
        f"in batches of fewer than {run['batch_size']} rows"
        for run in totals
        if run["unfilled_requests"]
    )
    yield from said
    if any(run["chunks"] < FEW for run in [*totals, *split]):
        yield (
            f"{FEW_MARK} fewer than {FEW} chunks of requests: repeats even out the clock, "
            "not the choice of prompts"
        )


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
