"""The command `profile`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli.common import (
    AcceptOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    progress_bar,
    write_json,
)


def profile(
    target: TargetOption = "smollm2",
    method: Annotated[
        str, typer.Option(help="A method of `bench` without a length stage: dflash+xpress.")
    ] = "dflash",
    accept: AcceptOption = "match",
    dtype: DtypeOption = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Of PyTorch on the CPU.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many calibration prompts.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure once what a round costs on this machine and how far drafts survive, for the stage +cost.

    Takes a minute or two; the result lies in the user's cache and holds for this target, drafter,
    dtype, device and number of threads. Nothing else should be running.

    Example: paceline profile --method dflash+xpress --threads 2
    """
    import torch

    import paceline
    from paceline.evaluate.machine import check_device
    from paceline.evaluate.methods import parse_method
    from paceline.evaluate.profile import check_drafter, measure, profile_key, save

    found = parse_method(method)
    check_drafter(found)
    if cuts := [name for name, _ in found.stages if name in ("first", "length", "cost")]:
        raise ValueError(f"{method}: leave out {', '.join(cuts)}; whole blocks are measured")
    if limit is not None and limit < 2:
        raise ValueError(
            f"limit must be at least 2: half of the prompts test the other; got {limit}"
        )
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = paceline.load(target, None, dtype=dtype, device=device).target
    pipeline = found.pipeline(loaded, accept)
    with progress_bar() as (_, move):
        figures = measure(pipeline, profile_key(loaded, found, accept), move, limit=limit)
    show(figures)
    typer.echo(f"wrote {save(figures)}")
    write_json(json_file, figures)


def show(found: dict[str, Any]) -> None:
    """Milliseconds of a round, and how far survival is off."""
    from rich.console import Console
    from rich.table import Table

    costs, console = found["costs"], Console()
    verifies = (f"verify {d}" for d in costs["drafts_N"])
    table = Table("rows", *verifies, "draft greedy", "draft T 1")
    names = ("rows_B", "verify_BN", "draft_B", "draft_warm_B")
    for rows, verify, *drafts in zip(*(costs[name] for name in names), strict=True):
        table.add_row(str(rows), *(f"{1e3 * s:.1f}" for s in (*verify, *drafts)))
    console.print(table)
    greedy, warm = (1e6 * costs[name] for name in ("node_greedy", "node_warm"))
    console.print(
        f"milliseconds: the target's pass with so many drafts a row at {costs['context']} cached tokens, "
        f"and drafting for greedy rows and at temperature 1; {1e6 * costs['per_cached']:.2f} us more per "
        f"cached token of a row, {1e6 * costs['per_waiting']:.2f} us for the drafter to take in a "
        f"committed one; judging drafts takes {greedy:.1f} us per scored node of greedy rows, "
        f"{warm:.1f} at T 1; between the points interpolation is off by at most "
        f"{100 * found['grid_error']:.0f} %."
    )
    for name, errors in found["calibration_error"].items():
        shown = ", ".join(f"{100 * error:.1f}" for error in errors)
        console.print(f"calibration error of survival, {name}, by slot: {shown} %")
