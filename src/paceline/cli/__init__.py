"""The commands. Each reads its arguments, calls a room and prints; no logic lives here.

Knows nothing that the rooms do not; a user's mistake is exit code 2 with one line that says why.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import data as data_commands
from paceline.cli.bench import bench
from paceline.cli.common import (
    AcceptOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopPOption,
    load_pipeline,
    write_json,
)
from paceline.cli.doctor import doctor
from paceline.cli.preflight import preflight
from paceline.cli.profile import profile
from paceline.cli.report import report
from paceline.cli.train import recipes, train

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data_commands.app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and leave."),
    ] = False,
) -> None:
    """Faster answers from a language model that says what it would have said."""


@app.command()
def demo(
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "default",
    method: MethodOption = None,
    dtype: DtypeOption = "auto",
    max_new_tokens: TokensOption = 96,
    json_file: JsonOption = None,
) -> None:
    """Plain and speculative decoding side by side on prompts of several kinds.

    Example: paceline demo --json demo.json
    """
    import torch

    from paceline.evaluate.demo import run_demo

    typer.echo(f"Loading {target} ({dtype}, {torch.get_num_threads()} threads) ...")
    pipeline = load_pipeline(target, drafter, method, dtype)
    names = {"target": target, "drafter": method or drafter}
    write_json(json_file, names | run_demo(pipeline, max_new_tokens))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "default",
    method: MethodOption = None,
    dtype: DtypeOption = "auto",
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    accept: AcceptOption = "match",
    json_file: JsonOption = None,
) -> None:
    """Answer one prompt, streaming.

    Example: paceline generate "Why is the sky blue?" --temperature 0.7 --seed 1
    """
    import paceline
    from paceline.evaluate.demo import stream_reply
    from paceline.evaluate.doctor_alarm import Alarm

    params = paceline.SamplingParams(
        max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    pipeline = load_pipeline(target, drafter, method, dtype, accept)
    reply = stream_reply(pipeline, [{"role": "user", "content": prompt}], params, Alarm())
    names = {"target": target, "drafter": method or drafter, "dtype": pipeline.target.dtype_name}
    write_json(json_file, names | reply)


@app.command()
def chat(
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "default",
    method: MethodOption = None,
    dtype: DtypeOption = "auto",
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    accept: AcceptOption = "match",
) -> None:
    """Talk to the model; an empty line or end of input leaves.

    Example: paceline chat --temperature 0.7
    """
    import paceline
    from paceline.evaluate.demo import stream_reply
    from paceline.evaluate.doctor_alarm import Alarm

    params = paceline.SamplingParams(
        max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    pipeline = load_pipeline(target, drafter, method, dtype, accept)
    messages: list[dict[str, str]] = []
    alarm = Alarm()
    while True:
        typer.echo("> ", nl=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        messages.append({"role": "user", "content": line})
        reply = stream_reply(pipeline, messages, params, alarm)
        messages.append({"role": "assistant", "content": reply["text"]})


@app.command()
def verify(
    prompts: Annotated[Path, typer.Option(help="JSONL: prompt, question, turns or messages.")],
    target: TargetOption = "smollm2",
    drafter: DrafterOption = "default",
    method: MethodOption = None,
    dtype: DtypeOption = "fp32",
    max_new_tokens: TokensOption = 128,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows decoded together.")] = 8,
    temperature: Annotated[float, typer.Option(help="Above 0: seeded sampling.")] = 0.0,
    samples: Annotated[
        int, typer.Option(help="Above 0: also compare the distribution of so many replies.")
    ] = 0,
    accept: AcceptOption = "match",
    json_file: JsonOption = None,
) -> None:
    """Check that speculation does not change the output; exit code 1 on a bug.

    Example: paceline verify --prompts questions.jsonl --dtype fp32 --json verify.json
    """
    import paceline
    from paceline.data.prompts import read_prompts
    from paceline.evaluate.verify import check_distribution
    from paceline.evaluate.verify import verify as compare

    chats = read_prompts(prompts, limit)
    params = paceline.SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=0)
    pipeline = load_pipeline(target, drafter, method, dtype, accept)
    if samples or accept == "rejection":
        figures = check_distribution(pipeline, chats[0], params, samples)
        for row in figures["distribution"]:
            typer.echo(f"position {row['position']}: p = {row['p_value']:.3g}, {row['bins']} bins")
        write_json(json_file, figures)
        raise typer.Exit(1 if figures["bugs"] else 0)
    figures = compare(
        pipeline,
        chats,
        params,
        batch_size=batch_size,
        progress=lambda done: typer.echo(f"\r{done}/{len(chats)} prompts", nl=False, err=True),
    )
    typer.echo("", err=True)
    for difference in figures["differences"]:
        typer.echo(
            f"prompt {difference['prompt']}: differs at token {difference['position']}, "
            f"margin {difference['margin']}, rounding {difference['rounding']}: "
            f"{difference['verdict']}"
        )
    counts = ", ".join(f"{figures[k]} {k}" for k in ("prompts", "identical", "near_ties", "bugs"))
    typer.echo(f"{counts} ({figures['dtype']})")
    length = figures["acceptance_length_pooled"]  # None: no reply had a round after its prefill
    shown = "-" if length is None else f"{length:.2f}"
    typer.echo(f"acceptance length {shown} (bonus included, pooled)")
    write_json(json_file, figures)
    if figures["bugs"]:
        raise typer.Exit(1)


@app.command()
def models(json_file: JsonOption = None) -> None:
    """List what is installed: the embedded target and the packaged drafters.

    Example: paceline models
    """
    from paceline.api import DEFAULT_DRAFTERS, packaged_drafters
    from paceline.gguf import smollm2_gguf

    try:
        smollm2_gguf()
        state = "installed"
    except ValueError as error:
        state = str(error)
    figures: dict[str, Any] = {"targets": {"smollm2": state}, "drafters": {}}
    typer.echo(f"target   smollm2: {state}")
    for name, path in packaged_drafters().items():
        size = sum(file.stat().st_size for file in path.iterdir())
        owners = [target for target, drafter in DEFAULT_DRAFTERS.items() if drafter == name]
        figures["drafters"][name] = {"bytes": size, "default_of": owners}
        typer.echo(f"drafter  {name}: {size / 1e6:.1f} MB, default of {', '.join(owners) or '-'}")
    write_json(json_file, figures)


@app.command()
def export(
    drafter: Annotated[str, typer.Argument(help="Packaged name or DFlash folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    to: Annotated[str, typer.Option(help="Format: plain.")] = "plain",
    target: TargetOption = "smollm2",
) -> None:
    """Write a drafter as the folder that engines read.

    Example: paceline export smollm2-dflash --to plain --out drafter/
    """
    from paceline.api import packaged_drafters
    from paceline.drafters.dflash import read_config
    from paceline.export.plain import export_plain
    from paceline.target import load_target

    if to != "plain":
        raise ValueError(f"format {to!r} is not known; use plain")
    source = packaged_drafters().get(drafter, Path(drafter))
    head, config = None, read_config(source)
    if config.draft_vocab_size is not None:
        head = load_target(target).head.weight
    typer.echo(f"wrote {export_plain(source, out, head)}")
    if left := [*config.refiners, *["length"] * (config.thresh_head_bottleneck_dim is not None)]:
        typer.echo(f"left out, for the plain format has no heads: {', '.join(left)}")
    engine = {
        "method": "dflash",
        "model": str(out),
        "num_speculative_tokens": config.block_size - 1,
    }
    typer.echo(f"vllm serve TARGET --speculative-config '{json.dumps(engine)}'")


app.command()(bench)
app.command()(doctor)
app.command()(preflight)
app.command()(profile)
app.command()(recipes)
app.command()(report)
app.command()(train)


def main() -> None:
    """Entry point: users' mistakes become one line and exit code 2."""
    run: Callable[..., Any] = app
    try:
        run()
    except (ValueError, OSError) as error:
        typer.echo(f"paceline: {error}", err=True)
        sys.exit(2)
    except Exception:  # exit code 1 is a bug that verify found, never a crash
        traceback.print_exc()
        sys.exit(3)
