"""The command `preflight`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.common import (
    DtypeOption,
    JsonOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    progress_bar,
    write_json,
)

MetricsOption = Annotated[
    list[Path] | None,
    typer.Option(help="An engine's metrics page in place of prompts; twice: what lies between."),
]


OF_PROMPTS = (
    "target method tasks tasks_dir limit max_new_tokens temperature batch_size dtype".split()
)


def preflight(
    context: typer.Context,
    target: TargetOption = "smollm2",
    method: Annotated[
        str, typer.Option(help="dflash, dflash:FOLDER, with +xpress perhaps.")
    ] = "dflash",
    tasks: Annotated[
        str,
        typer.Option(help="Comma-separated: builtin, gsm8k, humaneval, spec_bench, JSONL files."),
    ] = "builtin",
    tasks_dir: Annotated[
        Path | None, typer.Option(help="Folder with the public tasks' files.")
    ] = None,
    metrics: MetricsOption = None,
    longer_block: Annotated[
        int | None, typer.Option(min=3, help="Block size to consider; none: half as much again.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many prompts a task.")] = None,
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 8,
    dtype: DtypeOption = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Of PyTorch on the CPU.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the histograms into this file.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Say what to do next with a drafter on this traffic: longer blocks, early slots, text, or nothing.

    Example: paceline preflight --tasks prompts.jsonl --png rounds.png

    Example: paceline preflight --metrics before.txt --metrics after.txt
    """
    if png is not None and json_file is not None and png.resolve() == json_file.resolve():
        raise ValueError(f"--png and --json both name {png}")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if metrics:
        _refuse_given(context)
        domains, costs, longer = _of_engine(metrics, longer_block)
        arguments: dict[str, Any] = {"metrics": [file.name for file in metrics]}
    else:
        params = {"max_tokens": max_new_tokens, "temperature": temperature}
        names, wanted = (target, dtype, method), (tasks, tasks_dir, limit)
        domains, costs, longer = _of_prompts(names, wanted, params, batch_size, longer_block)
        arguments = {"target": Path(target).name, "method": method, "tasks": tasks, "limit": limit}
        arguments |= params | {"batch_size": batch_size, "dtype": dtype, "threads": threads}
    from paceline.evaluate.preflight import document

    found = document(domains, costs, longer, arguments)
    write_json(json_file, found)  # first: nothing behind it may lose what was measured
    show(found)
    if png is not None:
        from paceline.evaluate.preflight_chart import draw

        draw(png, found)


def _refuse_given(context: typer.Context) -> None:
    for name in OF_PROMPTS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"--metrics is counted traffic and decodes nothing: leave out {option}"
            )


def _longer(block: int, wanted: int | None) -> int:
    longer = block + max(1, block // 2) if wanted is None else wanted
    if longer <= block:
        raise ValueError(f"--longer-block must be more than the drafter's {block}; got {longer}")
    return longer


def _of_engine(files: list[Path], longer_block: int | None) -> tuple[list[Any], None, int]:
    from paceline.evaluate.engine_counters import domain_of_counters, read_counters

    if len(files) > 2:
        raise ValueError("give one scrape, or two in the order they were taken")
    scrapes = [read_counters(file) for file in files]
    first = scrapes[0] if len(scrapes) == 2 else None
    domain = domain_of_counters("engine", scrapes[-1], first)
    return [domain], None, _longer(len(domain.kept_n), longer_block)


def _of_prompts(
    names: tuple[str, str, str],
    wanted: tuple[str, Path | None, int | None],
    how: dict[str, Any],
    batch_size: int,
    longer_block: int | None,
) -> tuple[list[Any], Any, int]:
    import paceline
    from paceline.evaluate.preflight_run import (
        check_method,
        decoded,
        domains_of,
        measured_costs,
        prompts_of,
    )
    from paceline.evaluate.tasks import load_tasks

    tell = partial(typer.echo, err=True)
    target, dtype, text = names
    method = check_method(text)
    listed = tuple(part.strip() for part in wanted[0].split(",") if part.strip())
    loaded = load_tasks(listed, wanted[1], wanted[2], tell=tell)
    pipeline = method.pipeline(paceline.load(target, None, dtype=dtype).target)
    block: int = pipeline.drafter.config.block_size  # type: ignore[union-attr]
    longer = _longer(block, longer_block)
    params = paceline.SamplingParams(**how, seed=0)
    prompts = prompts_of(pipeline, loaded, params.max_tokens, tell)
    with progress_bar() as (_, move):
        replies = decoded(pipeline, prompts, params, batch_size, partial(move, "replies"))
        costs = measured_costs(pipeline.target, method, prompts, params, longer)
    return domains_of(replies, block), costs, longer


def show(found: dict[str, Any]) -> None:
    """A table of figures by domain and a line with the verdict of each."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(
        "domain", "rounds", "drafts kept", "whole block", "by slot", "loops", "unfinished"
    )
    for one in found["domains"]:
        kept = one["accepted_drafts_per_round"]
        slots = " ".join("-" if a is None else f"{a:.2f}".lstrip("0") for a in one["conditional"])
        shares = (
            "-" if one[k] is None else f"{one[k]:.0%}"
            for k in ("looping_share", "unfinished_share")
        )
        shown = "-" if kept is None else f"{kept:.2f}"
        table.add_row(
            Text(one["domain"]), str(one["rounds"]), shown, f"{one['ceiling']:.1%}", slots, *shares
        )
    console.print(table)
    if found["costs"] is not None:
        costs = found["costs"]
        console.print(
            f"a round, ms: plain {1e3 * costs['plain']:.1f}, drafting {1e3 * costs['draft']:.1f}, "
            + ", ".join(f"verifying {n} {1e3 * s:.1f}" for n, s in costs["verify"])
        )
    for one in found["domains"]:
        note = " (unfinished replies counted)" if one["counts_unfinished_replies"] else ""
        console.print(f"{one['domain']}: {one['sentence']}{note}", markup=False, highlight=False)
