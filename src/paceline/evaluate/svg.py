"""Charts as inline SVG whose colours are CSS variables, so one drawing serves light and dark pages.

Knows nothing about benchmarks or HTML: numbers and labels in, an `<svg>` element out. The same
input gives the same bytes. Every chart is one narrow panel, legible at phone width without scaling.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH = 360  # px: a phone is 400 wide, and text must not shrink
BOTTOM = 36  # px for tick labels and the axis label
SERIES_COLOURS = 8  # --series-0 .. in the page's style sheet; 0 is the baseline's grey
MARKERS = "osD^vPXh"
GLYPHS = "●■◆▲▼✚✖⬢"  # the same shapes as text, for the page's legend
LABEL_CHARS = 30
FEW = 30  # rounds: a share of fewer is drawn as noise

# Drawn with a colour that nothing else uses, then renamed: matplotlib knows no CSS variables.
_ROLES = {"text": "#000101", "muted": "#000102", "grid": "#000103", "card": "#000104"}
_ROLES |= {f"series-{i}": f"#0002{i:02x}" for i in range(SERIES_COLOURS)}
_ROLES |= {f"phase-{i}": f"#0003{i:02x}" for i in range(5)}

_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
    "svg.hashsalt": "paceline",
    "text.parse_math": False,  # a method may be called $x$
    "font.family": "DejaVu Sans",  # ships with matplotlib: the layout is the same everywhere
    "font.size": 11,
    "figure.dpi": 72,
    "text.color": _ROLES["text"],
    "axes.edgecolor": _ROLES["muted"],
    "axes.labelcolor": _ROLES["muted"],
    "axes.titlecolor": _ROLES["text"],
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "xtick.color": _ROLES["muted"],
    "ytick.color": _ROLES["muted"],
    "grid.color": _ROLES["grid"],
    "grid.linewidth": 0.8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One method in a chart; ``index`` is its place in the legend of the whole page, 0 for plain."""

    label: str
    index: int

    @property
    def colour(self) -> int:
        """Which --series-N; the baseline's grey is never used again."""
        return self.index and 1 + (self.index - 1) % (SERIES_COLOURS - 1)

    @property
    def glyph(self) -> str:
        """The marker as a character. Colour and marker repeat at different periods."""
        return GLYPHS[self.index % len(GLYPHS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Speed-up of one method over groups (tasks); None where it was not measured."""

    series: Series
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Histogram of one method: value -> share of all rounds, and the mean value."""

    series: Series
    shares: Mapping[int, float]
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One method's acceptance by draft position 1, 2, ...: two shares in 0..1 per position.

    ``reached``: of how many rounds the conditional share is; None where that is 0.
    """

    series: Series
    unconditional: Sequence[float | None]
    conditional: Sequence[float | None]
    reached: Sequence[int]


def speedups(
    name: str, description: str, groups: Sequence[str], bars: Sequence[Bars], largest: float
) -> str:
    """Horizontal bars per group and method, with a line at 1 = plain decoding.

    ``largest`` is the largest speed-up of all charts that are compared: one scale for all.
    """
    step = len(bars) + 1.5
    rows = len(groups) * step
    with _panel(38 + round(15 * rows), left=16, top=2) as (figure, colours):
        axes = figure.add_subplot()
        for g, group in enumerate(groups):
            top = g * step
            axes.text(0, top, short(group), weight="bold", va="center")
            for i, bar in enumerate(bars):
                value = bar.values[g]
                y = top + 1 + i
                if value is None:
                    axes.text(0, y, "not measured", va="center", color=colours["muted"])
                    continue
                axes.barh(y, value, 0.78, color=colours[f"series-{bar.series.colour}"])
                # With many methods colours repeat; the mark is the legend's, and no two are alike.
                _beside(axes, value, y, f"{value:.2f}× {bar.series.glyph}")
        axes.set_xlim(0, 1.24 * max(1.0, largest))
        axes.set_ylim(rows - 0.8, -0.6)
        axes.axvline(1, color=colours["text"], linewidth=1, linestyle=(0, (3, 2)))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("times plain decoding")
        return _svg(figure, name, description)


def histograms(name: str, description: str, rows: Sequence[Counts], largest: int) -> str:
    """One small histogram under another, one a method, on the same axes; ``largest`` ends them."""
    top = max([0.01, *(share for row in rows for share in row.shares.values())])
    # 40 px of bars and 26 px to the next method's title
    with _panel(28 + 66 * len(rows), left=40, top=18, gap=26 / 40) as (figure, colours):
        grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False)
        for axes, row in zip(grid[:, 0], rows, strict=True):
            colour = colours[f"series-{row.series.colour}"]
            axes.bar(list(row.shares), list(row.shares.values()), 0.82, color=colour)
            axes.axvline(row.mean, color=colours["text"], linewidth=1.2, linestyle=(0, (3, 2)))
            axes.set_title(f"{short(row.series.label)}: mean {row.mean:.2f}", pad=3)
            axes.set_ylim(0, 1.05 * top)
            axes.set_xlim(0.4, largest + 0.6)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.yaxis.set_major_locator(_locator(2))
            axes.yaxis.set_major_formatter(_percent())
            axes.grid(axis="y")
        grid[-1, 0].set_xlabel("tokens committed in one round")
        return _svg(figure, name, description)


def slots(name: str, description: str, curves: Sequence[Curve]) -> str:
    """Two axes under one another: unconditional and conditional acceptance by draft position.

    Shares of fewer than ``FEW`` rounds have hollow markers.
    """
    depth = max(len(curve.unconditional) for curve in curves)
    titles = ("unconditional: this draft and all before", "conditional: given all before were kept")
    with _panel(310, left=42, top=20, gap=46 / 104) as (figure, colours):
        for place, title in enumerate(titles):
            axes = figure.add_subplot(2, 1, place + 1)
            for curve in curves:
                values = curve.conditional if place else curve.unconditional
                rounds = curve.reached if place else [curve.reached[0]] * len(values)
                colour = colours[f"series-{curve.series.colour}"]
                known = [i for i, value in enumerate(values) if value is not None]
                places, heights = [i + 1 for i in known], [values[i] for i in known]
                few = [rounds[i] < FEW for i in known]
                axes.plot(places, heights, color=colour, linewidth=1.6, clip_on=False)
                axes.scatter(
                    places,
                    heights,
                    s=24,
                    marker=MARKERS[curve.series.index % len(MARKERS)],
                    facecolors=[colours["card"] if hollow else colour for hollow in few],
                    edgecolors=colour,
                    linewidths=1.2,
                    zorder=3,
                    clip_on=False,
                )
            axes.set_title(title, pad=7)
            axes.set_ylim(0, 1)
            axes.set_xlim(0.7, depth + 0.3)
            axes.xaxis.set_major_locator(_locator(min(depth, 8), integer=True))
            axes.yaxis.set_major_locator(_locator(4))
            axes.yaxis.set_major_formatter(_percent())
            axes.grid(axis="y")
        axes.set_xlabel("draft position")
        return _svg(figure, name, description)


def time_split(
    name: str, description: str, labels: Sequence[str], parts: Sequence[Sequence[float]]
) -> str:
    """Stacked horizontal bars, one a label: ``parts[i][p]`` milliseconds of phase p (0..4)."""
    with _panel(38 + 32 * len(labels), left=8, top=2) as (figure, colours):
        axes = figure.add_subplot()
        longest = max([1e-9, *(sum(part) for part in parts)])
        for y, (label, part) in enumerate(zip(labels, parts, strict=True)):
            axes.text(0, y - 0.3, short(label), va="center")
            left = 0.0
            for phase, value in enumerate(part):
                axes.barh(y + 0.14, value, 0.44, left, color=colours[f"phase-{phase}"])
                left += value
            _beside(axes, left, y + 0.14, f"{left:.1f}")
        axes.set_xlim(0, 1.14 * longest)
        axes.set_ylim(len(labels) - 0.45, -0.6)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("milliseconds per committed token")
        axes.grid(axis="x")
        return _svg(figure, name, description)


def short(label: str) -> str:
    """A label that fits a panel: the middle of a long one is left out."""
    if len(label) <= LABEL_CHARS:
        return label
    half = (LABEL_CHARS - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


@contextmanager
def _panel(
    height: int, *, left: int, top: int, gap: float = 0
) -> Iterator[tuple[Any, dict[str, str]]]:
    """An empty figure of ``height`` px, and the colours by role.

    ``left`` and ``top`` are px around the axes, ``gap`` the space between rows in heights of a row.
    Fixed, not fitted to the labels: axes of neighbouring panels line up, and fitting is half the time.

    ValueError when matplotlib is missing. Reads no matplotlibrc: the user's own style would change
    the bytes.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the report needs matplotlib: pip install 'paceline[report]'") from error
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        figure.subplots_adjust(
            left=left / WIDTH,
            right=1 - 8 / WIDTH,
            top=1 - top / height,
            bottom=BOTTOM / height,
            hspace=gap,
        )
        yield figure, _ROLES


def _beside(axes: Any, x: float, y: float, text: str) -> None:
    """A number right of the end of its bar; a line behind it is left out."""
    box = {"facecolor": _ROLES["card"], "edgecolor": "none", "pad": 0.5}
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", bbox=box)


def _locator(steps: int, *, integer: bool = False) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(steps, integer=integer)


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1, decimals=0)


def _svg(figure: Any, name: str, description: str) -> str:
    """The figure as an element with ids of its own (``name`` is unique in the page) and a label."""
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    text = stream.getvalue()
    text = re.sub(r"\A.*?<svg[^>]*>", "", text, flags=re.DOTALL)
    # Its style sheet would hold for the whole page; the page has one of its own for charts.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    # Ids that matplotlib made, in the three places it writes them: other charts have the same.
    text = re.sub(r'(<[^<>]* id=")', rf"\g<1>{name}-", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for role, colour in _ROLES.items():
        text = text.replace(colour, f"var(--{role})")
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    return (
        f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">{text}'
    )
