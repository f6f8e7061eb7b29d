"""The command `report`.

Knows nothing that the rooms do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import write_text


def report(
    files: Annotated[
        list[Path], typer.Argument(help="What paceline bench and preflight wrote (--json).")
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Turn bench and preflight files into one HTML page with tables, charts and what they mean.

    Example: paceline report bench.json preflight.json --out report.html
    """
    from paceline.evaluate.report import render

    if out.resolve() in {file.resolve() for file in files}:
        raise ValueError(f"--out {out} is one of the files it is made of; name another file")
    write_text(out, render(files))
    typer.echo(f"wrote {out}")
