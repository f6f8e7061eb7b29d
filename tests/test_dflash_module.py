"""The DFlash module's config forms, strict folder format and forward pass.

Does not know training or decoding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.api import packaged_drafters
from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    default_target_layers,
    draft_to_target,
    init_random,
    load_dflash,
    offsets_of,
    read_config,
    save_dflash,
    vocabulary_fingerprint,
)


def tiny(**changes: object) -> DFlashConfig:
    base: dict[str, object] = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        block_size=4,
        num_target_layers=6,
        mask_token_id=5,
        target_layer_ids=(1, 2, 3),
        max_position_embeddings=128,
    )
    return DFlashConfig(**(base | changes))  # type: ignore[arg-type]


def made(config: DFlashConfig) -> DFlashModule:
    module = DFlashModule(config)
    init_random(module, torch.Generator().manual_seed(0), std=0.2)
    return module


def saved(folder: Path, config: DFlashConfig) -> DFlashModule:
    module = made(config).bfloat16()
    d2t = None
    if config.draft_vocab_size is not None:
        d2t = offsets_of(torch.arange(3, 3 + 2 * config.draft_vocab_size, 2))
    save_dflash(folder, config, module, d2t)
    return module


def test_default_target_layers_match_published_values() -> None:
    assert default_target_layers(16, 5) == [1, 4, 7, 10, 13]
    assert default_target_layers(28, 5) == [1, 7, 13, 19, 25]
    assert default_target_layers(30, 5) == [1, 8, 14, 20, 27]
    assert default_target_layers(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layers(30, 1) == [15]


def test_parameters_start_as_nan() -> None:
    for name, weight in DFlashModule(tiny()).named_parameters():
        assert weight.isnan().all(), name


def test_config_round_trip_and_both_placements() -> None:
    config = tiny(draft_vocab_size=40, rope_theta=1e5)
    data = json.loads(json.dumps(config.to_dict()))
    assert DFlashConfig.from_dict(data) == config
    inner = data["dflash_config"]
    inner["block_size"], inner["num_target_layers"] = data.pop("block_size"), 6
    data.pop("num_target_layers")
    data["target_layer_ids"] = inner.pop("target_layer_ids")
    data["rope_parameters"] = {"rope_theta": data.pop("rope_theta"), "rope_type": "default"}
    assert DFlashConfig.from_dict(data) == config


def test_config_errors_name_the_key() -> None:
    data = tiny().to_dict()
    del data["block_size"]
    with pytest.raises(ValueError, match="block_size"):
        DFlashConfig.from_dict(data)
    with pytest.raises(ValueError, match="yarn"):
        DFlashConfig.from_dict({**tiny().to_dict(), "rope_scaling": {"rope_type": "yarn"}})
    with pytest.raises(ValueError, match="mask_token_id"):
        tiny(mask_token_id=97)


WITHOUT_HEAD_DIM = {k: v for k, v in tiny().to_dict().items() if k != "head_dim"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blok_sze": 4}, "blok_sze; did you mean block_size"),
        ({"dflash_config": {"fc_layernorm": True}}, r"dflash_config\.fc_layernorm"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures"),
        ({"dflash_config": {"block_size": 8}}, r"block_size is 8, but .* 4"),
        ({"is_causal": True, "dflash_config": {"causal": False}}, "causal"),
        ({"block_size": "4"}, "block_size"),
        ({"block_size": 4.0}, "block_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"target_layer_ids": 3}, "target_layer_ids"),
        ({"layer_types": "full"}, "layer_types"),
        ({"dflash_config": []}, "dflash_config"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"use_sliding_window": True, "layer_types": None}, "layer_types"),
        ({"sliding_window": 3}, "sliding_window"),
    ],
)
def test_config_refuses_what_it_does_not_know(change: dict, message: str) -> None:
    data = {
        **WITHOUT_HEAD_DIM,
        "dflash_config": {"mask_token_id": 5},
        "target_layer_ids": [1, 2, 3],
    }
    inner = change.get("dflash_config")
    if isinstance(inner, dict):
        change = {**change, "dflash_config": {**data["dflash_config"], **inner}}
    assert DFlashConfig.from_dict(data) == tiny()
    with pytest.raises(ValueError, match=message):
        DFlashConfig.from_dict({**data, **change})


def test_config_takes_published_metadata_and_no_other_type() -> None:
    metadata = {"bos_token_id": 1, "initializer_range": 0.02, "max_window_layers": 2}
    metadata |= {"use_cache": True, "transformers_version": "5", "torch_dtype": "bfloat16"}
    metadata |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "mask_token": "<mask>"}
    assert DFlashConfig.from_dict(tiny().to_dict() | metadata) == tiny()
    with pytest.raises(ValueError, match="no object"):
        DFlashConfig.from_dict([1])  # type: ignore[arg-type]


def test_sliding_layers_are_causal() -> None:
    mixed = tiny(layer_types=("sliding_attention", "full_attention"), sliding_window=8)
    assert [mixed.is_causal(i) for i in (0, 1)] == [True, False]
    data = mixed.to_dict()
    assert DFlashConfig.from_dict(data) == mixed
    data["dflash_config"]["causal"] = False
    with pytest.raises(ValueError, match="not causal"):
        DFlashConfig.from_dict(data)


def test_fingerprint_names_a_vocabulary_and_travels_with_the_config() -> None:
    class Words:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    mine = vocabulary_fingerprint(Words("a", "b"))
    assert mine != vocabulary_fingerprint(Words("b", "a"))
    config = tiny(vocabulary_fingerprint=mine)
    assert config.to_dict()["dflash_config"]["vocabulary_fingerprint"] == mine
    assert DFlashConfig.from_dict(config.to_dict()) == config


def test_packaged_config_is_what_we_write() -> None:
    """Same bytes, so nothing in it is ignored; with the tokenizer that it was trained for."""
    for folder in packaged_drafters().values():
        config = read_config(folder)
        assert config.vocabulary_fingerprint
        text = (folder / "config.json").read_text(encoding="utf-8")
        assert text == json.dumps(config.to_dict(), indent=1) + "\n"


def test_round_trip_is_bit_equal_and_d2t_maps_back(tmp_path: Path) -> None:
    config = tiny(draft_vocab_size=40)
    module = saved(tmp_path / "d", config)
    saved(tmp_path / "d", config)  # a second save replaces the folder
    loaded_config, loaded, d2t = load_dflash(tmp_path / "d")
    assert loaded_config == config and d2t is not None
    assert draft_to_target(d2t).tolist() == list(range(3, 83, 2))
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert torch.equal(stored["t2d"].nonzero().flatten(), draft_to_target(d2t))
    for name, weight in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


NAMES = sorted(DFlashModule(tiny()).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_loading_names_a_renamed_or_misshapen_tensor(tmp_path: Path, name: str) -> None:
    saved(tmp_path, tiny())
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({k if k != name else k + "x": v for k, v in state.items()}, file)
    with pytest.raises(ValueError, match=f"missing tensor {name}"):
        load_dflash(tmp_path)
    save_file({**state, "stray.weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"unknown tensor stray\.weight"):
        load_dflash(tmp_path)
    save_file({**state, name: torch.zeros(7, 3)}, file)
    with pytest.raises(ValueError, match=f"tensor {name} is"):
        load_dflash(tmp_path)


def test_bad_vocabulary_tensors_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, tiny(draft_vocab_size=40))
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({k: v for k, v in state.items() if k != "d2t"}, file)
    with pytest.raises(ValueError, match="missing tensor d2t"):
        load_dflash(tmp_path)
    save_file({**state, "t2d": ~state["t2d"]}, file)
    with pytest.raises(ValueError, match="t2d disagrees"):
        load_dflash(tmp_path)
    save_file({**state, "d2t": state["d2t"] + 90}, file)
    with pytest.raises(ValueError, match="d2t points outside"):
        load_dflash(tmp_path)


def test_nan_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fc\.weight"):
        save_dflash(tmp_path / "d", tiny(), DFlashModule(tiny()))
    assert list(tmp_path.iterdir()) == []


def test_rotary_is_relative_and_context_needs_no_input_norm() -> None:
    config = tiny()
    module = made(config)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    near = module.rotate(x, torch.tensor([3, 7]))
    far = module.rotate(x, torch.tensor([53, 57]))
    torch.testing.assert_close(
        (near[0] * near[1]).sum(-1), (far[0] * far[1]).sum(-1), rtol=1e-4, atol=1e-4
    )
    features = torch.randn(5, config.feature_size)
    context = module.context(features)
    keys, values = module.context_kv(0, context, torch.arange(5))
    with torch.no_grad():
        module.layers[0].input_layernorm.weight.fill_(9.0)  # type: ignore[union-attr, operator]
    again, _ = module.context_kv(0, context, torch.arange(5))
    assert torch.equal(keys, again) and values.shape == (5, 2, 8)
