"""Recipes: the published settings, the drafters' shapes, and the commands that show them.

Does not know training: the one trainee here is built and never stepped, and no target is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import paceline
from chat import CHATML, byte_tokenizer
from paceline.cli import app
from paceline.drafters.dflash import DFlashModule
from paceline.recipes import RECIPES, find_recipe, list_recipes, target_config
from paceline.recipes.papers import llama31_8b_dflash, qwen3_4b_dflash, qwen3_8b_dflash
from paceline.train.config import Phase, TrainConfig, parse_settings
from paceline.train.corpus import Row
from paceline.train.features import FeatureRow
from paceline.train.start import drafter_shape, parameter_count, start_module
from tiny import tiny_model

DATA = ("rows.jsonl",)


def run(*words: str) -> Any:
    """The command's result; a user's mistake stays a ValueError here."""
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(
    ("recipe", "target", "block", "gamma", "mask", "taps"),
    [
        (qwen3_4b_dflash, "Qwen/Qwen3-4B", 16, 7.0, 151669, (1, 9, 17, 25, 33)),
        (qwen3_8b_dflash, "Qwen/Qwen3-8B", 16, 7.0, 151669, (1, 9, 17, 25, 33)),
        (
            llama31_8b_dflash,
            "meta-llama/Llama-3.1-8B-Instruct",
            10,
            5.0,
            128002,
            (1, 8, 15, 22, 29),
        ),
    ],
)
def test_published_settings(
    recipe: Any, target: str, block: int, gamma: float, mask: int, taps: tuple[int, ...]
) -> None:
    config = recipe(DATA)
    assert (config.target, config.block_size, config.gamma) == (target, block, gamma)
    assert (config.mask_token_id, config.taps) == (mask, taps)
    assert config.phases == (Phase(share=1.0, block_size=block, anchors_per_row=512),)
    assert (config.lr, config.warmup, config.clip, config.max_tokens) == (6e-4, 0.04, 1.0, 3072)
    assert (config.draft_layers, config.init_layers, config.draft_vocab_size) == (5, (), None)
    assert config.steps * config.rows_per_step == 6 * 800_000
    assert recipe(DATA) == config and RECIPES[recipe.__name__] is recipe


@pytest.mark.parametrize(
    ("recipe", "millions"),
    [(qwen3_4b_dflash, 537), (qwen3_8b_dflash, 1049), (llama31_8b_dflash, 1174)],
)
def test_drafter_size(recipe: Any, millions: int) -> None:
    config = recipe(DATA)
    shape = drafter_shape(config, target_config(config.target))
    assert round(parameter_count(shape) / 1e6) == millions


def test_qwen3_8b_config_and_tensors() -> None:
    config = qwen3_8b_dflash(DATA)
    shape = drafter_shape(config, target_config(config.target))
    written = shape.to_dict()
    assert written["dflash_config"] == {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
    }
    published = {
        "block_size": 16,
        "num_target_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "layer_types": ["full_attention"] * 5,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    assert {name: written[name] for name in published} == published
    with torch.device("meta"):
        state = DFlashModule(shape).state_dict()
    assert {weight.device.type for weight in state.values()} == {"meta"}
    wanted = {"fc.weight": (4096, 20480), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    for i in range(5):
        wanted |= {
            f"layers.{i}.input_layernorm.weight": (4096,),
            f"layers.{i}.post_attention_layernorm.weight": (4096,),
            f"layers.{i}.self_attn.q_proj.weight": (4096, 4096),
            f"layers.{i}.self_attn.k_proj.weight": (1024, 4096),
            f"layers.{i}.self_attn.v_proj.weight": (1024, 4096),
            f"layers.{i}.self_attn.o_proj.weight": (4096, 4096),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (12288, 4096),
            f"layers.{i}.mlp.up_proj.weight": (12288, 4096),
            f"layers.{i}.mlp.down_proj.weight": (4096, 12288),
        }
    assert {name: tuple(weight.shape) for name, weight in state.items()} == wanted


def small(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "target": "none",
        "data": DATA,
        "run_dir": "none",
        "taps": (0, 2),
        "phases": (Phase(share=1.0, block_size=4, anchors_per_row=2),),
        "block_size": 4,
        "mask_token_id": 16,
        "steps": 8,
    }
    return TrainConfig(**(settings | changes))


def test_random_start_has_its_layers_and_nothing_of_the_target() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    config = small(layers=3)
    shape = drafter_shape(config, model.config)
    bits = torch.randn(9, 64).bfloat16().view(torch.uint16).numpy()
    tokens = np.arange(9, dtype=np.int32)
    row = Row(tokens=tokens, start=2, source="", temperature=0.0, held_out=False)
    rms = torch.linspace(0.5, 50.0, 64)
    module = start_module(config, shape, model, [FeatureRow(row, bits)], rms)
    assert len(module.layers) == shape.num_hidden_layers == 3
    for name, weight in module.named_parameters():
        spread = float(weight.detach().std())
        if name == "fc.weight":  # the same spread once each feature is brought to magnitude 1
            assert float((weight.detach() * rms).std()) == pytest.approx(0.02, rel=0.1)
        elif weight.dim() == 1:
            assert bool((weight == 1).all()), name
        else:
            assert spread == pytest.approx(0.02, rel=0.15), name
    again = start_module(config, shape, model, [FeatureRow(row, bits)], rms)
    assert torch.equal(module.fc.weight, again.fc.weight)


def test_layers_and_init_layers_must_agree() -> None:
    assert small(init_layers=(1, 3)).draft_layers == 2
    assert small(init_layers=(1, 3), layers=2).draft_layers == 2
    with pytest.raises(ValueError, match="set layers .* or init_layers"):
        small()
    with pytest.raises(ValueError, match="layers is 3, but init_layers names 2"):
        small(init_layers=(1, 3), layers=3)
    model_config = tiny_model("llama").config
    with pytest.raises(ValueError, match=r"init_layers \[3\]: the target has layers 0..2"):
        drafter_shape(small(init_layers=(1, 3), taps=(0, 1)), model_config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps=abc", "steps is 'abc', which is not int"),
        ("steps=2.5", "steps is 2.5, which is not int"),
        ("steps=true", "steps is True, which is not int"),
        ("steps=0", "steps must be at least 1"),
        ("rows_per_step=0", "rows_per_step must be at least 1"),
        ("lr=NaN", "lr is nan, which is not float"),
        ("lr=fast", "lr is 'fast', which is not float"),
        ("taps=3", "taps is 3, which is not tuple"),
        ('taps=["a"]', "taps is .*, which is not tuple"),
        ("betas=[0.9]", "betas is .*, which is not tuple"),
        ("draft_vocab_size=all", "draft_vocab_size is 'all'"),
        ("run_dir=5", "run_dir is 5, which is not str"),
        ("gama=5", "unknown setting 'gama'; did you mean 'gamma'"),
        ("steps", "'steps' is not key=value"),
        ("phases=4", "phases must be a JSON list of objects with share, block_size"),
        ("phases=[4]", "phases must be a JSON list of objects"),
        ('phases=[{"share":1,"block":16}]', "unknown key of phases 'block'; .* 'block_size'"),
        ('phases=[{"share":1,"block_size":16}]', "phases: an object lacks anchors_per_row"),
        (
            'phases=[{"share":"x","block_size":16,"anchors_per_row":2}]',
            "share is 'x', which is not float",
        ),
        (
            'phases=[{"share":1,"block_size":1,"anchors_per_row":2}]',
            "a phase needs block_size >= 2",
        ),
        (
            'phases=[{"share":0.5,"block_size":16,"anchors_per_row":2}]',
            "shares of the phases must sum to 1",
        ),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qwen3_4b_dflash(DATA).replace(**parse_settings([setting]))


def test_settings_of_every_kind() -> None:
    phases = (
        '[{"share":0.25,"block_size":4,"anchors_per_row":8,"words":50},'
        '{"share":0.75,"block_size":16,"anchors_per_row":256}]'
    )
    pairs = [f"phases={phases}", "lr=1", "taps=[1,2]", "init_from=null", "draft_vocab_size=64"]
    config = qwen3_4b_dflash(DATA).replace(**parse_settings(pairs))
    assert config.phases == (
        Phase(share=0.25, block_size=4, anchors_per_row=8, words=50),
        Phase(share=0.75, block_size=16, anchors_per_row=256),
    )
    assert (config.lr, config.taps, config.draft_vocab_size) == (1, (1, 2), 64)


def test_recipes_command(tmp_path: Path) -> None:
    result = run("recipes", "--json", str(tmp_path / "recipes.json"))
    assert result.exit_code == 0
    found = json.loads((tmp_path / "recipes.json").read_text())["recipes"]
    assert found == list_recipes() and [item["name"] for item in found] == list(RECIPES)
    for item in found:
        assert all(item.values())
        assert item["name"] in result.stdout and item["target"] in result.stdout
        assert item["purpose"] in result.stdout


def test_dry_run_prints_what_would_run_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "qwen3_8b_dflash", "--dry-run", "--set", "steps=7"]
    result = run(*words, "--data", "rows.jsonl", "--run-dir", "here")
    assert result.exit_code == 0 and not list(tmp_path.iterdir())
    lines = result.stdout.splitlines()
    assert lines[-1] == "drafter parameters: 1,048,626,432"
    # What is printed is what --set takes: it rebuilds the very config.
    shown = parse_settings(lines[:-1])
    wanted = qwen3_8b_dflash(("rows.jsonl",), run_dir="here").replace(steps=7)
    assert qwen3_4b_dflash(("other",)).replace(**shown) == wanted
    assert "FILE (--data)" in run(*words).stdout


def test_dry_run_of_a_target_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    result = run("train", "qwen3_8b_dflash", "--dry-run", "--set", f"target={folder}")
    assert result.exit_code == 0
    assert "the target's config cannot be read" in result.stdout.splitlines()[-1]
    tiny_model("llama", num_hidden_layers=8).config.save_pretrained(folder)
    layer = 3 * 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 8  # q, k+v, o; mlp; norms; q and k norms
    size = 5 * layer + 2 * 32 * 32 + 2 * 32  # fc of two taps, two norms
    taps = ["--set", "taps=[1,2]", "--set", "mask_token_id=5"]
    result = run("train", "qwen3_8b_dflash", "--dry-run", "--set", f"target={folder}", *taps)
    assert result.stdout.splitlines()[-1] == f"drafter parameters: {size:,}"


def test_unknown_names_and_missing_data() -> None:
    assert find_recipe("qwen3_4b_dflash") is qwen3_4b_dflash
    for words, message in [
        (["train", "qwen3_8b_dflsh"], "did you mean 'qwen3_8b_dflash'"),
        (["train", "zzz"], "known: dflash, smollm2_dflash, "),
        (["train", "qwen3_8b_dflash"], "name at least one corpus file"),
    ]:
        error = run(*words).exception
        assert isinstance(error, ValueError) and message in str(error)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that no recipe knows, and rows for it."""
    folder = tmp_path_factory.mktemp("stranger")
    tokenizer = byte_tokenizer(CHATML)
    size = len(tokenizer)
    changes = {"num_hidden_layers": 6, "max_position_embeddings": 256}
    tiny_model("qwen3", vocab_size=size + 3, **changes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as stream:
        for _ in range(24):
            ids = rng.integers(0, size, 30).tolist()
            row = {"prompt_ids": ids[:8], "response_ids": ids[8:], "temperature": 0.0}
            stream.write(json.dumps(row) + "\n")
    return folder / "model", folder / "rows.jsonl"


def test_any_target_can_be_trained_for(stranger: tuple[Path, Path], tmp_path: Path) -> None:
    model, rows = stranger
    words = ["train", "dflash", "--target", str(model), "--data", str(rows)]
    small = ["--set", "layers=1", "--set", "steps=3", "--run-dir", str(tmp_path / "run")]
    shown = run(*words, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "taps=[1, 2, 3]" in shown.output and "steps=18" in shown.output
    size = len(byte_tokenizer(CHATML))
    assert f"mask_token_id={size}" in shown.output
    trained = run(*words, *small)
    assert trained.exit_code == 0, trained.output
    pipeline = paceline.load(str(model), str(tmp_path / "run" / "drafter"), dtype="fp32")
    reply = pipeline.generate(["hello"], paceline.SamplingParams(max_tokens=8))[0].outputs[0]
    assert len(reply.token_ids) == 8 and sum(r.drafted for r in reply.rounds) > 0


def test_the_mask_is_a_token_that_nothing_uses() -> None:
    from transformers import AutoTokenizer

    from paceline.recipes.generic import unused_token
    from paceline.train.capture import target_folder

    smollm2 = AutoTokenizer.from_pretrained(target_folder("smollm2"))
    assert unused_token(smollm2, 49152, {2}) == 16  # as the packaged drafter was trained
    assert unused_token(smollm2, 49200, {2}) == 49152
    assert unused_token(smollm2, 49152, {2, 16}) == 15
    smollm2.chat_template = "<empty_output> <jupyter_script>"
    assert unused_token(smollm2, 49152, {2}) == 14
    smollm2.chat_template = " ".join(t.content for t in smollm2.added_tokens_decoder.values())
    with pytest.raises(ValueError, match="mask_token_id"):
        unused_token(smollm2, 49152, {2})


def test_taps_and_mask_can_be_named_where_none_can_be_found(
    stranger: tuple[Path, Path], tmp_path: Path
) -> None:
    _, rows = stranger
    size = len(byte_tokenizer(CHATML))
    tiny_model("llama", num_hidden_layers=3, vocab_size=size).save_pretrained(tmp_path / "model")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    words = ["train", "dflash", "--target", str(tmp_path / "model"), "--data", str(rows)]
    for given, missing in [([], "mask_token_id=ID"), (["--set", "mask_token_id=7"], "taps=")]:
        found = run(*words, "--dry-run", *given)
        assert isinstance(found.exception, ValueError) and missing in str(found.exception)
    named = ["--set", "mask_token_id=7", "--set", "taps=[0,1]"]
    shown = run(*words, "--dry-run", *named)
    assert "mask_token_id=7" in shown.output and "taps=[0, 1]" in shown.output
    assert "max_tokens=128" in shown.output  # the target's positions
    found = run(*words, "--dry-run", *named, "--set", "taps=[0]")
    assert "taps is set twice" in str(found.exception)


def test_a_target_is_only_for_the_recipe_that_takes_one(stranger: tuple[Path, Path]) -> None:
    model, rows = stranger
    found = run("train", "qwen3_8b_dflash", "--target", str(model), "--data", str(rows))
    assert isinstance(found.exception, ValueError) and "`dflash` takes" in str(found.exception)
    found = run("train", "dflash", "--dry-run", "--target", str(model))
    assert isinstance(found.exception, ValueError) and "--data" in str(found.exception)
    found = run("train", "dflash", "--dry-run", "--data", str(rows))
    assert isinstance(found.exception, ValueError) and "--target" in str(found.exception)


def test_without_a_run_dir_the_recipes_own_is_taken() -> None:
    shown = run("train", "smollm2_dflash", "--dry-run").stdout
    assert "run_dir=runs/smollm2-dflash\n" in shown.replace('"', "")


def test_a_drafter_to_start_from_is_looked_at_before_anything_is_captured(
    stranger: tuple[Path, Path], tmp_path: Path
) -> None:
    model, rows = stranger
    words = ["train", "dflash", "--target", str(model), "--data", str(rows)]
    here, start = tmp_path / "run", f"init_from={tmp_path / 'nowhere'}"
    found = run(*words, "--run-dir", str(here), "--set", start, "--set", "steps=1")
    assert isinstance(found.exception, ValueError) and "nowhere" in str(found.exception)
    assert not list(here.glob("features-*"))
    found = run("train", "dflash", "--target", "no/such/model", "--data", str(rows))
    assert isinstance(found.exception, ValueError) and "no/such/model" in str(found.exception)
