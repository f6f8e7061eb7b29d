"""DFlare's context side and block expansion: parameters, shares, starts, folders, recipes.

Does not know decoding: the laws of tests/test_drafters.py and tests/laws run for DFlare, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core import SamplingParams
from paceline.drafters.dflare import diagonal, mix_shares, shares
from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    init_random,
    load_dflash,
    read_config,
    save_dflash,
)
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.drafters.heads import _mix
from paceline.drafters.refine import Refine
from paceline.evaluate.methods import parse_method
from paceline.export.plain import export_plain
from paceline.pipeline import Pipeline
from paceline.recipes import find_recipe, target_config
from paceline.train.config import FRESH_WEIGHT, Phase
from paceline.train.earlier import left_behind
from paceline.train.fit import gamma_at, learning_rate
from paceline.train.policy import step_weights
from paceline.train.start import drafter_shape, kept_names, start_module
from tiny import tiny_target

PARTS = {"layerwise_fusion": True, "split_kv": True}
SHAPE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=97,
    block_size=5,
    num_target_layers=3,
    mask_token_id=96,
    target_layer_ids=(0, 1),
    max_position_embeddings=128,
)


def made(**changes: Any) -> tuple[DFlashConfig, DFlashModule]:
    config = DFlashConfig(**(SHAPE | changes))
    module = DFlashModule(config)
    init_random(module, torch.Generator().manual_seed(0), std=0.2)
    return config, module.eval().requires_grad_(False)


def test_published_4b_shape_has_its_parameters() -> None:
    """743,220,992 besides the 7 x 9 shares."""
    config = find_recipe("qwen3_4b_dflare")(("none",))
    with torch.device("meta"):
        module = DFlashModule(drafter_shape(config, target_config("Qwen/Qwen3-4B")))
    sizes = {name: weight.numel() for name, weight in module.named_parameters()}
    assert sizes.pop("layer_fusion_weights") == 63
    assert sum(sizes.values()) == 743_220_992
    assert not any(name.startswith("fc") for name in sizes)


def test_shares_are_over_taps_and_each_layer_has_its_own() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    found = shares(logits)
    torch.testing.assert_close(found.sum(1), torch.ones(2))
    assert float(found[0, 0]) == pytest.approx(2.718281828**2 / (2.718281828**2 + 2))
    features = torch.randn(4, 3 * 5, generator=torch.Generator().manual_seed(0))
    mixed = mix_shares(features, found)
    assert mixed.shape == (2, 4, 5)
    want = sum(found[1, t] * features[:, 5 * t : 5 * t + 5] for t in range(3))
    torch.testing.assert_close(mixed[1], want)
    assert diagonal(7, 9) == [0, 1, 2, 3, 5, 6, 7] and diagonal(2, 5) == [0, 2]


def test_folded_equals_unfolded_and_context_projections_are_the_context_s_own() -> None:
    _, module = made(**PARTS)
    features = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    before = module.context(features)
    module.fold()
    assert torch.equal(module.context(features), before)
    places = torch.arange(6)
    old = module.context_kv(1, before, places)
    for layer in module.layers:
        layer.self_attn.k_proj.weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(module.context_kv(1, before, places)[0], old[0])
    other = module.context_kv(0, before, places)
    assert not torch.allclose(old[0], other[0])


def test_tap_norm_makes_taps_of_any_magnitude_alike() -> None:
    _, module = made(**PARTS, tap_norm=True)
    features = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    louder = torch.cat((features[:, :32], 40 * features[:, 32:]), 1)
    torch.testing.assert_close(
        module.context(louder), module.context(features), atol=1e-4, rtol=1e-3
    )
    _, plain = made(**PARTS)
    assert not torch.allclose(plain.context(louder), plain.context(features), atol=0.1)
    with pytest.raises(ValueError, match="tap_norm belongs"):
        DFlashConfig(**SHAPE, tap_norm=True)


@pytest.mark.parametrize("parts", [PARTS, {"split_kv": True}, {"layerwise_fusion": True}])
def test_round_trip_and_every_tensor_is_wanted(tmp_path: Path, parts: dict[str, bool]) -> None:
    config, module = made(**parts)
    save_dflash(tmp_path / "d", config, module)
    again, loaded, _ = load_dflash(tmp_path / "d", torch.float32)
    assert again == config
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, module.state_dict()[name].bfloat16().float()), name
    file = tmp_path / "d" / "model.safetensors"
    state = load_file(file)
    own = [n for n in state if "target" in n or "fusion" in n]
    assert len(own) == 4 * parts.get("split_kv", 0) + parts.get("layerwise_fusion", 0)
    for name in own:
        save_file({k: v for k, v in state.items() if k != name}, file)
        with pytest.raises(ValueError, match=f"missing tensor {name}"):
            load_dflash(tmp_path / "d")


def test_what_no_engine_reads_is_not_exported(tmp_path: Path) -> None:
    config, module = made(split_kv=True)
    folder = save_dflash(tmp_path / "d", config, module)
    with pytest.raises(ValueError, match="is a DFlare drafter"):
        export_plain(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_published_config_without_our_keys_is_dflare() -> None:
    data = DFlashConfig(**SHAPE, **PARTS).to_dict()
    for name in ("layerwise_fusion", "split_kv", "tap_norm"):
        del data["dflash_config"][name]
    assert DFlashConfig.from_dict(data) == DFlashConfig(**SHAPE, **PARTS)


def test_gamma_rises_by_the_epoch_and_fresh_slots_weigh_three() -> None:
    config = find_recipe("qwen3_4b_dflare")(("none",))
    assert gamma_at(config, 320, 9) == 4.5  # 32 rows a step: ten steps are an epoch
    assert gamma_at(config, 320, 10) == 5.0 and gamma_at(config, 320, 25) == 5.5
    labels = torch.tensor([[[1, 1, 1, 1, 1, -100]]])
    assert step_weights(labels, 4).tolist() == [[[1, 1, 1, FRESH_WEIGHT, FRESH_WEIGHT, 0]]]


def test_bloom_takes_its_shape_from_the_drafter(tmp_path: Path) -> None:
    config, module = made(**PARTS)
    folder = save_dflash(tmp_path / "d", config, module)
    recipe: Any = find_recipe("smollm2_bloom")
    found = recipe(("none",), init_from=str(folder), block_size=8)
    assert found.fusion == "layerwise" and found.split_kv and found.layers == 2
    assert [(p.block_size, p.widened_from) for p in found.phases] == [(8, 5)]
    both: Any = find_recipe("smollm2_bloom_continued")
    found = both(("none",), init_from=str(folder), block_size=8)
    assert [(p.block_size, p.widened_from) for p in found.phases] == [(5, None), (8, 5)]
    half = found.steps // 2
    ratio = learning_rate(found, half - 1) / learning_rate(found, half)
    assert ratio == pytest.approx(2, rel=0.01)
    with pytest.raises(ValueError, match="drafts blocks of 5 already"):
        recipe(("none",), init_from=str(folder), block_size=5)
    with pytest.raises(ValueError, match="widened_from of a phase is 8"):
        Phase(share=1.0, block_size=8, anchors_per_row=1, widened_from=8)


def test_a_mixer_goes_on_in_a_wider_block_and_changes_nothing_in_the_old_slots(
    tmp_path: Path,
) -> None:
    """Fresh slots of a causal mixer begin at zero; without ``refiner`` the head stays behind, told."""
    config, module = made(xpress_rank=6)
    with torch.no_grad():
        module.xpress_head.mix_l.normal_()  # type: ignore[union-attr, operator]
    folder = save_dflash(tmp_path / "d", config, module)
    wide = replace(read_config(folder), block_size=7)
    names = kept_names(module, wide)
    assert "xpress_head.mix_l" in names and "xpress_head.readout.weight" in names
    recipe: Any = find_recipe("smollm2_bloom")
    run = recipe(("none",), init_from=str(folder), block_size=7)
    assert left_behind(run, replace(wide, xpress_rank=None)) == ["xpress head"]
    target = tiny_target()
    grown = start_module(run, wide, target.model, [], torch.ones(64))
    old, new = (m.get_submodule("xpress_head") for m in (module.bfloat16().float(), grown))
    states = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))
    prev = torch.randint(0, 97, (3, 7), generator=torch.Generator().manual_seed(2))
    mean = states.mean(1)
    with torch.no_grad():
        short = old.latent(old.fixed(states[:, :5], mean), prev[:, :5])  # type: ignore[operator]
        long = new.latent(new.fixed(states, mean), prev)  # type: ignore[operator]
    torch.testing.assert_close(long[:, :5], short)


@pytest.mark.parametrize("size", [2, 3, 8, 16, 24])
@pytest.mark.parametrize("parts", [{}, PARTS])
def test_one_checkpoint_drafts_any_block(tmp_path: Path, size: int, parts: dict[str, bool]) -> None:
    config, module = made(**parts)
    folder = save_dflash(tmp_path / "d", config, module)
    target = tiny_target()
    drafter = DFlashDrafter.load(folder, target, block_size=size)
    params = SamplingParams(max_tokens=20)
    prompts = [[3, 4, 5], list(range(20))]
    got = Pipeline(target=target, drafter=drafter).generate(prompts, params)
    want = Pipeline(target=target).generate(prompts, params)
    for mine, plain in zip(got, want, strict=True):
        assert mine.outputs[0].token_ids == plain.outputs[0].token_ids
        assert {r.drafted for r in mine.outputs[0].rounds[1:]} <= set(range(size))
    assert max(r.drafted for r in got[0].outputs[0].rounds) == min(size - 1, 18)


def test_block_is_the_drafter_s_and_an_xpress_head_serves_no_longer_one(tmp_path: Path) -> None:
    """Longer blocks are refused; on shorter ones slots are mixed as the first of a whole block."""
    config, module = made(xpress_rank=6, layerwise_fusion=True)
    longer = DFlashDrafter(replace(config, block_size=7), module, None, tiny_target())
    with pytest.raises(ValueError, match="blocks of up to 5, the drafter drafts blocks of 7"):
        Refine(longer, "xpress")
    target = tiny_target()
    shorter = DFlashDrafter(replace(config, block_size=4), module, None, target)
    stage, head = Refine(shorter, "xpress"), module.xpress_head
    assert stage.mixer is not None and head is not None
    z = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_mix(stage.mixer, z[:, :4]), _mix(head.mixer(), z)[:, :4])
    pipeline = Pipeline(target=target, drafter=shorter, stages=(stage,))
    got = pipeline.generate([[3, 4, 5]], SamplingParams(max_tokens=12))[0].outputs[0]
    want = pipeline.plain().generate([[3, 4, 5]], SamplingParams(max_tokens=12))[0].outputs[0]
    assert got.token_ids == want.token_ids and max(r.drafted for r in got.rounds) == 3
    folder = save_dflash(tmp_path / "d", config, module)
    with pytest.raises(ValueError, match="does not fit into the drafter's"):
        DFlashDrafter.load(folder, target, block_size=10**9)
    method = parse_method("dflash+block:4+first:2")
    assert method.block_size == 4 and method.name == "dflash+block:4+first:2"
    for text, message in (
        ("dflash+block", "block needs its size"),
        ("dflash+block:1", "block needs its size"),
        ("dflash+block:x", "block needs its size"),
        ("dflash+first:2+block:4", "once and first"),
        ("dflash+block:4+block:5", "once and first"),
        ("ngram+block:4", "drafts no blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_method(text)
