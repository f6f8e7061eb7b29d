"""The data commands that write rows and prompts: tokenize, regenerate, self-write.

Knows nothing that the data room does not; figures go to stdout, progress and problems to stderr.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import (
    DrafterOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    TokensOption,
    write_json,
)
from paceline.cli.data_common import (
    ArgsOption,
    BatchOption,
    FileArgument,
    LimitOption,
    MeasureOption,
    OutOption,
    TapsOption,
    finish,
    left_out,
    parse_arguments,
    refuse_nothing,
    row_bar,
    telling_problems,
)

if TYPE_CHECKING:
    from paceline.data.formats import Conversation, Problems
    from paceline.data.regenerate import Answerer, Settings
    from paceline.data.rows import RowFile
    from paceline.data.template import Template
    from paceline.pipeline import Pipeline


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
    from paceline.data.source import open_template, text_config
    from paceline.data.tokenise import tokenise

    arguments = parse_arguments(template_args)
    template, fingerprint = open_template(target, arguments)
    problems, shape = telling_problems(), text_config(target)
    max_tokens = min(max_tokens, getattr(shape, "max_position_embeddings", max_tokens))
    # The replies are the file's own: nothing says that this target's weights wrote them.
    facts = {"target": target, "kind": "tokenize", "template": arguments}
    with RowFile(out, fingerprint.without_weights(), facts) as rows, row_bar(None) as step:
        conversations = read_conversations(file, problems, limit)
        counts = tokenise(
            conversations, template, rows, problems, max_tokens=max_tokens, progress=step
        )
    finish(counts, problems, out)
    lengths = ((len(r["prompt_ids"]), len(r["response_ids"])) for _, r in read_rows(out))
    total = estimate(lengths, taps=taps, hidden_size=shape.hidden_size)
    typer.echo(f"in {out}: " + "; ".join(total.lines()))
    write_json(json_file, {**counts, "file": total.figures(), **left_out(problems)})
    refuse_nothing(counts, problems)


def regenerate(
    file: FileArgument,
    out: OutOption,
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "none",
    dtype: DtypeOption = "auto",
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
    from paceline.data.formats import read_conversations
    from paceline.data.regenerate import Settings
    from paceline.data.rows import RowFile
    from paceline.data.source import hidden_size, open_template
    from paceline.data.view import plan

    if (endpoint is None) != (model is None):
        raise ValueError("--endpoint and --model go together")
    paceline.SamplingParams(max_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        template=parse_arguments(template_args),
    )
    template, fingerprint = open_template(target, settings.template)
    total, prompts = plan(file, template, limit, max_new_tokens, taps, hidden_size(target))
    facts = {"target": target, "kind": "regenerate", "template": dict(settings.template)}
    with RowFile(out, fingerprint, facts) as rows:  # a stale file is refused before a model loads
        pipeline = None if endpoint else paceline.load(target, drafter, dtype=dtype)
        if pipeline and measure:
            total = total.measured(pipeline, prompts, batch_size, measure)
        typer.echo("at most " + "; ".join(total.lines()))
        server = (endpoint or "", model or "", concurrency)
        answerer = _answerer(pipeline, batch_size, server, template, settings)
        problems = telling_problems()
        conversations = read_conversations(file, problems, limit)
        figures = _answer(conversations, answerer, template, rows, settings, problems, total.rows)
    write_json(json_file, {**figures, "at_most": total.figures(), **left_out(problems)})
    refuse_nothing(figures, problems)


def _answerer(
    pipeline: Pipeline | None,
    batch_size: int,
    server: tuple[str, str, int],
    template: Template,
    settings: Settings,
) -> Answerer:
    from paceline.data.endpoint import Client, Endpoint
    from paceline.data.regenerate import InProcess

    if pipeline:
        return InProcess(pipeline, settings, batch_size=batch_size)
    url, model, concurrency = server
    client = Client(url=url, model=model)
    client.find()  # six tries a request are for servers that were there
    return Endpoint(client, template, settings, concurrency=concurrency)


def _answer(
    conversations: Iterator[Conversation],
    answerer: Answerer,
    template: Template,
    rows: RowFile,
    settings: Settings,
    problems: Problems,
    total: int,
) -> dict[str, Any]:
    """Run to the end with a bar; prints the counts and returns them."""
    from paceline.data.regenerate import regenerate as answer_all

    began = time.perf_counter()
    try:
        with row_bar(total, len(rows)) as step:
            counts = answer_all(
                conversations, answerer, template, rows, problems, settings, progress=step
            )
    finally:
        answerer.close()
    finish(counts, problems, rows.path)
    return {**counts, "seconds": time.perf_counter() - began}


def self_write(
    count: Annotated[int, typer.Option(min=1, help="How many prompts the file should hold.")],
    out: OutOption,
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "none",
    dtype: DtypeOption = "auto",
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

    arguments = parse_arguments(template_args)
    template, fingerprint = open_template(target, arguments)
    pipeline = paceline.load(target, drafter, dtype=dtype)
    dropped: Counter[str] = Counter()
    facts = {"target": target, "kind": "self-write", "template": arguments}
    with RowFile(out, fingerprint, facts) as rows, row_bar(count, len(rows)) as step:
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
        typer.echo("stopped early: too few usable texts (8 tries per prompt)", err=True)
    write_json(json_file, {"prompts": held, "written": written, "dropped": dict(dropped)})
