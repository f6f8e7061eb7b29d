"""The `paceline data` commands; those that only look at files stand here: check, inspect, estimate.

Knows nothing that the data room does not; figures go to stdout, progress and problems to stderr.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from paceline.cli import data_write
from paceline.cli.common import DtypeOption, JsonOption, TargetOption, TokensOption, write_json
from paceline.cli.data_common import (
    ArgsOption,
    BatchOption,
    FileArgument,
    MeasureOption,
    TapsOption,
    left_out,
    parse_arguments,
    tell,
    telling_problems,
)

app = typer.Typer(no_args_is_help=True, help="Prompts and conversations in, training rows out.")


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

    template = open_template(target, parse_arguments(template_args))[0] if target else None
    problems = telling_problems()
    counts = {
        file: shape_counts(read_conversations(file, problems), template, problems) for file in files
    }
    for file, found in counts.items():
        typer.echo(f"{file}: " + ", ".join(f"{n} {what}" for what, n in found.items()))
    tell(problems)
    write_json(json_file, {"files": counts, **left_out(problems)})
    if problems.rows:
        raise typer.Exit(1)


def inspect(
    file: FileArgument,
    target: TargetOption = "smollm2",
    rows: Annotated[int, typer.Option(min=1, help="How many to show.")] = 3,
    template_args: ArgsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show rows as training sees them: the prompt dim, what is supervised bold behind a bar.

    Example: paceline data inspect rows.jsonl --rows 5
    """
    from rich.console import Console
    from rich.text import Text

    from paceline.data.fingerprint import check_fingerprint
    from paceline.data.source import open_template
    from paceline.data.view import open_rows

    template, fingerprint = open_template(target, parse_arguments(template_args))
    check_fingerprint(file, fingerprint)
    problems, console, shown = telling_problems(), Console(), []
    for place, row in islice(open_rows(file, template, problems), rows):
        prompt, reply = (template.decode(row[key]) for key in ("prompt_ids", "response_ids"))
        sizes = {"prompt_ids": len(row["prompt_ids"]), "response_ids": len(row["response_ids"])}
        title = f"{place}: {sizes['prompt_ids']} prompt ids, {sizes['response_ids']} supervised"
        console.rule(Text(f"{title}, finish {row['finish']}"), align="left")
        spans = Text.assemble((prompt, "dim"), ("\u2503", "red"), (reply, "bold green"))
        console.print(spans, soft_wrap=True)
        shown.append({"place": place, "prompt": prompt, "response": reply, **sizes})
    tell(problems)
    write_json(json_file, {"rows": shown, **left_out(problems)})
    if problems.rows and not shown:
        raise ValueError(f"{file}: no row is left to show")


def estimate(
    file: FileArgument,
    target: TargetOption = "smollm2",
    dtype: DtypeOption = "auto",
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

    template, _ = open_template(target, parse_arguments(template_args))
    total, prompts = plan(file, template, None, max_new_tokens, taps, hidden_size(target))
    if measure and capture_rate is None and generate_rate is None:
        pipeline = paceline.load(target, None, dtype=dtype)
        total = total.measured(pipeline, prompts, batch_size, measure, capture=True)
    else:
        total = total.at(capture_rate, generate_rate)
    for line in total.lines():
        typer.echo(line)
    write_json(json_file, total.figures())


app.command()(check)
app.command()(data_write.tokenize)
app.command()(data_write.regenerate)
app.command("self-write")(data_write.self_write)
app.command()(inspect)
app.command()(estimate)
