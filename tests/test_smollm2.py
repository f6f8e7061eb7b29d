"""The embedded model, the packaged drafter and the commands, end to end.

Does not measure speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.api import packaged_drafters
from paceline.data.prompts import DEMO_PROMPTS, read_prompts
from paceline.evaluate.metrics import acceptance
from paceline.evaluate.verify import verify

PROMPTS = [text for _, text in DEMO_PROMPTS]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli", *arguments], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def pipeline() -> paceline.Pipeline:
    return paceline.load("smollm2", dtype="fp32")


def test_packaged_drafter_changes_nothing_and_is_accepted(pipeline) -> None:
    params = paceline.SamplingParams(max_tokens=32)
    figures = verify(pipeline, PROMPTS[:4], params, batch_size=4)
    assert figures["identical"] == 4 and figures["bugs"] == 0
    replies = [o.outputs[0] for o in pipeline.generate(PROMPTS[:4], params)]
    assert acceptance(replies).acceptance_length_pooled > 1.3


def test_a_row_of_a_ragged_batch_of_eight_equals_the_row_alone(pipeline) -> None:
    params = paceline.SamplingParams(max_tokens=16)
    batch = pipeline.generate(PROMPTS, params, batch_size=8)
    for i in (0, 5):
        alone = pipeline.generate([PROMPTS[i]], params)[0].outputs[0].token_ids
        assert batch[i].outputs[0].token_ids == alone


def test_stream_joins_to_the_reply(pipeline) -> None:
    params = paceline.SamplingParams(max_tokens=24, stop=("blue",))
    whole = pipeline.generate(PROMPTS[4], params)[0].outputs[0]
    assert "".join(pipeline.stream(PROMPTS[4], params)) == whole.text
    assert "blue" not in whole.text


def test_verify_command_writes_its_figures(tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    file.write_text(
        '{"question": "What is 2 + 2?"}\n{"turns": ["Say hello."]}\n'
        '{"messages": [{"role": "user", "content": "Hi"}]}\n'
    )
    done = command(
        "verify", "--prompts", str(file), "--max-new-tokens", "8", "--json", str(out)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["prompts"], figures["identical"], figures["bugs"]) == (3, 3, 0)


def test_users_mistakes_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match="bad.jsonl:2"):
        read_prompts(bad)
    for arguments in (
        ("verify", "--prompts", str(bad)),
        ("generate", "hi", "--drafter", "no-such-drafter"),
        ("generate", "hi", "--temperature", "-1"),
    ):
        done = command(*arguments)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("paceline: ") and len(done.stderr.splitlines()) == 1


def test_export_writes_what_engines_read(tmp_path: Path) -> None:
    done = command("export", "smollm2-dflash", "--to", "plain", "--out", str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    state = load_file(tmp_path / "d" / "model.safetensors")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert state["lm_head.weight"].shape == (config["draft_vocab_size"], config["hidden_size"])
    source = packaged_drafters()["smollm2-dflash"]
    heads = "thresh_head_two_model."  # engines refuse tensors that they do not know
    assert not any(name.startswith(heads) for name in state)
    for name, tensor in load_file(source / "model.safetensors").items():
        assert name.startswith(heads) or tensor.equal(state[name])
