"""The DFlash block drafter: its config, its module and its strict folder format.

Does not know attention masks, caches, losses or targets: the caller supplies attention and heads.

Source: DFlash, arXiv 2602.06036, section 4 and appendix A.3; folder format as z-lab, vLLM and SGLang
read it. Shape letters: C context tokens, T block tokens of all rows packed behind one another,
m taps, F = m * D tapped width, D hidden width, h heads, g key/value heads, e head width, V' draft
vocabulary. Nothing here has a batch dimension.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.dflare import ARCHITECTURE as DFLARE
from paceline.drafters.dflare import TapNorm, diagonal, mix_shares, shares, start_on
from paceline.drafters.heads import LengthHead, MarkovHead, XPressHead, init_head

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q [T, h, e], k [T, g, e], v [T, g, e]) -> [T, h, e]`; q and k are normed and rotated.

The caller adds the context keys and values of the layer and applies visibility: a block token sees
the context strictly before its anchor and its own block (all of it, or up to itself if the layer
`is_causal`).
"""

# Keys of a config.json that change nothing here: metadata, and what only training or the embedding uses.
_IGNORED = set(
    "_name_or_path architectures attention_dropout auto_map bos_token_id causal dflash_config dtype "
    "eos_token_id initializer_range is_causal is_decoder mask_token max_window_layers model_type "
    "pad_token_id quantization_config rope_parameters rope_scaling tie_word_embeddings torch_dtype "
    "transformers_version use_cache use_sliding_window xpress_block_size xpress_mlp_hidden "
    "xpress_num_passes use_thresh_head_two_model".split()
)
# Keys that would change the module, with the only value it has.
_FIXED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "thresh_head_direct_len": True,
    "projector_type": None,  # SpecForge's keys of a Domino head, as they stand without one
    "pure_draft_prefix_len": 0,
    "shift_label": False,
}
_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: type(v) is int,
    "float": lambda v: type(v) in (int, float) and 0 < v < math.inf,
    "bool": lambda v: type(v) is bool,
    "str": lambda v: type(v) is str,
    "tuple[int, ...]": lambda v: type(v) is tuple and all(type(x) is int for x in v),
    "tuple[str, ...]": lambda v: type(v) is tuple and all(type(x) is str for x in v),
}
HEADS = ("markov_head", "xpress_head", "thresh_head_two_model")
_OPTIONAL = ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight")


def default_target_layers(num_layers: int, n: int) -> list[int]:
    """`n` layers to tap out of `num_layers`: even from 1 to num_layers - 3 (Python's rounding)."""
    if n < 1 or num_layers < 4:
        raise ValueError(f"cannot choose {n} taps in {num_layers} layers; name target_layer_ids")
    if n == 1:
        return [num_layers // 2]
    last = num_layers - 3
    return [round(1 + i * (last - 1) / (n - 1)) for i in range(n)]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Everything needed to build the module and to draft with it.

    `block_size` counts the anchor: a block drafts `block_size - 1` tokens. `target_layer_ids` are
    0-based layers whose OUTPUT is tapped (hidden_states[id + 1]). `draft_vocab_size` is None when
    the drafter proposes from the whole vocabulary. `causal` holds for all layers; a sliding layer is
    causal without it. `vocabulary_fingerprint` names the tokenizer that the drafter was trained for.

    Heads (drafters/heads.py) are there if their size is: `markov_rank`, `xpress_rank` (with its
    `xpress_mlp_ratio`, and `num_jacobi_passes` sweeps unless told otherwise),
    `thresh_head_bottleneck_dim` for the length head.

    DFlare (drafters/dflare.py) has `layerwise_fusion` instead of the fusing matrix and `split_kv`,
    projections of its own for the context's keys and values; `tap_norm` is our own addition.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    causal: bool = False
    draft_vocab_size: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    vocabulary_fingerprint: str | None = None
    markov_rank: int | None = None
    xpress_rank: int | None = None
    xpress_mlp_ratio: int = 2
    num_jacobi_passes: int = 6
    thresh_head_bottleneck_dim: int | None = None
    layerwise_fusion: bool = False
    split_kv: bool = False
    tap_norm: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name))
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types must name every draft layer")
        if unknown := set(self.layer_types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"unknown layer type {sorted(unknown)}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("sliding_attention layers need sliding_window")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError("sliding_window is smaller than block_size")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.block_size < 2:
            raise ValueError("block_size counts the anchor and must be at least 2")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is no row of the target embedding"
            )
        if bad := [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers - 1]:
            raise ValueError(f"target_layer_ids {bad} outside 0..{self.num_target_layers - 2}")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty")
        if self.tap_norm and not self.layerwise_fusion:
            raise ValueError("tap_norm belongs to layerwise_fusion")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds the vocabulary")

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps, m * D."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def is_dflare(self) -> bool:
        """Whether the context side is DFlare's, all of it or a part."""
        return self.layerwise_fusion or self.split_kv

    @property
    def refiners(self) -> tuple[str, ...]:
        """The kinds of bias head there are, best first."""
        ranks = {"xpress": self.xpress_rank, "markov": self.markov_rank}
        return tuple(kind for kind, rank in ranks.items() if rank is not None)

    def is_causal(self, layer: int) -> bool:
        """Whether a block token of this layer sees its block only up to itself."""
        return self.causal or self.layer_types[layer] == "sliding_attention"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DFlashConfig:
        """Read a config.json; keys may sit at the top or inside `dflash_config`.

        Raises ValueError for a key that is missing, unknown, of a wrong type or given twice with
        different values, and for what this module lacks, such as rotary scaling.
        """
        flat = _flatten(data)
        if "head_dim" not in flat and {"hidden_size", "num_attention_heads"} <= flat.keys():
            for name in ("hidden_size", "num_attention_heads"):
                _check_type(name, flat[name])
            flat["head_dim"] = flat["hidden_size"] // flat["num_attention_heads"]
        if flat.get("draft_vocab_size") == flat.get("vocab_size"):
            flat.pop("draft_vocab_size", None)
        if "xpress_num_passes" in flat:
            flat.setdefault("num_jacobi_passes", flat["xpress_num_passes"])
        if type(flat.get("xpress_mlp_hidden")) is int and type(flat.get("xpress_rank")) is int:
            ratio = flat["xpress_mlp_hidden"] // max(1, flat["xpress_rank"])
            flat.setdefault("xpress_mlp_ratio", ratio)
        if flat.get("use_sliding_window") and "layer_types" not in flat:
            raise ValueError("use_sliding_window needs layer_types")
        if DFLARE in flat.get("architectures", ()):  # published configs have no keys for it
            flat.setdefault("layerwise_fusion", True)
            flat.setdefault("split_kv", True)
        chosen = {f.name: flat[f.name] for f in fields(cls) if f.name in flat}
        for name in ("target_layer_ids", "layer_types"):
            if isinstance(chosen.get(name), list):
                chosen[name] = tuple(chosen[name])
        required = [f.name for f in fields(cls) if f.default is f.default_factory]
        if missing := [name for name in required if name not in chosen]:
            raise ValueError(f"the drafter's config lacks {', '.join(missing)}")
        config = cls(**chosen)
        for name, value in config._heads().items():
            if flat.get(name, value) != value:
                raise ValueError(f"{name} is {flat[name]!r}, but the other keys say {value!r}")
        if flat.get("causal") is False and "sliding_attention" in config.layer_types:
            raise ValueError("sliding layers that are not causal are not supported")
        return config

    def to_dict(self) -> dict[str, Any]:
        """The plain config.json that z-lab's code, vLLM and SGLang read."""
        inner: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.causal:
            inner["causal"] = True
        if self.vocabulary_fingerprint is not None:
            inner["vocabulary_fingerprint"] = self.vocabulary_fingerprint
        for name in ("layerwise_fusion", "split_kv", "tap_norm"):
            if self.is_dflare:  # named, because only both together are what the architecture says
                inner[name] = getattr(self, name)
        out: dict[str, Any] = {
            "architectures": [DFLARE if self.is_dflare else "DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": inner,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": "sliding_attention" in self.layer_types,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        if self.draft_vocab_size is not None:
            out["draft_vocab_size"] = self.draft_vocab_size
        return out | self._heads()

    def _heads(self) -> dict[str, Any]:
        """The keys of the heads, under the names of each reader."""
        out: dict[str, Any] = {}
        if self.markov_rank is not None:
            out |= {"markov_rank": self.markov_rank, "markov_head_type": "vanilla"}
        if self.xpress_rank is not None:
            out |= {
                "xpress_rank": self.xpress_rank,
                "xpress_mlp_ratio": self.xpress_mlp_ratio,
                "xpress_mlp_hidden": self.xpress_rank * self.xpress_mlp_ratio,
                "xpress_block_size": self.block_size,
                "xpress_num_passes": self.num_jacobi_passes,
                "num_jacobi_passes": self.num_jacobi_passes,
            }
        if self.thresh_head_bottleneck_dim is not None:
            out |= {
                "use_thresh_head_two_model": True,
                "thresh_head_bottleneck_dim": self.thresh_head_bottleneck_dim,
                "thresh_head_direct_len": True,
            }
        return out


def _check_type(name: str, value: Any) -> None:
    kind, _, optional = str(DFlashConfig.__dataclass_fields__[name].type).partition(" | ")
    if optional and value is None:
        return
    if not _KINDS[kind](value):
        raise ValueError(f"{name} is {value!r}, not {kind}")
    if kind == "int" and value < (name != "mask_token_id"):
        raise ValueError(f"{name} is {value}, too small")


def _flatten(data: Any) -> dict[str, Any]:
    """The keys of all levels under the dataclass's names, null left out; ValueError as from_dict."""
    if not isinstance(data, Mapping):
        raise ValueError("the config is no object")
    known = {f.name for f in fields(DFlashConfig)} | _IGNORED | _FIXED.keys()
    flat: dict[str, Any] = {}
    _merge(flat, data, known, "")
    _merge(flat, flat.get("dflash_config"), known, "dflash_config.")
    for name in ("rope_parameters", "rope_scaling"):
        rope = flat.get(name)
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
        if kind not in (None, "default"):
            raise ValueError(f"rotary scaling {kind!r} is not supported for DFlash drafters")
        _merge(flat, rope, _ROPE, f"{name}.")
    _merge(flat, {"causal": flat.get("is_causal")}, known, "is_causal as ")
    if not isinstance(flat.get("mask_token"), str):
        _merge(flat, {"mask_token_id": flat.get("mask_token")}, known, "mask_token as ")
    for name, value in _FIXED.items():
        if flat.get(name, value) != value:
            raise ValueError(f"{name} {flat[name]!r} is not supported; DFlash has {value!r}")
    names = flat.get("architectures", ["DFlash"])
    known_names = ("DFlash", DFLARE)
    if not (isinstance(names, list) and any(str(n).startswith(known_names) for n in names)):
        raise ValueError(f"architectures {names!r} names no DFlash or DFlare drafter")
    return flat


def _merge(flat: dict[str, Any], more: Any, known: set[str], where: str) -> None:
    """Add the keys of one level to `flat`; ValueError for unknown keys and different values."""
    if more is not None and not isinstance(more, Mapping):
        raise ValueError(f"{where[:-1]} is no object")
    for name, value in (more or {}).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown config key {where}{name}{hint}")
        if value is None:
            continue
        if flat.setdefault(name, value) != value:
            raise ValueError(f"{where}{name} is {value!r}, but the config also has {flat[name]!r}")


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """Names a tokenizer's vocabulary: a short hash of its sorted (token, id) pairs."""
    pairs = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(pairs.encode()).hexdigest()[:16]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), math.nan))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    device = torch.get_default_device()  # skip_init would take the CPU, also under "meta"
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=device)
    with torch.no_grad():
        for weight in linear.parameters():
            weight.fill_(math.nan)
    return linear


class _Attention(nn.Module):
    """The projections and per-head norms of one draft layer (attention itself is the caller's)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(width, queries, bias)
        self.k_proj = _linear(width, keys, bias)
        self.v_proj = _linear(width, keys, bias)
        if config.split_kv:
            self.k_proj_target = _linear(width, keys, bias)
            self.v_proj_target = _linear(width, keys, bias)
        self.o_proj = _linear(queries, width, bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class _MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)


class DFlashModule(nn.Module):
    """The trained part of a DFlash drafter; parameters start as NaN until loaded or initialised.

    One call of drafting is: `c = context(features)`; per layer `k, v = context_kv(i, c, positions)`
    into the caller's cache; `h = embed(block ids)`; `h = layer(i, h, positions, attend)` for each
    layer; `final(h)` goes to the target's head. Training runs the same methods on many blocks.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        if config.layerwise_fusion:
            layers, taps = config.num_hidden_layers, len(config.target_layer_ids)
            self.layer_fusion_weights = nn.Parameter(torch.full((layers, taps), math.nan))
            if config.tap_norm:
                self.tap_norm = TapNorm(taps, config.hidden_size, config.rms_norm_eps)
        else:
            self.fc = _linear(config.feature_size, config.hidden_size)
        self._shares: Tensor | None = None
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        words = config.draft_vocab_size or config.vocab_size
        if config.markov_rank is not None:
            self.markov_head = MarkovHead(config.vocab_size, words, config.markov_rank)
        if config.xpress_rank is not None:
            self.xpress_head = XPressHead(
                config.vocab_size,
                words,
                config.hidden_size,
                config.block_size,
                config.xpress_rank,
                config.xpress_mlp_ratio,
            )
        if config.thresh_head_bottleneck_dim is not None:
            size = config.thresh_head_bottleneck_dim
            self.thresh_head_two_model = LengthHead(config.hidden_size, size)
        self._rope: tuple[Tensor, Tensor] | None = None

    def context(self, features_CF: Tensor) -> Tensor:
        """Fused context [L', C, D] of tapped features [C, F]; L' is 1 where all layers share it, else
        there is one for each layer."""
        if not self.config.layerwise_fusion:
            fused: Tensor = self.hidden_norm(self.fc(features_CF))
            return fused[None]
        if self.config.tap_norm:
            features_CF = self.tap_norm(features_CF)
        kept = self._shares
        mixed = mix_shares(features_CF, shares(self.layer_fusion_weights) if kept is None else kept)
        out: Tensor = self.hidden_norm(mixed)
        return out

    @torch.no_grad()
    def fold(self) -> None:
        """Keep what drafting would compute again each round; weights must not change any more."""
        if self.config.layerwise_fusion:
            self._shares = shares(self.layer_fusion_weights)

    def context_kv(self, i: int, context_LCD: Tensor, positions_C: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [C, g, e] of layer `i` for context tokens.

        Needs no query and no other layer: all layers' context can be written to a cache at once.
        """
        attention: Any = self.layers[i].self_attn
        context = context_LCD[i if len(context_LCD) > 1 else 0]
        shape = (len(context), self.config.num_key_value_heads, self.config.head_dim)
        split = self.config.split_kv
        keys = (attention.k_proj_target if split else attention.k_proj)(context).view(shape)
        values = (attention.v_proj_target if split else attention.v_proj)(context).view(shape)
        return self.rotate(attention.k_norm(keys), positions_C), values

    def layer(self, i: int, hidden_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """One draft layer on packed block tokens: [T, D] -> [T, D]; attention is `attend`'s."""
        config, layer = self.config, self.layers[i]
        attention: Any = layer.self_attn
        tokens, width = len(hidden_TD), config.head_dim
        u = layer.input_layernorm(hidden_TD)  # type: ignore[operator]
        q = attention.q_norm(attention.q_proj(u).view(tokens, config.num_attention_heads, width))
        k = attention.k_norm(attention.k_proj(u).view(tokens, config.num_key_value_heads, width))
        v = attention.v_proj(u).view(tokens, config.num_key_value_heads, width)
        mixed = attend(i, self.rotate(q, positions_T), self.rotate(k, positions_T), v)
        hidden = hidden_TD + attention.o_proj(mixed.reshape(tokens, -1))
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[operator]
        return out

    def final(self, hidden_TD: Tensor) -> Tensor:
        """The final norm; its output goes to the target's language-model head."""
        out: Tensor = self.norm(hidden_TD)
        return out

    def rotate(self, x_Tne: Tensor, positions_T: Tensor) -> Tensor:
        """Rotary embedding (halves layout) of [T, n, e] at absolute positions, in float32."""
        cos, sin = self._rope_table(x_Tne.device)
        cos, sin = cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1)
        low, high = x_Tne.float().chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        return turned.to(x_Tne.dtype)

    def _rope_table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, e / 2], float32, built once per device."""
        if self._rope is None or self._rope[0].device != device:
            half = self.config.head_dim // 2
            steps = torch.arange(half, dtype=torch.float32) / half
            frequencies = 1.0 / self.config.rope_theta**steps
            places = torch.arange(self.config.max_position_embeddings, dtype=torch.float32)
            angles = torch.outer(places, frequencies)
            self._rope = (angles.cos().to(device), angles.sin().to(device))
        return self._rope


@torch.no_grad()
def init_random(module: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Fill every parameter: norms with 1, biases with 0, matrices with N(0, std), heads silent.

    Layerwise fusion starts as published: each layer on the tap of its own depth.
    """
    for name, weight in module.named_parameters():
        if name.partition(".")[0] in HEADS:
            continue
        if name == "layer_fusion_weights":
            start_on(weight, diagonal(*weight.shape))
        elif weight.dim() == 1 or name == "tap_norm.weight":
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    for name, part in module.named_children():
        if name in HEADS:
            init_head(part, generator, std)


def load_dflash(
    folder: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16
) -> tuple[DFlashConfig, DFlashModule, Tensor | None]:
    """Load (config, module in `dtype`, d2t) from a plain DFlash folder.

    `d2t` [V'] int64 is an offset (target id of draft token i = i + d2t[i]), None for a full
    vocabulary. Embedding and head are the target's; stored ones are not read (`stored_weights` has
    them). Raises ValueError naming the tensor that is missing, unknown or has another shape.
    """
    path = Path(folder)
    config = read_config(path)
    module = DFlashModule(config)
    state = _read_tensors(path)
    known = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    if missing := sorted(known.keys() - state.keys()):
        raise ValueError(f"{path}: missing tensor {', '.join(missing)}")
    if extra := sorted(state.keys() - known.keys() - set(_OPTIONAL)):
        raise ValueError(f"{path}: unknown tensor {', '.join(extra)}")
    for name, shape in known.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"{path}: tensor {name} is {tuple(state[name].shape)}, not {shape}")
    d2t = _check_optional(path, config, state)
    module.load_state_dict({name: state[name] for name in known})
    return config, module.to(dtype).eval(), d2t


def read_config(folder: str | os.PathLike[str]) -> DFlashConfig:
    """The config of a DFlash folder; ValueError names the file when it cannot be read."""
    path = Path(folder) / "config.json"
    try:
        return DFlashConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def stored_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Head and embedding of a DFlash folder, where it has them."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for name in {"lm_head.weight", "embed_tokens.weight"} & set(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path}: no .safetensors file")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(str(file)))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: {error}") from error
    return state


def _check_optional(path: Path, config: DFlashConfig, state: dict[str, Tensor]) -> Tensor | None:
    rows = config.draft_vocab_size or config.vocab_size
    shapes = {
        "d2t": (rows,),
        "t2d": (config.vocab_size,),
        "lm_head.weight": (rows, config.hidden_size),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
    }
    for name, shape in shapes.items():
        if name in state and tuple(state[name].shape) != shape:
            raise ValueError(f"{path}: tensor {name} is {tuple(state[name].shape)}, not {shape}")
    if config.draft_vocab_size is None:
        if "d2t" in state or "t2d" in state:
            raise ValueError(f"{path}: has d2t or t2d, but config.json has no draft_vocab_size")
        return None
    if "d2t" not in state:
        raise ValueError(f"{path}: missing tensor d2t (draft_vocab_size is set)")
    d2t = state["d2t"].to(torch.int64)
    targets = draft_to_target(d2t)
    if targets.min() < 0 or targets.max() >= config.vocab_size:
        raise ValueError(f"{path}: tensor d2t points outside the vocabulary")
    if len(targets.unique()) != len(targets):
        raise ValueError(f"{path}: tensor d2t maps two draft tokens to one target token")
    if "t2d" in state and not torch.equal(state["t2d"].bool(), _target_mask(targets, config)):
        raise ValueError(f"{path}: tensor t2d disagrees with d2t")
    return d2t


def draft_to_target(d2t: Tensor) -> Tensor:
    """Target ids [V'] of the draft tokens, from the stored offsets."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def offsets_of(target_ids: Tensor) -> Tensor:
    """The stored form `d2t` [V'] of a draft vocabulary given as target ids."""
    return target_ids.to(torch.int64) - torch.arange(len(target_ids))


def _target_mask(target_ids: Tensor, config: DFlashConfig) -> Tensor:
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[target_ids] = True
    return mask


def save_dflash(
    folder: str | os.PathLike[str],
    config: DFlashConfig,
    module: DFlashModule,
    d2t: Tensor | None = None,
    *,
    lm_head: Tensor | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write config.json and model.safetensors (bf16); the folder is replaced as a whole.

    `d2t` is needed when `config.draft_vocab_size` is set; t2d is derived. `lm_head` [V', D] is stored
    only if given (engines that cannot cut the target's head want it). `files` are further text files.
    """
    from safetensors.torch import save_file

    if (d2t is None) != (config.draft_vocab_size is None):
        raise ValueError("d2t and config.draft_vocab_size belong together")
    state = {n: w.detach().to(torch.bfloat16).contiguous() for n, w in module.state_dict().items()}
    if bad := sorted(name for name, weight in state.items() if not weight.isfinite().all()):
        raise ValueError(f"not saved: {', '.join(bad)} holds NaN or infinity")
    if d2t is not None:
        state["d2t"] = d2t.to(torch.int64).contiguous()
        state["t2d"] = _target_mask(draft_to_target(d2t), config)
    if lm_head is not None:
        state["lm_head.weight"] = lm_head.detach().to(torch.bfloat16).contiguous()
    final = Path(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        work.chmod(0o755)
        for name, text in (files or {}).items():
            (work / name).write_text(text)
        save_file(state, str(work / "model.safetensors"), metadata={"format": "pt"})
        (work / "model.safetensors").chmod(0o644)
        (work / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
        if final.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{final.name}-old-", dir=final.parent))
            os.rename(final, old / "folder")
            os.rename(work, final)
            shutil.rmtree(old)
        else:
            os.rename(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final
