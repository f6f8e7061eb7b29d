"""The data commands end to end, and every command line of docs/data.md, on a tiny model folder.

Does not know real models: the documentation's `smollm2` becomes the tiny folder here.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chat import babbling_folder
from paceline.cli import main
from paceline.train.corpus import check_corpus, read_corpus
from test_data_formats import MALFORMED, write

DOC = Path(__file__).parents[1] / "docs" / "data.md"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return babbling_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs `paceline WORDS` in tmp_path; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    yield call


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_every_malformed_row_is_told_with_file_line_and_reason_and_counted(
    run: Run, tmp_path: Path
) -> None:
    good = {"prompt": "Hi", "response": "Hello."}
    write(tmp_path / "all.jsonl", [good, *(row for _, row in MALFORMED), good])
    code, out, err = run("data", "check", "all.jsonl", "--json", "check.json")
    assert code == 1 and out.startswith("all.jsonl: 2 usable, 2 with_replies")
    for number, (reason, _) in enumerate(MALFORMED[:20], start=2):
        assert f"all.jsonl:{number}: {reason}" in err
    assert err.count("all.jsonl:") == 20 and "counted only" in err
    figures = json.loads(Path("check.json").read_text())
    wanted = [(f"all.jsonl:{n}", reason) for n, (reason, _) in enumerate(MALFORMED, start=2)]
    assert [(p["place"], p["reason"]) for p in figures["problems"]] == wanted
    for reason, number in figures["left_out"].items():
        assert f"left out, {reason}: {number}" in out
    assert sum(figures["left_out"].values()) == len(MALFORMED)
    assert figures["files"]["all.jsonl"]["usable"] == 2
    write(tmp_path / "good.jsonl", [good])
    assert run("data", "check", "good.jsonl")[0] == 0


def test_every_reason_is_explained_in_the_documentation() -> None:
    source = Path(__file__).parents[1] / "src" / "paceline" / "data"
    text = "".join(path.read_text() for path in source.glob("*.py"))
    reasons = set(re.findall(r'RowError\(\s*"([a-z0-9-]+)"', text)) | {r for r, _ in MALFORMED}
    assert len(reasons) > 20
    assert not {reason for reason in reasons if f"`{reason}`" not in DOC.read_text()}


def test_tokenize_writes_rows_once_and_training_reads_them(
    run: Run, target: str, tmp_path: Path
) -> None:
    chat = {"prompt": "Hi", "response": "Hello there."}
    write(tmp_path / "chats.jsonl", [chat, {"prompt": "Hi"}, {"messages": []}])
    words = ("data", "tokenize", "chats.jsonl", "--target", target, "--out", "rows.jsonl")
    code, out, _ = run(*words, "--json", "figures.json")
    assert code == 0 and "1 rows" in out and "left out, no-reply: 1" in out
    figures = json.loads(Path("figures.json").read_text())
    assert figures["rows"] == figures["file"]["rows"] == 1
    assert figures["left_out"] == {"no-reply": 1, "empty": 1}
    (row,) = read_corpus(["rows.jsonl"], max_tokens=99, min_reply=2, held_out_share=0.0)
    assert len(row.tokens) == figures["tokens"]
    assert run(*words)[0] == 0 and len(lines("rows.jsonl")) == 1
    code, _, err = run(*words, "--template-arg", "a=1")
    assert code == 2 and "begun with template {}" in err
    write(tmp_path / "none.jsonl", [{"prompt": "Hi"}])
    words = ("data", "tokenize", "none.jsonl", "--target", target, "--out", "none-rows.jsonl")
    code, _, err = run(*words, "--json", "none.json")
    assert code == 2 and "no row written: 1 no-reply" in err
    assert json.loads(Path("none.json").read_text())["left_out"] == {"no-reply": 1}


def test_regenerate_resumes_and_refuses_what_is_stale_before_it_loads_a_model(
    run: Run, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}, {"prompt": "what?"}, {"prompt": ""}])
    words = ("data", "regenerate", "prompts.jsonl", "--target", target, "--out", "rows.jsonl")
    quick = ("--max-new-tokens", "12", "--dtype", "fp32", "--measure")
    code, out, err = run(*words, *quick, "0.01", "--json", "figures.json")
    assert code == 0 and "prompts.jsonl:3: empty-content" in err
    assert out.startswith("at most 2 rows") and "generation: " in out
    assert "left out, empty-content: 1" in out
    figures = json.loads(Path("figures.json").read_text())
    assert figures["rows"] == 2 and figures["at_most"]["rows"] == 2 and figures["seconds"] > 0
    first = Path("rows.jsonl").read_bytes()
    Path("rows.jsonl").write_bytes(first[:-4])
    assert run(*words, *quick, "0")[0] == 0
    assert sorted(Path("rows.jsonl").read_bytes().splitlines()) == sorted(first.splitlines())
    other = babbling_folder(tmp_path / "other", seed=1)
    monkeypatch.setattr("paceline.load", lambda *_, **__: pytest.fail("loaded a model first"))
    code, _, err = run(*words, "--target", other)
    assert code == 2 and "rows.jsonl is stale" in err and "weights" in err


@pytest.mark.parametrize(
    "words, said",
    [
        ("check none.jsonl", "none.jsonl: no such file"),
        ("tokenize chats.jsonl --out rows.jsonl --template-arg x", "write key=value"),
        (
            "tokenize chats.jsonl --out rows.jsonl --template-arg tokenize=true",
            "not for the template",
        ),
        ("regenerate chats.jsonl --out rows.jsonl --endpoint http://h", "go together"),
        ("regenerate chats.jsonl --out rows.jsonl --top-p 0", "top_p must be"),
        ("regenerate chats.jsonl --out rows.jsonl.gz", "gzip the file later"),
        ("regenerate empty.jsonl --out rows.jsonl", "empty.jsonl: no usable row"),
        ("regenerate chats.jsonl --out chats.jsonl", "name a new file"),
        ("inspect chats.jsonl --target no/such/folder", "cannot load its tokenizer"),
        ("estimate none.jsonl", "none.jsonl: no such file"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_two(
    words: str, said: str, run: Run, target: str, tmp_path: Path
) -> None:
    write(tmp_path / "chats.jsonl", [{"prompt": "Hi"}])
    write(tmp_path / "empty.jsonl", [])
    known = [] if "--target" in words or "check" in words else ["--target", target]
    code, _, err = run("data", *shlex.split(words), *known)
    assert code == 2 and said in err and "Traceback" not in err
    assert err.startswith("paceline: ")


def test_inspect_shows_where_the_reply_begins(run: Run, target: str, tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", [{"prompt": "Hi", "response": "Yes [b]."}, {"prompt": "Ho"}])
    code, out, _ = run("data", "inspect", "chats.jsonl", "--target", target, "--json", "i.json")
    assert code == 0
    assert "chats.jsonl:1: " in out and "assistant\n\u2503Yes [b].<|im_end|>" in out
    assert "finish not answered yet" in out
    first, second = json.loads(Path("i.json").read_text())["rows"]
    assert first["response"] == "Yes [b].<|im_end|>" and first["response_ids"] == 9
    assert second["prompt"].endswith("Ho<|im_end|>\n<|im_start|>assistant\n")


def test_estimate_measures_or_takes_rates(run: Run, target: str, tmp_path: Path) -> None:
    write(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}] * 3)
    words = ("data", "estimate", "prompts.jsonl", "--target", target, "--max-new-tokens", "100")
    rates = ("--capture-rate", "50", "--generate-rate", "0.5", "--json", "e.json")
    code, out, _ = run(*words, *rates)
    assert code == 0 and "generation: 10 minutes at 0 tokens/s" in out
    figures = json.loads(Path("e.json").read_text())
    assert figures["generate_hours"] == pytest.approx(600 / 3600)
    assert figures["feature_bytes"] == figures["tokens"] * 5 * 32 * 2
    code, out, _ = run(*words, "--measure", "0.02", "--batch-size", "2")
    assert code == 0 and "capture: " in out and "generation: " in out
    assert "capture" not in run(*words, "--measure", "0")[1]


# The documentation


def strangers() -> dict[str, str]:
    """Letter and text of each section of `Three strangers`."""
    parts = re.split(r"\n### ([abc])\. ", DOC.read_text().partition("## Three strangers")[2])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(text: str) -> list[str]:
    """The commands of all `sh` blocks, each with its heredoc."""
    found: list[str] = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.S):
        found += re.findall(r"[^\n]*<<'END'\n.*?\nEND|[^\n]+", block, re.S)
    return found


@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_a_stranger_gets_from_his_input_to_training(
    letter: str, run: Run, target: str, tmp_path: Path
) -> None:
    text = strangers()[letter]
    trained = []
    for line in commands(text):
        words = shlex.split(line) if line.startswith("paceline ") else []
        if not words:
            subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
            continue
        if words[1] == "data":
            words = [target if word == "smollm2" else word for word in words]
            code, out, err = run(*words[1:])
            assert code == (1 if words[2] == "check" else 0), err
            if words[2] == "check":
                told = re.findall(r"```text\n(.*?)```", text, re.S)[0].splitlines()
                assert told == err.splitlines() + out.splitlines()[:1]
        else:
            code, out, err = run(*words[1:], "--dry-run")
            assert code == 0 and "steps=20" in out, err
            settings = dict(line.partition("=")[::2] for line in out.splitlines())
            files = [words[i + 1] for i, word in enumerate(words) if word == "--data"]
            trained += files
            check_corpus(files, target)
            rows = read_corpus(  # replies of one token count: the random model is terse
                files, max_tokens=int(settings["max_tokens"]), min_reply=1, held_out_share=0.0
            )
            assert len(rows) == len(lines(files[0])) >= 4
    assert len(trained) == 1
