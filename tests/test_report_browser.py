"""The report page in a real browser: no sideways scrolling, no cut text, drawn in both themes.

Does not know the figures; test_report.py does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench_example import example_bench
from paceline.evaluate.report import render

WIDTHS = (1280, 400)
LONG = "dflash:drafters/" + "smollm2-16k-block8-" * 4 + "+markov:0.35"
# Looks into frames of the page from outside: the page itself forbids scripts.
MEASURE = """
<script>
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(one => one.open = true);
  const outside = one => one.getBoundingClientRect().right > root.clientWidth + 1;
  const wide = [...page.body.querySelectorAll("*")].filter(one =>
    !one.closest(".scroll *, .hidden, svg *") && outside(one));
  const cut = [...page.querySelectorAll("svg text")].filter(one => {
    const box = one.getBoundingClientRect(), chart = one.closest("svg").getBoundingClientRect();
    return box.left < chart.left - 1 || box.right > chart.right + 1 ||
      box.top < chart.top - 2 || box.bottom > chart.bottom + 2;
  });
  const sizes = [...page.querySelectorAll("svg text")].map(one => one.getBoundingClientRect().height);
  return {
    page: root.scrollWidth, window: root.clientWidth,
    wide: wide.map(one => one.tagName + "." + one.className),
    cut: cut.map(one => one.textContent), smallest_text: Math.min(...sizes),
    scrolls: [...page.querySelectorAll(".scroll")]
      .filter(one => one.scrollWidth > one.clientWidth).length,
  };
}
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>
<pre id="found"></pre>
"""


def browser() -> str:
    """The browser's path. Skips only where nobody could have installed one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "no chromium: as root, `make browser` installs it"
    if os.environ.get("CI") or os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


def chromium(folder: Path, *arguments: str) -> str:
    """Run it headless in a profile of its own; returns what it prints."""
    # No sandbox: containers and root have none, and the only page it opens is our own.
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder}/p",
    ]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def frames(folder: Path, name: str, *sources: tuple[str, int, int], more: str = "") -> str:
    """A page that shows others at given widths and heights: a window cannot be 400 px narrow."""
    shown = "".join(
        f'<iframe src="{source}" style="border:0;width:{width}px;height:{height}px"></iframe>'
        for source, width, height in sources
    )
    text = f'<!doctype html><body style="margin:0">{shown}{more}</body>'
    (folder / name).write_text(text)
    return (folder / name).as_uri()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings, a method with a very long name, and the page about them."""
    folder = tmp_path_factory.mktemp("report")
    document = example_bench()
    document["runs"] = [run for run in document["runs"] if run["temperature"] == 0]
    text = json.dumps(document).replace('"ngram"', json.dumps(LONG))
    (folder / "bench.json").write_text(text)
    (folder / "report.html").write_text(render([folder / "bench.json"]), encoding="utf-8")
    return folder


def measured(folder: Path, *sources: tuple[str, int, int]) -> list[dict[str, Any]]:
    page = chromium(folder, "--dump-dom", frames(folder, "outer.html", *sources, more=MEASURE))
    found = re.search(r'<pre id="found">(.+?)</pre>', page)
    assert found, "the frames were not measured"
    return json.loads(unescape(found[1]))


def test_nothing_is_wider_than_the_window_or_cut(folder: Path) -> None:
    figures = measured(folder, *(("report.html", width, 900) for width in WIDTHS))
    for width, found in zip(WIDTHS, figures, strict=True):
        assert found["window"] == width
        assert found["page"] <= width and not found["wide"], found
        assert not found["cut"], "text of a chart leaves the chart"
        assert found["smallest_text"] >= 10
    assert figures[1]["scrolls"] > 0, "on a phone, tables scroll in their own boxes"


def test_the_measurement_finds_what_it_looks_for(folder: Path) -> None:
    bad = (
        '<p style="width:900px">wide</p><svg width="50" height="20"><text x="20" y="15">a long text'
    )
    (folder / "bad.html").write_text(f"<!doctype html><body>{bad}</text></svg></body>")
    (found,) = measured(folder, ("bad.html", 400, 300))
    assert found["page"] > 400 and found["wide"] == ["P."] and found["cut"] == ["a long text"]


def palette(page: str, theme: str) -> dict[str, tuple[int, ...]]:
    """The page's colours by name in one theme."""
    blocks = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    assert len(blocks) == 2
    return {
        name: tuple(bytes.fromhex(colour))
        for name, colour in re.findall(r"--([\w-]+): #([0-9a-f]{6});", blocks[theme == "dark"])
    }


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """WCAG 2 contrast ratio of two sRGB colours, 1 to 21."""
    lights = []
    for colour in (one, other):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (channel / 255 for channel in colour)
        ]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_the_paper(folder: Path, theme: str) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    colours = palette(page, theme)
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    for paper in ("page", "card"):
        for name in ("text", "muted", "link", "good", "bad"):
            assert contrast(colours[name], colours[paper]) >= 4.5, (name, paper)
    charts = [name for name in colours if name.startswith(("series-", "phase-"))]
    assert len(charts) == 8 + 5
    for name in charts:
        assert contrast(colours[name], colours["card"]) >= 3, name
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    assert used <= set(colours), "a colour that no theme defines draws black"
    assert set(palette(page, "light")) == set(palette(page, "dark"))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn(folder: Path, theme: str, width: int) -> None:
    picture, height = folder / f"{theme}-{width}.png", 4000 if width > 800 else 6500
    chromium(
        folder,
        f"--blink-settings=preferredColorScheme={int(theme == 'light')}",
        f"--window-size={width},{height}",
        f"--screenshot={picture}",
        frames(folder, "shown.html", ("report.html", width, height)),
    )
    with Image.open(picture) as image:
        assert image.size == (width, height)
        found = image.convert("RGB").getcolors(width * height)
        pixels = Counter({colour: count for count, colour in found})
    colours = palette((folder / "report.html").read_text(encoding="utf-8"), theme)
    assert pixels.most_common(1)[0][0] == colours["page"]
    assert len(pixels) > 200, "text and charts have many shades"
    for name in ("card", "series-1", "series-2", "phase-0", "phase-2"):
        assert pixels[colours[name]] > 200, f"{name} is missing: something was not drawn"
