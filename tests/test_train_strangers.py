"""Training on targets, rows and folders that nobody arranged: trained right, or refused with a reason.

Does not know how good a drafter gets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline.drafters.dflash import DFlashModule, init_random, load_dflash, save_dflash
from paceline.train.config import Phase, TrainConfig
from paceline.train.corpus import Row, fingerprint
from paceline.train.features import FeatureRow
from paceline.train.fit import fit
from paceline.train.served import spread
from paceline.train.start import drafter_shape, start_module
from tiny import TINY, tiny_model

Rows = list[dict[str, Any]]


def some_rows(count: int = 24, length: int = 24, seed: int = 0, **more: Any) -> Rows:
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 97, (count, length)).tolist()
    return [
        {"prompt_ids": ids[:5], "response_ids": ids[5:], "temperature": 0.0} | more for ids in texts
    ]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def setting(folder: Path, model: Any, rows: Rows | None = None, **changes: Any) -> TrainConfig:
    """A run of a few steps below ``folder``."""
    if not (folder / "target").exists():
        model.save_pretrained(folder / "target")
    how: dict[str, Any] = {
        "target": str(folder / "target"),
        "data": (write(folder / "rows.jsonl", some_rows() if rows is None else rows),),
        "run_dir": str(folder / "run"),
        "taps": (0, 2),
        "layers": 1,
        "phases": (Phase(share=1.0, block_size=4, anchors_per_row=6),),
        "mask_token_id": 16,
        "block_size": 4,
        "rows_per_step": 4,
        "compute": "fp32",
        "steps": 3,
        "held_out_share": 0.2,
        "eval_every": 3,
    }
    return TrainConfig(**how | changes)


def run(config: TrainConfig) -> list[str]:
    said: list[str] = []
    assert fit(config, say=said.append).finished
    return said


def of(kind: str, **changes: Any) -> Any:
    """A tiny random model of a family that tests/tiny.py does not have."""
    tiny = TINY | {"num_hidden_layers": 4} | changes
    short = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 97}
    config: Any = {
        "gpt2": lambda: transformers.GPT2Config(**short),
        "phi": lambda: transformers.PhiConfig(**tiny),
        "gpt-neox": lambda: transformers.GPTNeoXConfig(**tiny),
        "gemma": lambda: transformers.GemmaConfig(**tiny, head_dim=8),
        "granite": lambda: transformers.GraniteConfig(**tiny, logits_scaling=8.0),
    }[kind]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("kind", ["gpt2", "phi", "gpt-neox", "gemma", "granite"])
def test_targets_of_other_families_are_trained(kind: str, tmp_path: Path) -> None:
    run(setting(tmp_path, of(kind)))
    config, _, _ = load_dflash(tmp_path / "run" / "drafter")
    assert config.hidden_size == 32 and config.num_target_layers == 4


def test_the_rotary_base_is_that_of_the_layers_that_see_everything() -> None:
    config = TrainConfig(
        target="",
        data=("",),
        run_dir="",
        taps=(0, 1),
        layers=1,
        phases=(Phase(share=1.0, block_size=8, anchors_per_row=1),),
        mask_token_id=5,
        steps=1,
    )
    nested = transformers.Gemma3TextConfig(**TINY | {"num_hidden_layers": 6}, head_dim=8)
    assert drafter_shape(config, nested).rope_theta == 1_000_000.0
    whole = transformers.Gemma3Config(text_config=nested.to_dict())
    assert drafter_shape(config, whole).rope_theta == 1_000_000.0
    flat = transformers.LlamaConfig(
        **TINY, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    assert drafter_shape(config, flat).rope_theta == 5e5
    assert drafter_shape(config, transformers.GPT2Config(n_layer=4)).rope_theta == 10000.0
    assert drafter_shape(config.replace(draft_vocab_size=97), flat).draft_vocab_size is None


@pytest.mark.parametrize("limit", [24, 25, 40])
def test_rows_may_reach_the_last_position(limit: int, tmp_path: Path) -> None:
    """Blocks near it, and the padding behind it, have no positions of their own."""
    model = tiny_model("llama", num_hidden_layers=4, max_position_embeddings=limit)
    said = run(setting(tmp_path, model, some_rows(length=30)))
    assert any("no more positions" in line for line in said)
    wide = tiny_model("llama", num_hidden_layers=4, max_position_embeddings=1024)
    (tmp_path / "wide").mkdir()
    assert not any("no more" in line for line in run(setting(tmp_path / "wide", wide)))


def test_layers_are_copied_from_targets_that_have_such_layers(tmp_path: Path) -> None:
    rows = [row_of(seed) for seed in range(3)]
    for kind in ("gemma2", "mixtral", "qwen2"):
        model = tiny_model(kind, num_hidden_layers=4)
        config = setting(tmp_path, model, layers=None, init_layers=(1,))
        shape = drafter_shape(config, model.config)
        with pytest.raises(
            ValueError, match="layer 1 is not built like.*init_layers=.. and layers"
        ):
            start_module(config, shape, model, rows, torch.ones(64))
    model = of("gemma")  # multiplies by 1 + weight
    shape = drafter_shape(config, model.config)
    module = start_module(config, shape, model, rows, torch.ones(64))
    layer = model.model.layers[1]
    gain = 1 + layer.input_layernorm.weight
    expected = layer.self_attn.q_proj.weight * gain
    torch.testing.assert_close(module.layers[0].self_attn.q_proj.weight, expected)
    gain = 1 + layer.post_attention_layernorm.weight
    torch.testing.assert_close(module.layers[0].post_attention_layernorm.weight, gain)


def row_of(seed: int, source: str = "", **changes: Any) -> FeatureRow:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(20, 64, generator=generator).bfloat16().view(torch.uint16).numpy()
    tokens = np.arange(20, dtype=np.int32)
    how: dict[str, Any] = {"start": 3, "temperature": 0.0, "held_out": False} | changes
    return FeatureRow(Row(tokens=tokens, source=source, **how), features)


def test_an_earlier_drafter_of_another_shape_is_refused_before_the_run(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    config = setting(tmp_path, model)
    shape = drafter_shape(config, model.config)
    for name, change in {
        "intermediate_size": {"intermediate_size": 48},
        "head_dim": {"head_dim": 4},
        "vocab_size": {"vocab_size": 200},
    }.items():
        other = type(shape)(**{f: getattr(shape, f) for f in shape.__dataclass_fields__} | change)
        module = DFlashModule(other)
        init_random(module, torch.Generator().manual_seed(0))
        save_dflash(tmp_path / name, other, module)
        with pytest.raises(ValueError, match=f"has {name}"):
            fit(config.replace(init_from=str(tmp_path / name)), say=lambda _: None)


def test_distances_need_the_targets_own_distribution(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    run(setting(tmp_path / "llama", tiny_model("llama", num_hidden_layers=4), loss="tv"))
    with pytest.raises(ValueError, match="scales or caps its logits: only loss=ce"):
        run(setting(tmp_path, of("granite"), loss="kl"))


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    config = setting(tmp_path, tiny_model("llama", num_hidden_layers=4))
    seen: list[str] = []

    def intrude(_what: str, _done: int, _total: int) -> None:
        if not seen:
            with pytest.raises(ValueError, match="another process trains there") as error:
                fit(config, say=lambda _: None)
            seen.append(str(error.value))

    assert fit(config, say=lambda _: None, progress=intrude).finished and seen


@pytest.mark.parametrize(
    "change",
    [
        {"start": 4},
        {"source": "other"},
        {"temperature": 1.0},
        {"held_out": True},
    ],
)
def test_changed_supervision_is_other_text(change: dict[str, Any]) -> None:
    one, other = row_of(0).row, row_of(0, **change).row
    assert fingerprint([one]) == fingerprint([other])  # the features are the same
    assert fingerprint([one], supervision=True) != fingerprint([other], supervision=True)


def test_a_checkpoint_of_rows_supervised_otherwise_is_refused(tmp_path: Path) -> None:
    config = setting(tmp_path, tiny_model("llama", num_hidden_layers=4))
    run(config)
    rows = some_rows()
    for row in rows:
        row["prompt_ids"] = row["prompt_ids"] + row["response_ids"][:1]
        row["response_ids"] = row["response_ids"][1:]
    write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="from another data"):
        run(config)


def test_rows_that_cannot_be_used_are_said_and_kept_in_the_provenance(tmp_path: Path) -> None:
    rows = some_rows()
    rows[3]["response_ids"] = [1]
    rows[4]["prompt_ids"] = list(range(90))
    said = run(setting(tmp_path, tiny_model("llama", num_hidden_layers=4), rows, max_tokens=64))
    assert any("22 rows" in line and "1 reply too short" in line for line in said)
    found = json.loads((tmp_path / "run" / "drafter" / "provenance.json").read_text())
    assert found["data"][0]["left_out"] == {"reply too short": 1, "prompt over 64 tokens": 1}
    config = setting(tmp_path, None, some_rows(length=6), run_dir=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"no usable row in .*rows\.jsonl: 24 reply too short"):
        run(config)


def test_without_greedy_held_out_rows_there_is_no_estimate(tmp_path: Path) -> None:
    rows = some_rows(temperature=1.0)
    said = run(setting(tmp_path, tiny_model("llama", num_hidden_layers=4), rows))
    assert any("no held-out greedy row" in line for line in said)
    found = json.loads((tmp_path / "run" / "drafter" / "provenance.json").read_text())
    assert "served_estimate" not in found["figures"] and found["figures"]["served_rounds"] == 0


def test_the_estimate_takes_the_sources_in_turn() -> None:
    rows = [row_of(i, "long") for i in range(9)] + [row_of(i, "short") for i in range(2)]
    chosen = [item.row.source for item in spread(rows, 5)]
    assert sorted(chosen) == ["long", "long", "long", "short", "short"]
    assert len(spread(rows, 99)) == 11


def test_a_full_disk_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = setting(tmp_path, tiny_model("llama", num_hidden_layers=4), checkpoint_seconds=0.0)
    run(config)
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    again = config.replace(run_dir=str(tmp_path / "again"))
    (tmp_path / "again").mkdir()
    real, calls = torch.save, 0

    def full(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        real(*arguments, **named)
        if calls == 2:
            raise RuntimeError("enforce fail: unexpected pos")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be written.*free some space"):
        run(again)
    state = torch.load(tmp_path / "again" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 1 and not list((tmp_path / "again").glob("*.tmp"))
    monkeypatch.setattr(torch, "save", real)
    run(again)
    after = torch.load(tmp_path / "again" / "checkpoint.pt", weights_only=True)
    whole = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    for name, weight in whole["masters"].items():
        assert torch.equal(weight, after["masters"][name])


def test_a_deleted_drafter_of_a_finished_run_is_written_again(tmp_path: Path) -> None:
    import shutil

    config = setting(tmp_path, tiny_model("llama", num_hidden_layers=4))
    run(config)
    before = (tmp_path / "run" / "drafter" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "drafter")
    run(config)
    assert (tmp_path / "run" / "drafter" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.0}, "clip is 0.0; it must be above 0"),
        ({"gamma": 0.0}, "gamma"),
        ({"lr": -1.0}, "lr"),
        ({"warmup": 5.0}, "warmup"),
        ({"held_out_share": -1.0}, "held_out_share"),
        ({"held_out_share": 1.0}, "held_out_share"),
        ({"min_reply": -5}, "min_reply"),
        ({"taps": (0, 0, 2)}, "different layers"),
        ({"taps": ()}, "at least one"),
        ({"seed": -1}, "seed"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"block_size": 8}, r"last phase has blocks of 4.*phases=\[\{"),
    ],
)
def test_values_out_of_range_are_named(change: dict[str, Any], message: str) -> None:
    config = TrainConfig(
        target="",
        data=("",),
        run_dir="",
        taps=(0, 2),
        layers=1,
        phases=(Phase(share=1.0, block_size=4, anchors_per_row=6),),
        mask_token_id=16,
        block_size=4,
        steps=3,
    )
    with pytest.raises(ValueError, match=message):
        config.replace(**change)
    with pytest.raises(ValueError, match="share > 0"):
        Phase(share=-0.5, block_size=4, anchors_per_row=6)
