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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import JsonOption, progress_bar, write_json

if TYPE_CHECKING:
    from paceline.train.config import TrainConfig

FromOption = Annotated[
    Path | None, typer.Option("--from", help="Drafter folder to go on from (init_from).")
]
BlockOption = Annotated[
    int | None, typer.Option(min=2, help="Tokens per block, anchor included (block_size).")
]


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
    init_from: FromOption = None,
    block_size: BlockOption = None,
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

    Example: paceline train smollm2_bloom --from runs/mine/drafter --block-size 24 --data replies.jsonl
    """
    from paceline.recipes import find_recipe, takes

    files, chosen = tuple(map(str, data or ())), find_recipe(recipe)
    options = {
        "init_from": init_from and str(init_from),
        "block_size": block_size,
        "target": target,
    }
    changes = _changes(settings or [], options)
    if target is not None and "target" not in takes(chosen):
        raise ValueError(f"{recipe} is for one target; `dflash` takes --target")
    if target is None and "target" in takes(chosen):
        raise ValueError(f"{recipe} is for any target; name one with --target")
    if dry_run and not files and "target" not in takes(chosen):
        files = ("FILE (--data)",)
    given = {key: value for key, value in changes.items() if key in takes(chosen)}
    where = {} if run_dir is None else {"run_dir": str(run_dir)}
    config = chosen(files, **where, **given).replace(**changes)
    if dry_run:
        show(config)
        return
    _roll_out(config) if roll_out else _fit(config)


def _changes(settings: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """What --set and the options of the same meaning say; ValueError for what is said twice."""
    from paceline.train.config import parse_settings

    changes = dict(parse_settings(settings))
    given = {key: value for key, value in options.items() if value is not None}
    if twice := sorted(given.keys() & changes.keys()):
        raise ValueError(f"{twice[0]} is given twice: as an option and with --set")
    return changes | given


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
    from paceline.train.earlier import check_start, check_weights
    from paceline.train.start import drafter_shape, parameter_count

    for key, value in asdict(config).items():
        typer.echo(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    try:
        text = target_config(config.target)
    except (OSError, ValueError) as error:
        typer.echo(f"drafter parameters: the target's config cannot be read ({error})")
        return
    shape = drafter_shape(config, text)
    check_start(config, shape)
    check_weights(config)
    typer.echo(f"drafter parameters: {parameter_count(shape):,}")
