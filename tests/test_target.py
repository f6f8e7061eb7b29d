"""The packed forward equals the model's own: ragged rows, overwritten drafts, trees, taps.

Does not test decoding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from paceline.core import Draft
from paceline.target import Target, load_target, parse_dtype
from tiny import KINDS, TINY, plain_row, tiny_model, tiny_target

PARENTS = [-1, -1, 0, 1, 3, -1]


def paths_of(row_tokens, tree, b):
    """The row's tokens followed by the path to the root and to each node."""
    paths = [[]]
    for node in range(tree.sizes_B[b]):
        paths.append(paths[PARENTS[node] + 1] + [int(tree.tokens_BN[b, node])])
    return [row_tokens + path for path in paths]


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_overwritten_drafts_and_trees(kind: str) -> None:
    target = tiny_target(kind)
    generator = torch.Generator().manual_seed(1)
    rows = [
        plain_row(i, torch.randint(0, 97, (n,), generator=generator).tolist())
        for i, n in enumerate((5, 14, 21))
    ]
    cache = target.new_cache(3)
    target.score(Draft.empty(3), rows, cache)
    for row in rows:
        cache.lengths[row.slot] = len(row.tokens)
        row.tokens.append(7 + row.slot)
    wrong = torch.randint(0, 97, (3, 6), generator=generator)
    target.score(Draft.chain(wrong, [6, 2, 0]), rows, cache)  # all rejected: nothing is moved
    tree = Draft(tokens_BN=wrong, parents_BN=torch.tensor([PARENTS] * 3), sizes_B=[6, 5, 3])
    scored = target.score(tree, rows, cache, taps=[0, 1])
    want = torch.stack(
        [target.next_logits(p) for b, row in enumerate(rows) for p in paths_of(row.tokens, tree, b)]
    )
    torch.testing.assert_close(scored.logits_TV, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_accepted_tree_path_is_moved_into_place(kind: str) -> None:
    target, cache = tiny_target(kind), None
    row = plain_row(0, [5, 6, 7, 8])
    cache = target.new_cache(1)
    tree = Draft(
        tokens_BN=torch.tensor([[1, 2, 3, 4, 5, 6]]),
        parents_BN=torch.tensor([PARENTS]),
        sizes_B=[6],
    )
    target.score(tree, [row], cache)
    cache.keep_path(0, 4, [1, 3, 4])  # tokens 2, 4, 5
    cache.lengths[0] = 7
    fresh = target.new_cache(1)
    target.score(Draft.empty(1), [plain_row(0, [5, 6, 7, 8, 2, 4, 5])], fresh)
    fresh.lengths[0] = 7
    for layer in range(3):
        for got, want in zip(cache.read(layer, 0), fresh.read(layer, 0), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_taps_are_the_outputs_of_the_named_layers() -> None:
    target = tiny_target("qwen3")
    row = plain_row(0, [3, 1, 4, 1, 5])
    scored = target.score(Draft.empty(1), [row], target.new_cache(1), taps=[0, 1])
    states = target.model(torch.tensor([row.tokens]), output_hidden_states=True).hidden_states
    want = torch.cat([states[1][0], states[2][0]], dim=-1)
    torch.testing.assert_close(scored.taps_TF, want, atol=1e-5, rtol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    Target(model)
    assert model.config._attn_implementation == before
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_recurrent_layers_are_refused_by_name() -> None:
    config = transformers.Qwen3NextConfig(
        **TINY, head_dim=8, num_experts=4, layer_types=["full_attention", "linear_attention"] * 1
        + ["full_attention"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="layer 1 .*rolled back"):
        Target(model)


def test_a_model_that_ignores_the_packed_mask_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError):
        Target(model)


def test_bad_targets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json"):
        load_target(str(tmp_path))
    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no weights"):
        load_target(str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(ValueError, match="broken.gguf"):
        load_target(str(broken))
    with pytest.raises(ValueError, match="bf16, fp16, fp32"):
        load_target(str(tmp_path / "x.gguf"), dtype="int3")


def phimoe() -> transformers.PreTrainedConfig:
    return transformers.PhimoeConfig(
        **TINY | {"num_hidden_layers": 2}, sliding_window=8, num_local_experts=4
    )


def qwen2_moe() -> transformers.PreTrainedConfig:
    return transformers.Qwen2MoeConfig(
        **TINY,
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=0,
        num_experts=4,
        layer_types=["sliding_attention"] * 3,
    )


def stablelm() -> transformers.PreTrainedConfig:
    return transformers.StableLmConfig(**TINY)


def nested_rope() -> transformers.PreTrainedConfig:
    config = transformers.LlamaConfig(**TINY)
    config.rope_parameters = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}
    return config


@pytest.mark.parametrize(
    ("make", "reason"),
    [(phimoe, "window"), (qwen2_moe, "window"), (stablelm, "layer 0"), (nested_rope, "dynamic")],
)
def test_masks_and_ropes_out_of_our_control_are_refused(make, reason: str) -> None:
    config = make()
    plain = transformers.LlamaConfig(**TINY) if make is nested_rope else config
    model = transformers.AutoModelForCausalLM.from_config(plain).float()
    model.config = config
    with pytest.raises(ValueError, match=reason):
        Target(model)


def test_a_target_with_missing_weights_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.down_proj.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.1.mlp.down_proj"):
        load_target(str(tmp_path), dtype="fp32")
    file.write_bytes(b"no tensors here")
    with pytest.raises(ValueError, match="cannot load target"):
        load_target(str(tmp_path), dtype="fp32")


def test_auto_is_bf16_where_the_machine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_dtype("auto", "cuda") == torch.bfloat16
    monkeypatch.setattr("paceline.target._has_bf16", lambda: False)
    assert parse_dtype("auto", "cpu") == torch.float32
    monkeypatch.setattr("paceline.target._has_bf16", lambda: True)
    assert parse_dtype("auto") == torch.bfloat16
    with pytest.raises(ValueError, match="not one of auto, bf16"):
        parse_dtype("int8")
