"""The histograms of a preflight as a picture.

Does not know verdicts; the ceiling bin is the last bar.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any


def draw(path: Path, found: dict[str, Any]) -> None:
    """Write a PNG with one panel per domain: share of rounds by accepted drafts.

    The file appears whole. Raises ValueError when matplotlib is missing or the place cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--png needs matplotlib: pip install 'paceline[report]'") from error
    domains = found["domains"]
    figure = Figure(figsize=(6, 1.9 * len(domains)), layout="constrained")
    for axes, one in zip(figure.subplots(len(domains), squeeze=False)[:, 0], domains, strict=True):
        counts, total = one["histogram"], max(1, one["rounds"])
        colours = ["#4477aa"] * (len(counts) - 1) + ["#cc6677"]
        axes.bar(range(len(counts)), [count / total for count in counts], color=colours)
        axes.set_xticks(range(len(counts)))
        axes.set_title(
            f"{one['domain']}: {one['verdict']}", loc="left", fontsize=9, parse_math=False
        )
        axes.set_ylabel("rounds")
    axes.set_xlabel("accepted drafts (last: the whole block)")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    work = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_bytes(stream.getvalue())
        work.replace(path)
    except OSError as error:
        raise ValueError(f"--png {path} cannot be written: {error}") from None
