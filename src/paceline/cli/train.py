"""The commands that train: `train` and `recipes`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common import JsonOption, progress_bar, write_json

if TYPE_CHECKING:
    from paceline.train.config import TrainConfig


def recipes(json_file: JsonOption = None) -> None:
    """List the training recipes with their targets.

    Example: paceline recipes
    """
    from paceline.recipes import list_recipes

    found = list_recipes()
    for item in found:
        typer.echo(f"{item['name']}  ({item['target']})\n    {item['purpose']}")
    write_json(json_file, {"recipes": found})


def train(
    recipe: Annotated[str, typer.Argument(help="A name that `paceline recipes` lists.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Corpus file(s): JSONL of token rows.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="For the recipe `dflash`: folder, hub id or GGUF file.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Features, checkpoints, logs, the drafter; none: runs/ and the recipe's name."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value (JSON or text), repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the full config and start nothing.")
    ] = False,
    roll_out: Annotated[
        bool,
        typer.Option(
            "--roll-out",
            help="Be the second process of an asynchronous on-policy run: decode for it.",
        ),
    ] = False,
) -> None:
    """Train a drafter by a recipe; run the same command again to resume.

    Ctrl-C or SIGTERM save first. Several processes: torchrun --nproc-per-node N -m paceline.cli train ...

    Example: paceline train dflash --target path/to/model --data replies.jsonl --set layers=2
    """
    from paceline.recipes import find_recipe, takes
    from paceline.train.config import parse_settings

    files, chosen = tuple(map(str, data or ())), find_recipe(recipe)
    changes = dict(parse_settings(settings or []))
    if target is not None:
        if "target" not in takes(chosen):
            raise ValueError(f"{recipe} is for one target; `dflash` takes --target")
        changes["target"] = target
    elif "target" in takes(chosen):
        raise ValueError(f"{recipe} is for any target; name one with --target")
    if dry_run and not files and not takes(chosen):
        files = ("FILE (--data)",)
    given = {key: value for key, value in changes.items() if key in takes(chosen)}
    where = {} if run_dir is None else {"run_dir": str(run_dir)}
    config = chosen(files, **where, **given).replace(**changes)
    if dry_run:
        show(config)
        return
    _roll_out(config) if roll_out else _fit(config)


def _fit(config: TrainConfig) -> None:
    """Train with a bar; exit code 143 if a signal ended it before the last step."""
    from paceline.train.fit import fit

    with _bar() as (say, progress):
        outcome = fit(config, say=say, progress=progress)
    if not outcome.finished:
        raise typer.Exit(128 + signal.SIGTERM)


def _roll_out(config: TrainConfig) -> None:
    """Decode for the run of this very config until it is done; may be killed and started again."""
    from paceline.train.worker import roll_out_for

    if config.on_policy is None or not config.on_policy.asynchronous:
        raise ValueError(
            "--roll-out serves an asynchronous run; give both commands "
            """--set 'on_policy={"asynchronous": true}'"""
        )
    roll_out_for(config, say=typer.echo)


@contextmanager
def _bar() -> Iterator[tuple[Callable[[str], None], Callable[[str, int, int], None]]]:
    """Functions that print a line, and that move a bar: on a terminal; else the bar is lines, too."""
    with progress_bar() as (console, move):
        if console.is_terminal:
            yield partial(console.print, markup=False, emoji=False, highlight=False), move
        else:
            yield typer.echo, lambda what, done, total: typer.echo(f"{done}/{total} {what}")


def show(config: TrainConfig) -> None:
    """Print every setting in the form that `--set` takes, and the drafter's size."""
    from paceline.recipes import target_config
    from paceline.train.start import drafter_shape, parameter_count

    for key, value in asdict(config).items():
        typer.echo(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    try:
        text = target_config(config.target)
    except (OSError, ValueError) as error:
        typer.echo(f"drafter parameters: the target's config cannot be read ({error})")
        return
    typer.echo(f"drafter parameters: {parameter_count(drafter_shape(config, text)):,}")
