"""The command `doctor`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli.common import DtypeOption, JsonOption, write_json


def doctor(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file, or smollm2.")],
    drafter: Annotated[str, typer.Argument(help="Packaged name or drafter folder.")],
    live: Annotated[bool, typer.Option(help="Also decode built-in prompts with it.")] = True,
    seconds: Annotated[float, typer.Option(min=1, help="Time for the live check.")] = 60.0,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
) -> None:
    """Find out whether a drafter fits a target, is whole and is of any use; exit code 1 if not.

    Reads plain DFlash, speculators, SpecForge, EAGLE-3 and PARD folders. Exit code 2: cannot be read.

    Example: paceline doctor smollm2 smollm2-dflash

    Example: paceline doctor path/to/target path/to/drafter --no-live --json doctor.json
    """
    from paceline.evaluate.doctor import examine, live_check

    found = examine(target, drafter)
    if live:
        live_check(found, seconds, dtype)
    else:
        found.live = {"ran": False, "why": "--no-live"}
    show(found.describe())
    write_json(json_file, found.describe())
    if not found.healthy:
        raise typer.Exit(1)


def show(found: dict[str, Any]) -> None:
    """Findings with their fixes, the live check, and a last line."""
    typer.echo(f"{found['drafter']} ({found['format']}) for {found['target']}")
    for one in found["findings"]:
        typer.echo(f"{one['level']:7} {one['code']}  {one['where']}: {one['what']}")
        typer.echo(f"        fix: {one['fix']}")
    seen = found["live"]
    if seen["ran"]:
        kept = seen["accepted_drafts_per_round"]
        shown = "no round" if kept is None else f"{kept:.2f} drafts accepted a round"
        typer.echo(f"live check: {shown}, {seen['rounds']} rounds, {seen['seconds']:.0f} s")
    else:
        typer.echo(f"live check: not run: {seen['why']}")
    counts = {level: 0 for level in ("error", "warning", "note")}
    for one in found["findings"]:
        counts[one["level"]] += 1
    typer.echo(", ".join(f"{number} {level}s" for level, number in counts.items()))
