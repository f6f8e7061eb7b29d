"""The report page: right numbers in right cells, same bytes, no injection, and its summary's words.

Does not look at pixels; test_report_browser.py does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench_example import example_bench
from paceline import cli
from paceline.evaluate import svg
from paceline.evaluate.metrics import acceptance
from paceline.evaluate.report import enter, notices, render
from paceline.evaluate.report_panels import percent
from paceline.evaluate.report_summary import remarks, summarise
from paceline.evaluate.results import read_bench

VOID = {"meta", "link", "br", "img", "input", "hr", "base"}
HOSTILE = """<script>alert(1)</script>--> "onload='x' & $\\frac{x}$ {{ 7*7 }} href="#a" id="b"""


class Page(HTMLParser):
    """Every element with its attributes, and every table as rows of (tag, text)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[tuple[str, list[list[str]]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.caption = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append(("", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "elements nest"

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "caption" in self.open:
            caption, rows = self.tables[-1]
            self.tables[-1] = (caption + data, rows)
        elif "tr" in self.open and self.tables[-1][1][-1]:
            self.tables[-1][1][-1][-1] += data

    def table(self, caption: str) -> list[list[str]]:
        """The one table with this caption, cells stripped."""
        (found,) = [rows for name, rows in self.tables if name == caption]
        return [[" ".join(cell.split()) for cell in row] for row in found]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def small(document: dict[str, Any] | None = None) -> dict[str, Any]:
    """One setting of the example: enough for words and tables, and quick to draw."""
    document = document or example_bench()
    document["runs"] = [
        run for run in document["runs"] if run["batch_size"] == 1 and run["temperature"] == 0
    ]
    return document


def totals(document: dict[str, Any], method: str) -> list[dict[str, Any]]:
    runs = document["runs"]
    return [run for run in runs if run["method"] == method and run["category"] is None]


def faster(document: dict[str, Any], run: dict[str, Any], speedup: float) -> None:
    """Give a run the clocks that make this speed-up."""
    (plain,) = [
        other
        for other in document["runs"]
        if other["method"] == "plain"
        and all(other[k] == run[k] for k in ("task", "category", "batch_size", "temperature"))
    ]
    scale = run["tokens_per_second"] / (speedup * plain["tokens_per_second"])
    run["seconds"] = {phase: value * scale for phase, value in run["seconds"].items()}
    run["tokens_per_second"] = run["committed_tokens"] / run["seconds"]["total"]
    run["speedup_vs_plain"] = run["tokens_per_second"] / plain["tokens_per_second"]


def rename(document: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The document with one method, task or category called something else everywhere."""
    return json.loads(json.dumps(document).replace(json.dumps(old), json.dumps(new)))


def page_of(tmp_path: Path, *documents: dict[str, Any]) -> str:
    paths = []
    for i, document in enumerate(documents):
        paths.append(tmp_path / f"run{i}.json")
        paths[-1].write_text(json.dumps(document))
    return render(paths)


def summary(tmp_path: Path, document: dict[str, Any]) -> str:
    """The paragraph without the page around it."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    bench = read_bench(path)
    entries = [entry for entry in enter([bench], ["run"]) if entry.run.category is None]
    return " ".join(summarise(entries, bench.target["name"]))


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and tables: charts are laid out and not written, most of the time."""
    monkeypatch.setattr(svg, "_svg", lambda figure, name, description: "<svg></svg>")


@pytest.mark.usefixtures("no_charts")
def test_every_figure_stands_under_its_heading(tmp_path: Path) -> None:
    document = small()
    run = totals(document, "dflash")[0]
    # Figures that cannot be mistaken for one another.
    faster(document, run, 1.51)
    run |= {"speedup_median": 1.52, "speedup_end_to_end": 1.53, "chunks": 2, "measurements": 6}
    run |= {"acceptance_length_request_mean": 1.56, "verified_per_committed": None}
    run |= {"requests": 12, "identical_to_plain": 7, "near_ties": 3, "bugs": 2}
    run |= {"looping_share": 0.25}
    run["without_loops"] |= {"committed_tokens": 157, "verify_rounds": 100}
    run["without_loops"] |= {"acceptance_length_pooled": 1.57, "speedup_vs_plain": 1.58}
    pooled, full = run["acceptance_length_pooled"], run["acceptance_length_full_bonus"]
    assert f"{pooled:.2f}" != f"{full:.2f}" or pooled == full
    rows = Page(page_of(tmp_path, document)).table("Results by task and method, batch 1, greedy")
    head = ["Task and method", *rows[1]]
    at = rows.index(["gsm8k"])
    assert [row[0][-6:] for row in rows[at + 1 : at + 4]] == [" plain"[-6:], " ngram", "dflash"]
    wanted = f"1.51 1.52 1.53 {run['tokens_per_second']:.1f} 2_×_3 {pooled:.2f} {full:.2f}".split()
    wanted += "1.56 – 7_of_12 3 2 25% 1.57 1.58".split()
    names = "speed-up median with_prefill tokens/s chunks pooled full_bonus per_reply checked"
    names += " identical near_ties"
    names += " bugs looping acceptance speed-up"
    assert head[1:] == [name.replace("_", " ") for name in names.split()]
    assert rows[at + 3][1:] == [value.replace("_", " ") for value in wanted]


@pytest.mark.usefixtures("no_charts")
def test_charts_numbers_are_the_files(tmp_path: Path) -> None:
    document = small()
    page = Page(page_of(tmp_path, document))
    run = next(run for run in totals(document, "dflash") if run["task"] == "builtin")
    split = page.table("Milliseconds per committed token, builtin, batch 1, greedy")
    (row,) = [row for row in split if row[0] == "dflash"]
    together = sum(float(cell) for cell in row[1:6])
    assert together == pytest.approx(1000 / run["tokens_per_second"], abs=0.03)
    assert float(row[6]) == pytest.approx(together, abs=0.03)
    rounds = page.table("Share of rounds by tokens committed, builtin, batch 1, greedy")
    (row,) = [row for row in rounds if row[0] == "dflash"]
    shares = [run["histogram"].get(head, 0) / run["verify_rounds"] for head in rounds[0][1:]]
    assert row[1:] == [f"{100 * share:.0f}%" for share in shares]
    assert sum(shares) == pytest.approx(1)
    slots = page.table("Share of draft tokens kept by position, builtin, batch 1, greedy")
    (row,) = [row for row in slots if row[0] == "dflash, conditional"]
    kept = [slot["conditional"] for slot in run["slot_acceptance"]]
    assert len(kept) == 7 and min(kept) > 0, "the end of the block is no failure"
    assert row[1:8] == [f"{100 * share:.0f}%" for share in kept]
    categories = page.table("builtin by category, batch 1, greedy: speed-up (acceptance length)")
    assert categories[0][1:] == ["ngram", "dflash"]
    chat = next(r for r in document["runs"] if r["category"] == "chat" and r["method"] == "dflash")
    cell = f"{chat['speedup_vs_plain']:.2f} ({chat['acceptance_length_pooled']:.2f})"
    assert next(row for row in categories if row[0] == "chat")[2] == cell


def test_nothing_is_loaded_and_everything_has_a_name(tmp_path: Path) -> None:
    text = page_of(tmp_path, small())
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "base"}
    assert "://" not in text and "@import" not in text and "javascript:" not in text
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    ids = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(set(ids)) == len(ids)
    for _, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("href", "xlink:href", "src") and value:
                assert value[0] == "#" and value[1:] in ids
            for target in re.findall(r"url\(#([^)]*)\)", value or ""):
                assert target in ids
    charts = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(charts) == 7 and all(a["role"] == "img" and a["aria-label"] for a in charts)
    assert all(a.get("scope") for tag, a in page.elements if tag == "th")
    assert all(name for name, _ in page.tables), "every table has a caption"
    assert "dflash: gsm8k 1.56, builtin 1.45" in str(charts[0]["aria-label"])
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(chart.replace("<svg", '<svg xmlns:xlink="x"', 1))
        assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r'(href="|url\()#', "", chart)), "no colour"


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    document = small()
    document["runs"] = [r for r in document["runs"] if r["task"] == "builtin"]
    plain = Page(page_of(tmp_path, document))
    for old in ("dflash", "builtin", "code", "smollm2", "avx2"):
        document = rename(document, old, f"{HOSTILE} {old}")
    page = Page(page_of(tmp_path, document))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    for (_, attributes), (_, honest) in zip(page.elements, plain.elements, strict=True):
        assert set(attributes) == set(honest)
    for old in ("dflash", "builtin", "code", "smollm2", "avx2"):
        assert f"{HOSTILE} {old}" in "".join(page.words), old


def test_same_files_same_bytes_in_another_process(tmp_path: Path) -> None:
    document = small()
    document["runs"] = [run for run in document["runs"] if run["task"] == "gsm8k"]
    here = page_of(tmp_path, document)
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nfont.size: 30\naxes.grid: True\n")
    script = "import sys, pathlib; from paceline.evaluate.report import render\n"
    script += "sys.stdout.buffer.write(render([pathlib.Path(sys.argv[1])]).encode())"
    there = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run0.json")],
        env=os.environ | {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert there.stdout == here.encode()


def test_summary_names_the_fastest_and_where(tmp_path: Path) -> None:
    document = small()
    for method, speeds in (("ngram", (1.1, 1.2)), ("dflash", (1.5, 2.4))):
        for run, speed in zip(totals(document, method), speeds, strict=True):
            faster(document, run, speed)
    said = summary(tmp_path, document)
    mean = (1.5 * 2.4) ** 0.5
    assert "On smollm2 at batch 1, greedy, dflash, the fastest of 2 methods, decodes" in said
    assert f"decodes {mean:.2f}× as fast as plain decoding" in said
    assert "2.40× on builtin, 1.50× on gsm8k" in said
    runs = totals(document, "dflash")
    length = sum(r["committed_tokens"] for r in runs) / sum(r["verify_rounds"] for r in runs)
    assert f"{length:.2f} tokens committed per verify round" in said


def test_a_method_measured_on_the_easy_task_alone_does_not_win(tmp_path: Path) -> None:
    document = small()
    easy = totals(document, "ngram")[0]
    faster(document, easy, 9.0)
    document["runs"] = [r for r in document["runs"] if r["method"] != "ngram" or r is easy]
    assert "greedy, dflash decodes" in summary(tmp_path, document)
    document["runs"] = [r for r in document["runs"] if r["task"] == "gsm8k"]
    assert "9.00× as fast as plain decoding (on gsm8k), with" in summary(tmp_path, document)


@pytest.mark.usefixtures("no_charts")
def test_summary_when_nothing_is_faster(tmp_path: Path) -> None:
    document = small()
    for run in document["runs"]:
        if run["method"] != "plain":
            faster(document, run, 0.8 if run["method"] == "dflash" else 0.7)
    said = summary(tmp_path, document)
    assert "dflash, the fastest of 2 methods, is slower than plain decoding, at 0.80×" in said
    text = page_of(tmp_path, document)
    assert said in Page(text).text and 'class="edge best"' not in text


@pytest.mark.usefixtures("no_charts")
def test_summary_and_page_with_plain_alone(tmp_path: Path) -> None:
    document = small()
    document["runs"] = [run for run in document["runs"] if run["method"] == "plain"]
    text = page_of(tmp_path, document)
    speed = document["runs"][0]["tokens_per_second"]
    assert (
        "No speed-up was measured on smollm2" in text and f"{speed:.1f} tokens/s on gsm8k" in text
    )
    page = Page(text)
    targets = {a["href"] for tag, a in page.elements if tag == "a"}
    assert targets == {"#results", "#time", "#environment"}


@pytest.mark.usefixtures("no_charts")
def test_summary_says_whether_outputs_changed(tmp_path: Path) -> None:
    document = small()
    for run in document["runs"]:
        run |= {"identical_to_plain": run["requests"], "near_ties": 0, "bugs": 0}
    assert "All of the 48 replies with drafts" in summary(tmp_path, document)
    totals(document, "ngram")[0] |= {"identical_to_plain": 9, "near_ties": 3}
    assert "45 are token for token" in summary(tmp_path, document)
    assert "the other 3 part from it at a near tie" in summary(tmp_path, document)
    totals(document, "ngram")[1] |= {"identical_to_plain": 10, "bugs": 2}
    text = page_of(tmp_path, document)
    assert "2 differ from plain decoding by more than rounding explains" in text
    assert 'class="tile alarm"' in text and '<td class="bad">2</td>' in text


def test_summary_leaves_loops_out_when_there_are_none(tmp_path: Path) -> None:
    document = small()
    runs = totals(document, "dflash")
    runs[0] |= {"looping_share": 0.5}
    runs[1] |= {"looping_share": 0.0}
    for run, without in zip(runs, (1.2, 1.4), strict=True):
        run["without_loops"]["speedup_vs_plain"] = without
    said = summary(tmp_path, document)
    assert "25% of dflash's replies end in a loop" in said
    assert f"without them the speed-up is {(1.2 * 1.4) ** 0.5:.2f}×" in said
    runs[0]["looping_share"] = 0.0
    assert "end in a loop" not in summary(tmp_path, document)


@pytest.mark.usefixtures("no_charts")
def test_files_measured_alike_share_a_page(tmp_path: Path) -> None:
    other = rename(small(), "ngram", "model:tiny")
    other["runs"] = [run for run in other["runs"] if run["method"] != "dflash"]
    rows = Page(page_of(tmp_path, small(), other)).table(
        "Results by task and method, batch 1, greedy"
    )
    names = [row[0].split("\xa0")[-1][2:] for row in rows[rows.index(["gsm8k"]) + 1 :]][:5]
    assert names == ["plain (run0)", "ngram", "dflash", "plain (run1)", "model:tiny"]


@pytest.mark.usefixtures("no_charts")
def test_other_weights_under_one_name_are_told_apart(tmp_path: Path) -> None:
    whole = example_bench()
    other = {**whole, "methods": [dict(method) for method in whole["methods"]]}
    other["methods"][2]["weights"] = "another"
    other["runs"] = [r for r in whole["runs"] if (r["batch_size"], r["temperature"]) == (8, 1)]
    first = small(whole)
    text = Page(page_of(tmp_path, first, other)).text
    assert "dflash (run0)" in text and "dflash (run1)" in text and "ngram (run" not in text


@pytest.mark.usefixtures("no_charts")
def test_what_differs_between_files_is_said(tmp_path: Path) -> None:
    other = small()
    other["environment"]["threads"] = 8
    other["tasks"][0]["fingerprint"] = "other"
    text = Page(page_of(tmp_path, small(), other)).text
    assert "The files differ in threads (run0: 2, run1: 8): compare speed-ups" in text
    assert "measured gsm8k on different prompts" in text and "measured builtin" not in text
    assert "batch 1, greedy, bf16, cpu, 8 threads" in text
    alone = Page(page_of(tmp_path, small())).text
    assert "The files" not in alone and "8 threads" not in alone


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    ("key", "value", "label"),
    [
        ("device_name", "Other CPU", "2 threads, Other CPU"),
        ("machine", "aarch64", "2 threads, aarch64"),
        ("torch", "2.99.0", "2 threads, torch 2.99.0"),
    ],
)
def test_another_machine_has_tables_of_its_own(
    tmp_path: Path, key: str, value: str, label: str
) -> None:
    other = small()
    other["environment"][key] = value
    page = Page(page_of(tmp_path, small(), other))
    assert f"The files differ in {key}" in page.text
    rows = page.table(f"Results by task and method, batch 1, greedy, bf16, cpu, {label}")
    assert len(rows) == 2 + 2 * 4, "no column of another machine"


def test_other_code_is_said(tmp_path: Path) -> None:
    other = small()
    other["environment"]["commit"] = "abc"
    benches = []
    for name, document in (("a.json", small()), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(document))
        benches.append(read_bench(tmp_path / name))
    assert notices(benches, ["a", "b"]) == [
        "The files differ in commit (a: –, b: abc): the code was not the same."
    ]


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("what", ["prompts", "max_new_tokens"])
def test_methods_that_were_asked_something_else_do_not_compete(tmp_path: Path, what: str) -> None:
    """The other file's drafter is faster, on easier prompts or shorter replies."""
    first, other = small(), rename(small(), "dflash", "rival")
    for document, method, speed in ((first, "dflash", 1.5), (other, "rival", 3.0)):
        document["runs"] = [r for r in document["runs"] if r["method"] != "ngram"]
        for run in totals(document, method):
            faster(document, run, speed)
    said = Page(page_of(tmp_path, first, other)).text
    assert "greedy, rival, the fastest of 2 methods, decodes 3.00×" in said
    if what == "prompts":
        other["tasks"][0]["fingerprint"] = "easy"
    else:
        other["arguments"]["max_new_tokens"] = 32
    text = page_of(tmp_path, first, other)
    said = Page(text).text
    assert "greedy in run0, dflash decodes 1.50×" in said
    assert "Fastest elsewhere: rival 3.00× at batch 1, greedy in run1." in said
    # gsm8k and builtin: both win what nobody else was asked; builtin was asked alike.
    assert text.count('class="edge best"') == (3 if what == "prompts" else 4)
    assert "compare methods of one file only" in said


def test_what_the_figures_rest_on_is_said(tmp_path: Path) -> None:
    document = small()
    for run in document["runs"]:
        run |= {"chunks": 1, "measurements": 3, "unfilled_requests": 5}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    bench = read_bench(path)
    entries = [entry for entry in enter([bench], ["run"]) if entry.run.category is None]
    assert remarks(entries) == [
        "gsm8k: 5 of 12 requests were decoded in batches of fewer than 1 rows.",
        "builtin: 5 of 12 requests were decoded in batches of fewer than 1 rows.",
        "Fewer than 3 chunks of requests on gsm8k, builtin: repeats even out the clock, "
        "not the choice of prompts.",
    ]


def test_many_methods_are_told_apart_at_their_bars(tmp_path: Path) -> None:
    document = small()
    one = [run for run in document["runs"] if run["task"] == "gsm8k" and run["method"] == "dflash"]
    plain = [run for run in document["runs"] if run["task"] == "gsm8k" and run["method"] == "plain"]
    names = [f"d{i}" for i in range(9)]
    document["runs"] = plain + [one[0] | {"method": name} for name in names]
    document["methods"] += [document["methods"][2] | {"name": name} for name in names]
    text = page_of(tmp_path, document)
    (chart,) = re.findall(r'<svg role="img" aria-label="Speed-up.*?</svg>', text, re.DOTALL)
    marks = re.findall("× ([" + svg.GLYPHS + "])<", chart)
    colours = [svg.Series(label="", index=i + 1).colour for i in range(9)]
    assert len(set(zip(marks, colours, strict=True))) == 9 and len(set(colours)) == 7


def test_only_all_is_100_percent() -> None:
    assert [percent(share) for share in (0.0, 0.004, 0.994, 0.9999, 1.0, None)] == [
        "0%",
        "0%",
        "99%",
        "99%",
        "100%",
        "–",
    ]


@pytest.mark.usefixtures("no_charts")
def test_a_drafter_that_drafted_nothing_and_a_run_without_rounds_have_dashes(
    tmp_path: Path,
) -> None:
    document = small()
    document["runs"] = [run for run in document["runs"] if run["task"] == "gsm8k"]
    plain, ngram, dflash = document["runs"]
    rounds = ngram["committed_tokens"]
    ngram |= {"drafted_tokens": 0, "accepted_drafts": 0, "slot_acceptance": []}
    ngram |= {"verify_rounds": rounds, "histogram": {"1": rounds}}
    ngram |= {"acceptance_length_pooled": 1.0, "acceptance_length_full_bonus": 1.0}
    nothing = acceptance([]).figures() | {"requests": 12}
    nothing |= dict.fromkeys(("tokens_per_second", "speedup_vs_plain", "speedup_median"))
    without = dict.fromkeys(dflash["without_loops"])
    nothing["without_loops"] = without | {
        "requests": 0,
        "verify_rounds": 0,
        "committed_tokens": 0,
    }
    plain |= nothing
    dflash |= nothing
    ngram |= {"speedup_vs_plain": None}
    rows = Page(page_of(tmp_path, document)).table("Results by task and method, batch 1, greedy")
    row = rows[rows.index(["gsm8k"]) + 3]
    assert row[1:3] == ["–", "–"] and row[6:8] == ["–", "–"]


@pytest.mark.usefixtures("no_charts")
def test_different_targets_are_refused(tmp_path: Path) -> None:
    other = small()
    other["target"]["fingerprint"]["weights"] = None  # unknown is not different
    page_of(tmp_path, small(), other)
    other["target"]["fingerprint"]["weights"] = "tuned"
    with pytest.raises(ValueError, match=r"run1\.json: target\.fingerprint\.weights differs"):
        page_of(tmp_path, small(), other)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set runs[4].slot_acceptance[0].conditional and the like; ... deletes."""

    def act(document: dict[str, Any]) -> None:
        place: Any = document
        *keys, last = [int(k) if k.isdigit() else k for k in re.findall(r"\w+", path)]
        for key in keys:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value

    return act


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", ..., "schema.name is not"),
        ("schema.name", "guidellm", "schema.name is not"),
        ("schema.version", 1, "schema.version is 1, and this paceline reads 2"),
        ("runs", [], "runs: empty"),
        ("runs", {}, r"runs: expected a list, found \{\}"),
        ("environment.threads", "2", 'environment.threads: expected a count, found "2"'),
        ("runs[3].seconds.draft", ..., r"runs\[3\]\.seconds\.draft: missing"),
        ("runs[3].seconds.draft", -1.0, r"runs\[3\]\.seconds\.draft: expected a number"),
        ("runs[3].requests", True, r"runs\[3\]\.requests: expected a count, found true"),
        ("runs[3].requests", 12.5, r"runs\[3\]\.requests: expected a count"),
        ("runs[3].category", 5, r"runs\[3\]\.category: expected text, found 5"),
        ("runs[3].method", "eagle", r"runs\[3\]\.method: 'eagle' is not in methods"),
        ("runs[3].near_ties", 4, r"runs\[3\]\.requests: not the sum"),
        ("runs[3].verify_rounds", 7, r"runs\[3\]\.verify_rounds: 7, but the histogram has"),
        ("runs[3].histogram", {"x": 1}, r"runs\[3\]\.histogram: keys must be counts"),
        ("runs[9].slot_acceptance[0].conditional", 1.5, r"runs\[9\]: .* is a share above 1"),
        ("runs[9].slot_acceptance[0].position", 2, r"runs\[9\]\.slot_acceptance: positions"),
        (
            "runs[3].without_loops.speedup_vs_plain",
            ...,
            r"runs\[3\]\.without_loops\.speedup_.*miss",
        ),
        (
            "runs[3].histogram",
            {"4097": 1},
            r"runs\[3\]\.histogram: 4097 tokens in a round; at most",
        ),
        ("runs[9].slot_acceptance[0].drafted", 1, r"runs\[9\]\.drafted_tokens: .*slot_acceptance"),
        ("runs[9].speedup_vs_plain", 1.3, r"runs\[9\]\.speedup_vs_plain: 1\.3, but the sums"),
        ("runs[9].speedup_vs_plain", None, r"runs\[9\]\.speedup_vs_plain: null, but the sums"),
        ("runs[0].tokens_per_second", 99.0, r"runs\[0\]\.tokens_per_second: 99\.0, but the sums"),
        (
            "runs[9].acceptance_length_pooled",
            9.5,
            r"runs\[9\]\.acceptance_length_pooled: 9\.5, but",
        ),
        ("runs[9].seconds.verify", 9.5, r"runs\[9\]\.seconds\.total: .* but the sums"),
        ("runs[0]", ..., r"runs\[4\]: plain was not measured beside it"),
        ("environment.device_name", ..., r"environment\.device_name: missing"),
        ("methods[1].weights", ..., r"methods\[1\]\.weights: missing"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    document = small()
    (tmp_path / "good.json").write_text(json.dumps(document))
    assert len(read_bench(tmp_path / "good.json").runs) == len(document["runs"])
    change(path, value)(document)
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"bad\.json: " + message):
        read_bench(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": NaN}', "\x00"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json: "):
        read_bench(tmp_path / "bad.json")


@pytest.mark.usefixtures("no_charts")
def test_a_run_twice_is_refused(tmp_path: Path) -> None:
    document = small()
    document["runs"].append(document["runs"][0])
    with pytest.raises(ValueError, match="a second run of plain, gsm8k, None, 1, 0.0"):
        page_of(tmp_path, document)


def test_the_command_writes_whole_pages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = small()
    document["runs"] = [run for run in document["runs"] if run["method"] == "plain"]
    Path("bench.json").write_text(json.dumps(document))
    result = CliRunner().invoke(cli.app, ["report", "bench.json"])
    assert result.exit_code == 0 and "wrote report.html" in result.output
    page = Path("report.html").read_text(encoding="utf-8")
    assert page == render([Path("bench.json")])
    Path("wrong.json").write_text('{"schema": {"name": "other"}}')
    for arguments, message in (
        (["bench.json", "wrong.json"], "wrong.json: schema.name is not"),
        (["bench.json", "./bench.json"], "given twice"),
        (["bench.json", "--out", "bench.json"], "is one of the files it is made of"),
        (["absent.json"], "absent.json"),
    ):
        monkeypatch.setattr(sys, "argv", ["paceline", "report", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2 and message in capsys.readouterr().err
    assert Path("report.html").read_text(encoding="utf-8") == page
    assert sorted(os.listdir()) == ["bench.json", "report.html", "wrong.json"]
