"""One self-contained HTML page from bench and preflight files: what was measured, and what it means.

Knows nothing about how figures are measured or drawn: `results` reads the files, `svg` draws, the
template beside this file holds the words. The same files give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.evaluate import svg
from paceline.evaluate.preflight import SCHEMA as PREFLIGHT
from paceline.evaluate.report_panels import (
    Panel,
    histogram_panel,
    number,
    percent,
    slots_panel,
    speedup_panel,
    split_panel,
)
from paceline.evaluate.report_preflight import Preflight, read_preflight
from paceline.evaluate.report_summary import Entry, Setting, remarks, summarise, tiles
from paceline.evaluate.results import (
    BASELINE,
    NAME,
    PHASES,
    VERSION,
    Bench,
    read_bench,
    read_schema,
)

# Facts of a machine: where files differ in one, each has tables of its own. The first are always named.
MACHINE = ("dtype", "device", "threads", "device_name", "machine", "torch")
NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Everything of one setting: the entries by task, and its panels by section."""

    setting: Setting
    tasks: Mapping[str, Sequence[Entry]]
    remarks: Sequence[str]
    best: Mapping[str, Sequence[str]]  # task -> labels of methods that win it and beat plain
    speedup: Panel | None
    split: Sequence[Panel]
    histograms: Sequence[Panel]
    slots: Sequence[Panel]
    categories: Mapping[str, Mapping[str, Sequence[Entry | None]]]  # task, category, per method
    methods: Sequence[svg.Series]


def render(paths: Sequence[Path]) -> str:
    """The page for these bench and preflight files, as HTML.

    Raises:
        ValueError: a file that is neither (names file and key), files about different
            targets, a file given twice, or a missing library.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ValueError("the report needs jinja2: pip install 'paceline[report]'") from error

    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("the same file is given twice")
    known = {NAME: VERSION, PREFLIGHT[0]: PREFLIGHT[1]}
    kinds = {path: read_schema(path, known)["schema"]["name"] for path in paths}
    benches = [read_bench(path) for path in paths if kinds[path] == NAME]
    others = [path for path in paths if kinds[path] != NAME]
    preflights = [read_preflight(path, f"preflight-{i}") for i, path in enumerate(others)]
    target = _same_target(paths, kinds, benches, preflights)
    names = file_names(benches)
    entries = enter(benches, names)
    legend = list(dict.fromkeys(entry.series for entry in entries))
    totals = [entry for entry in entries if entry.run.category is None]
    largest = max([entry.run.speedup_vs_plain or 0 for entry in totals], default=0)
    blocks = [
        _block(i, setting, some, largest) for i, (setting, some) in enumerate(_grouped(entries))
    ]
    environment = Environment(
        loader=PackageLoader("paceline.evaluate", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "svg": Markup,
        "number": number,
        "percent": percent,
        "value": _value,
        "speed": _speed,
    }
    return environment.get_template("report.html.j2").render(
        target=target,
        title=f"Speculative decoding on {target}",
        summary=summarise(totals, target) if benches else [],
        tiles=tiles(totals) if benches else [],
        preflights=preflights,
        notices=notices(benches, names),
        legend=legend,
        phases=PHASES,
        few=svg.FEW,
        blocks=blocks,
        files=list(zip(names, benches, strict=True)),
        sources=[path.name for path in paths],
    )


def _same_target(
    paths: Sequence[Path],
    kinds: Mapping[Path, str],
    benches: Sequence[Bench],
    preflights: Sequence[Preflight],
) -> str:
    """The one target's name; an engine's counters do not know theirs. Raises ValueError for two."""
    measured = [path for path in paths if kinds[path] == NAME]
    for path, bench in zip(measured, benches, strict=True):
        first, facts = _facts(benches[0].target), _facts(bench.target)
        different = [key for key in first if key in facts and first[key] != facts[key]]
        if different:
            raise ValueError(
                f"{path}: target.{different[0]} differs from that of {measured[0]}; speed-ups of "
                "different targets cannot be compared, write one report per target"
            )
    named = {str(bench.target["name"]) for bench in benches}
    named |= {one.arguments["target"] for one in preflights if "target" in one.arguments}
    if len(named) > 1:
        raise ValueError(
            f"the files are about different targets ({', '.join(sorted(named))}); write one report "
            "per target"
        )
    return named.pop() if named else "an engine"


def _facts(target: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a target: nested keys joined by dots, nulls (unknown) left out."""
    facts: dict[str, Any] = {}
    for key, value in target.items():
        if isinstance(value, dict):
            facts |= {f"{key}.{inner}": v for inner, v in _facts(value).items()}
        elif value is not None:
            facts[key] = value
    return facts


def file_names(benches: Sequence[Bench]) -> list[str]:
    """A short unique name per file: without its ending, with a number where two are alike."""
    stems = [Path(bench.file).stem for bench in benches]
    return [
        stem if stems.count(stem) == 1 else f"{stem} #{i}" for i, stem in enumerate(stems, start=1)
    ]


def enter(benches: Sequence[Bench], names: Sequence[str]) -> list[Entry]:
    """Every run with its setting and its method's label, settings from the easiest on.

    A method that several files measured keeps one label only where it is the same drafter and no
    two of its runs are the same; otherwise each of its labels names its file.
    """
    machines = _machines(benches)
    several = len(set(machines)) > 1
    found: dict[str, list[tuple[Any, ...]]] = {}
    weights: dict[str, set[str | None]] = {}
    settings: list[list[Setting]] = []
    for bench, machine in zip(benches, machines, strict=True):
        settings.append([])
        for run in bench.runs:
            setting = Setting(
                batch_size=run.batch_size,
                temperature=run.temperature,
                machine=machine if several else "",
            )
            settings[-1].append(setting)
            found.setdefault(run.method, []).append((setting, run.task, run.category))
            weights.setdefault(run.method, set()).add(bench.weights[run.method])
    clashing = {m for m, keys in found.items() if len(set(keys)) < len(keys) or len(weights[m]) > 1}
    series: dict[str, svg.Series] = {}
    entries = []
    for bench, name, places in zip(benches, names, settings, strict=True):
        for run, setting in zip(bench.runs, places, strict=True):
            label = f"{run.method} ({name})" if run.method in clashing else run.method
            if label not in series:
                known = sum(one.index > 0 for one in series.values())
                index = 0 if run.method == BASELINE else known + 1
                series[label] = svg.Series(label=label, index=index)
            entries.append(
                Entry(
                    run=run,
                    setting=setting,
                    series=series[label],
                    file=name,
                    prompts=bench.prompts[run.task],
                    max_new_tokens=bench.arguments["max_new_tokens"],
                )
            )
    return sorted(entries, key=lambda entry: entry.setting.order)


def _machines(benches: Sequence[Bench]) -> list[str]:
    """Each file's machine in words: number format, device, threads, and in what else they differ."""
    tables = [bench.environment for bench in benches]
    differ = [key for key in MACHINE[NAMED:] if len({table[key] for table in tables}) > 1]
    found = []
    for table in tables:
        threads = f"{table['threads']} thread{'' if table['threads'] == 1 else 's'}"
        facts = [table["dtype"], table["device"], threads]
        facts += [f"torch {table[key]}" if key == "torch" else table[key] for key in differ]
        found.append(", ".join(facts))
    return found


def notices(benches: Sequence[Bench], names: Sequence[str]) -> list[str]:
    """What a reader must know before he compares columns: where the files were not alike."""
    found = []
    for task in dict.fromkeys(name for bench in benches for name in bench.prompts):
        prompts = {b.prompts[task] for b in benches if task in b.prompts}
        if len(prompts) > 1:
            found.append(
                f"The files measured {task} on different prompts: compare methods of one file only."
            )
    kinds = (
        ("environment", MACHINE, "compare speed-ups rather than tokens per second"),
        ("arguments", ("max_new_tokens",), "compare methods of one file only"),
        ("environment", ("paceline", "commit", "transformers"), "the code was not the same"),
    )
    for what, keys, so in kinds:
        for key in keys:
            values = [_value(getattr(bench, what).get(key)) for bench in benches]
            if len(set(values)) > 1:
                each = ", ".join(f"{n}: {v}" for n, v in zip(names, values, strict=True))
                found.append(f"The files differ in {key} ({each}): {so}.")
    return found


def _best(entries: Sequence[Entry]) -> list[str]:
    """Labels of the fastest among one task's entries that were asked the same, if it beats plain."""
    found = []
    for asked in dict.fromkeys(entry.asked for entry in entries):
        some = [entry for entry in entries if entry.asked == asked]
        fastest = max(some, key=lambda entry: entry.run.speedup_vs_plain or 0)
        if fastest.series.index and (fastest.run.speedup_vs_plain or 0) > 1:
            found.append(fastest.series.label)
    return found


def _grouped(entries: Iterable[Entry]) -> list[tuple[Setting, list[Entry]]]:
    groups: dict[Setting, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.setting, []).append(entry)
    return list(groups.items())


def _block(place: int, setting: Setting, entries: Sequence[Entry], largest: float) -> Block:
    totals = [entry for entry in entries if entry.run.category is None]
    tasks: dict[str, list[Entry]] = {}
    for entry in totals:
        tasks.setdefault(entry.run.task, []).append(entry)
    methods = list(dict.fromkeys(entry.series for entry in entries if entry.series.index))
    found = {
        (entry.run.task, entry.run.category, entry.series): entry
        for entry in entries
        if entry.run.category is not None and entry.series.index
    }
    categories: dict[str, dict[str, list[Entry | None]]] = {}
    for task, category, _ in found:
        cells = [found.get((task, category, method)) for method in methods]
        categories.setdefault(task, {})[str(category)] = cells
    timed = {task: [e for e in some if e.run.committed_tokens] for task, some in tasks.items()}
    drafted = {
        task: [entry for entry in some if entry.series.index and entry.run.verify_rounds]
        for task, some in tasks.items()
    }
    tried = {task: [e for e in some if e.run.drafted_tokens] for task, some in drafted.items()}

    def panels(
        name: str, kind: Callable[..., Panel], some: Mapping[str, Sequence[Entry]]
    ) -> list[Panel]:
        return [
            kind(f"{name}-{place}-{i}", task, setting, some[task])
            for i, task in enumerate(some)
            if some[task]
        ]

    return Block(
        setting=setting,
        tasks=tasks,
        remarks=remarks(totals),
        best={task: _best(some) for task, some in tasks.items()},
        speedup=speedup_panel(f"speedup-{place}", setting, tasks, largest),
        split=panels("split", split_panel, timed),
        histograms=panels("histogram", histogram_panel, drafted),
        slots=panels("slots", slots_panel, tried),
        categories=categories,
        methods=methods,
    )


def _speed(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _value(value: Any) -> str:
    """An argument or a fact of the environment, as text."""
    if isinstance(value, list):
        return ", ".join(_value(entry) for entry in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(entry)}" for key, entry in value.items()) or "none"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
