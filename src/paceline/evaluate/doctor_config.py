"""Configs with every value of the kind its key has: what is not is taken out and named.

Does not know formats or what values mean; behind it, checks need not fear a list where a number stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Malformed = list[tuple[str, Any, str]]  # place, value, what it should be
_MOST = 2**31
_LAYERS = 1000


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < _MOST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LAYERS


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    name: kind
    for names, kind in (
        ("num_hidden_layers", (_is_count, f"a number from 1 to {_LAYERS}")),
        (
            "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
            "block_size num_target_layers mask_token_id max_position_embeddings draft_vocab_size "
            "sliding_window markov_rank xpress_rank xpress_mlp_ratio num_jacobi_passes "
            "thresh_head_bottleneck_dim target_hidden_size pard_token ptd_token_id",
            (_is_int, "a whole number"),
        ),
        ("rope_theta rms_norm_eps", (_is_number, "a number")),
        (
            "causal is_causal attention_bias layerwise_fusion split_kv tap_norm tie_word_embeddings "
            "sample_from_anchor use_sliding_window sliding_window_non_causal",
            (lambda value: isinstance(value, bool), "true or false"),
        ),
        ("architectures layer_types", (_is_texts, "a list of texts")),
        ("speculators_model_type", (lambda value: isinstance(value, str), "a text")),
        (
            "dflash_config eagle_config speculators_config transformer_layer_config rope_scaling "
            "rope_parameters",
            (lambda value: isinstance(value, Mapping), "an object"),
        ),
    )
    for name in names.split()
}


def sound(config: Mapping[str, Any], malformed: Malformed, where: str = "") -> dict[str, Any]:
    """A copy without values of another kind than their keys'; those are added to ``malformed``."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        fits, wanted = _KINDS.get(key, (lambda _: True, ""))
        if value is not None and not fits(value):
            malformed.append((where + key, value, wanted))
        elif isinstance(value, Mapping) and key in _KINDS:
            kept[key] = sound(value, malformed, f"{where}{key}.")
        else:
            kept[key] = value
    return kept
