"""The `paceline data` commands: check, tokenize, regenerate, self-write, inspect, estimate.

Knows nothing that the data room does not; figures go to stdout, progress and problems to stderr.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.common import (
    DrafterOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    TokensOption,
    write_json,
)

app = typer.Typer(no_args_is_help=True, help="Prompts and conversations in, training rows out.")

SHOWN = 20  # problems printed in full; all are counted, and all are in the JSON file

FileArgument = Annotated[
    str, typer.Argument(help="JSON lines, a JSON array, .gz of either, or a datasets name.")
]
OutOption = Annotated[Path, typer.Option(help="The file to append to; the same command resumes.")]
ArgsOption = Annotated[
    list[str] | None,
    typer.Option("--template-arg", help="key=value for the chat template, repeatable."),
]
LimitOption = Annotated[int | None, typer.Option(help="Only the first so many conversations.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Replies decoded together.")]
TapsOption = Annotated[int, typer.Option(min=1, help="How many target layers will be captured.")]
MeasureOption = Annotated[float, typer.Option(min=0, help="Seconds of measuring speed; 0: none.")]


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(help="Files, or datasets names.")],
    target: Annotated[
        str | None, typer.Option(help="Also render every row with this target's template.")
    ] = None,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Say which rows can be used, and why the others cannot; exit code 1 if some cannot.

    Example: paceline data check sharegpt.json chats.jsonl --target smollm2
    """
    from paceline.data.formats import read_conversations
    from paceline.data.source import open_template
    from paceline.data.view import shape_counts

    template = open_template(target, _arguments(template_args))[0] if target else None
    problems = _problems()
    counts = {
        file: shape_counts(read_conversations(file, problems), template, problems) for file in files
    }
    for file, found in counts.items():
        typer.echo(f"{file}: " + ", ".join(f"{n} {what}" for what, n in found.items()))
    _tell(problems)
    write_json(json_file, {"files": counts, **_figures(problems)})
    if problems.rows:
        raise typer.Exit(1)


@app.command()
def tokenize(
    file: FileArgument,
    out: OutOption,
    target: TargetOption = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=2, help="Prompt and reply of a row.")] = 2048,
    limit: LimitOption = None,
    taps: TapsOption = 5,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Turn conversations into token rows, one per reply, as the template serves them.

    Example: paceline data tokenize sharegpt.json --target smollm2 --out rows.jsonl
    """
    from paceline.data.estimate import estimate
    from paceline.data.formats import read_conversations
    from paceline.data.rows import RowFile, read_rows
    from paceline.data.source import hidden_size, open_template
    from paceline.data.tokenise import tokenise

    arguments = _arguments(template_args)
    template, fingerprint = open_template(target, arguments)
    problems = _problems()
    # The replies are the file's own: nothing says that this target's weights wrote them.
    facts = {"target": target, "kind": "tokenize", "template": arguments}
    with RowFile(out, fingerprint.without_weights(), facts) as rows, _progress(None) as step:
        conversations = read_conversations(file, problems, limit)
        counts = tokenise(
            conversations, template, rows, problems, max_tokens=max_tokens, progress=step
        )
    _finish(counts, problems, out)
    lengths = ((len(r["prompt_ids"]), len(r["response_ids"])) for _, r in read_rows(out))
    total = estimate(lengths, taps=taps, hidden_size=hidden_size(target))
    typer.echo(f"in {out}: " + "; ".join(total.lines()))
    write_json(json_file, {**counts, "file": total.figures(), **_figures(problems)})


@app.command()
def regenerate(
    file: FileArgument,
    out: OutOption,
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "none",
    dtype: DtypeOption = "bf16",
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that serves the target.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    max_new_tokens: TokensOption = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed, other samples.")] = 0,
    batch_size: BatchOption = 32,
    limit: LimitOption = None,
    taps: TapsOption = 5,
    measure: MeasureOption = 3.0,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Let the target answer every user turn itself; the same command resumes a stopped run.

    Example: paceline data regenerate prompts.jsonl --out rows.jsonl --temperature 0.6
    """
    import paceline
    from paceline.core import SamplingParams
    from paceline.data import endpoint as remote
    from paceline.data.formats import read_conversations
    from paceline.data.regenerate import InProcess, Settings
    from paceline.data.regenerate import regenerate as answer_all
    from paceline.data.rows import RowFile
    from paceline.data.source import hidden_size, open_template
    from paceline.data.view import plan

    if (endpoint is None) != (model is None):
        raise ValueError("--endpoint and --model go together")
    SamplingParams(max_tokens=max_new_tokens, temperature=temperature, top_p=top_p)  # checks them
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        template=_arguments(template_args),
    )
    template, fingerprint = open_template(target, settings.template)
    total, prompts = plan(file, template, limit, max_new_tokens, taps, hidden_size(target))
    problems = _problems()
    pipeline = None if endpoint else paceline.load(target, drafter, dtype=dtype)
    if pipeline and measure:
        total = total.measured(pipeline, prompts, batch_size, measure)
    typer.echo("at most " + "; ".join(total.lines()))
    answerer: Any
    if pipeline:
        answerer = InProcess(pipeline, settings, batch_size=batch_size)
    else:
        client = remote.Client(url=endpoint or "", model=model or "")
        answerer = remote.Endpoint(client, template, settings, concurrency=concurrency)
    facts = {"target": target, "kind": "regenerate", "template": dict(settings.template)}
    began = time.perf_counter()
    try:
        with RowFile(out, fingerprint, facts) as rows, _progress(total.rows) as step:
            counts = answer_all(
                read_conversations(file, problems, limit),
                answerer,
                template,
                rows,
                problems,
                settings,
                progress=step,
            )
    finally:
        answerer.close()
    seconds = time.perf_counter() - began
    _finish(counts, problems, out)
    figures = {**counts, "seconds": seconds, "at_most": total.figures(), **_figures(problems)}
    write_json(json_file, figures)


@app.command("self-write")
def self_write(
    count: Annotated[int, typer.Option(min=1, help="How many prompts the file should hold.")],
    out: OutOption,
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "none",
    dtype: DtypeOption = "bf16",
    max_new_tokens: TokensOption = 256,
    batch_size: BatchOption = 32,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Let the target write user turns, for `paceline data regenerate` to answer.

    Example: paceline data self-write --count 1000 --out prompts.jsonl
    """
    from collections import Counter

    import paceline
    from paceline.data.rows import RowFile
    from paceline.data.selfwrite import fill
    from paceline.data.source import open_template

    template, fingerprint = open_template(target, _arguments(template_args))
    pipeline = paceline.load(target, drafter, dtype=dtype)
    dropped: Counter[str] = Counter()
    facts = {"target": target, "kind": "self-write"}
    with RowFile(out, fingerprint, facts) as rows, _progress(count) as step:
        written = fill(
            pipeline,
            template,
            rows,
            count,
            dropped=dropped,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            progress=step,
        )
        held = len(rows)
    typer.echo(f"{held} prompts in {out} ({written} new)")
    for why, number in dropped.most_common():
        typer.echo(f"dropped, {why}: {number}")
    if held < count:
        typer.echo("stopped early: too few usable texts; run again to try more", err=True)
    write_json(json_file, {"prompts": held, "written": written, "dropped": dict(dropped)})


@app.command()
def inspect(
    file: FileArgument,
    target: TargetOption = "smollm2",
    rows: Annotated[int, typer.Option(min=1, help="How many to show.")] = 3,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show rows as training sees them: the prompt dim, what is supervised bold.

    Example: paceline data inspect rows.jsonl --rows 5
    """
    from rich.console import Console
    from rich.text import Text

    from paceline.data.fingerprint import check_fingerprint
    from paceline.data.source import open_template
    from paceline.data.view import open_rows

    template, fingerprint = open_template(target, _arguments(template_args))
    check_fingerprint(file, fingerprint)
    problems, console, shown = _problems(), Console(), []
    for place, row in islice(open_rows(file, template, problems), rows):
        prompt, reply = (template.decode(row[key]) for key in ("prompt_ids", "response_ids"))
        sizes = {"prompt_ids": len(row["prompt_ids"]), "response_ids": len(row["response_ids"])}
        title = f"{place}: {sizes['prompt_ids']} prompt ids, {sizes['response_ids']} supervised"
        console.rule(Text(f"{title}, finish {row['finish']}"), align="left")
        console.print(Text.assemble((prompt, "dim"), (reply, "bold green")), soft_wrap=True)
        shown.append({"place": place, "prompt": prompt, "response": reply, **sizes})
    _tell(problems)
    write_json(json_file, {"rows": shown, **_figures(problems)})


@app.command()
def estimate(
    file: FileArgument,
    target: TargetOption = "smollm2",
    dtype: DtypeOption = "bf16",
    taps: TapsOption = 5,
    max_new_tokens: TokensOption = 512,
    batch_size: BatchOption = 32,
    measure: MeasureOption = 3.0,
    capture_rate: Annotated[
        float | None, typer.Option(help="Tokens per second, instead of measuring.")
    ] = None,
    generate_rate: Annotated[
        float | None, typer.Option(help="Tokens per second, instead of measuring.")
    ] = None,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Rows, tokens, bytes of features and hours, before anything long starts.

    Rows count as they are; a conversation counts with a reply of --max-new-tokens per user turn.

    Example: paceline data estimate rows.jsonl --taps 5
    """
    import paceline
    from paceline.data.source import hidden_size, open_template
    from paceline.data.view import plan

    template, _ = open_template(target, _arguments(template_args))
    total, prompts = plan(file, template, None, max_new_tokens, taps, hidden_size(target))
    if measure and capture_rate is None and generate_rate is None:
        pipeline = paceline.load(target, None, dtype=dtype)
        total = total.measured(pipeline, prompts, batch_size, measure, capture=True)
    else:
        total = total.at(capture_rate, generate_rate)
    for line in total.lines():
        typer.echo(line)
    write_json(json_file, total.figures())


def _arguments(settings: list[str] | None) -> dict[str, Any]:
    """key=value pairs; values are JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--template-arg {setting!r}: write key=value")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _problems() -> Any:
    """Problems that print themselves, the first ones."""
    from paceline.data.formats import Problems

    problems = Problems()

    def report(line: str) -> None:
        if len(problems.rows) <= SHOWN:
            typer.echo(line, err=True)
        elif len(problems.rows) == SHOWN + 1:
            typer.echo("... further problems are counted only (--json lists them)", err=True)

    problems.report = report
    return problems


def _tell(problems: Any) -> None:
    for reason, number in problems.counts.most_common():
        typer.echo(f"left out, {reason}: {number}")


def _figures(problems: Any) -> dict[str, Any]:
    return {"left_out": dict(problems.counts), "problems": problems.rows}


def _finish(counts: dict[str, int], problems: Any, out: Path) -> None:
    typer.echo(f"{out}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    _tell(problems)
    if not counts["rows"] and not counts["repeated"]:
        why = ", ".join(f"{n} {reason}" for reason, n in problems.counts.most_common())
        raise ValueError(f"no row written: {why or 'the file has none'}")


@contextmanager
def _progress(total: int | None) -> Iterator[Any]:
    """A bar on stderr; the value is a function to call with a row's tokens."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows, {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task, tokens = progress.add_task("", total=total, tokens=0), 0

        def step(count: int) -> None:
            nonlocal tokens
            tokens += count
            progress.update(task, advance=1, tokens=tokens)

        yield step
