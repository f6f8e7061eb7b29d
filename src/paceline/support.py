"""Which targets the packed forward can serve exactly, found out when a model is loaded.

Knows nothing about drafters or decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.attention import Packed, RaggedCache

_STATEFUL = (
    "linear_attention",
    "mamba",
    "conv",
    "recurrent",
    "ssm",
    "rwkv",
    "gated_delta",
    "rglru",
    "chunked_attention",
)


def keep_output(states: dict[int, Tensor], layer: int) -> Callable[..., None]:
    """A forward hook that stores the layer's output [T, D] of the first row in ``states``."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        states[layer] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook


def refuse_state(config: Any, layers: nn.ModuleList) -> None:
    """Refuse models whose layers keep state that cannot be rolled back."""
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if any(word in kind for word in _STATEFUL):
            raise ValueError(
                f"layer {i} is {kind!r}: its state cannot be rolled back after a rejected draft, "
                "so speculative decoding would change the output; this model is not supported"
            )
    for i, layer in enumerate(layers):
        for name, module in layer.named_modules():
            kind = type(module).__name__.lower()
            if any(word in kind for word in ("mamba", "rwkv", "recurrent", "deltanet", "conv1d")):
                if type(module) is nn.Conv1d or "conv1d" not in kind:
                    raise ValueError(
                        f"layer {i} ({name}: {type(module).__name__}) keeps a state that cannot be "
                        "rolled back after a rejected draft; this model is not supported"
                    )
    if getattr(config, "attention_chunk_size", None):
        raise ValueError("layers with chunked attention are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models keep one set per layer type
        if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"rope type {part['rope_type']!r} changes with the longest row of a batch, so a "
                "row would depend on its neighbours; this model is not supported"
            )


@torch.inference_mode()
def probe(target: Any) -> None:
    """Compare a packed, split forward with a plain one; name the first layer that differs.

    Costs two short forwards, long enough to pass a small window. A layer that never calls the
    packed attention, that keeps state of its own or whose window lives in a mask cannot pass.
    """
    name = type(target.model).__name__
    window = getattr(target.config, "sliding_window", None) or 0
    length = window + 7 if window <= 64 else 7
    ids = [(7 * i + 3) % target.vocab_size for i in range(length)]
    every = range(target.num_layers)
    cache = target.new_cache(2)
    try:
        for start, stop in ((0, length - 3), (length - 3, length)):
            batch = _two_rows(ids, start, stop, target.device)
            _, taps = target.forward(batch, cache, torch.tensor([stop - start - 1]), every)
            cache.lengths = [stop, stop]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} does not take packed inputs: {error}") from error
    for i in every:
        if i not in cache.layers:
            raise ValueError(
                f"layer {i} of {name} does not use transformers' attention interface, so a "
                "custom mask would be ignored; this model is not supported"
            )
    _refuse_lost_window(target, cache)
    assert taps is not None
    states: dict[int, Tensor] = {}
    hooks = [target.layers[i].register_forward_hook(keep_output(states, i)) for i in every]
    try:
        target.next_logits(ids)
    finally:
        for hook in hooks:
            hook.remove()
    tolerance = 1e-3 if target.dtype == torch.float32 else 0.25
    for i in every:
        packed = taps[:3, i * target.hidden_size : (i + 1) * target.hidden_size].float()
        plain = states[i][-3:].float()
        gap = float((packed - plain).norm() / plain.norm().clamp_min(1e-6))
        if not gap < tolerance:
            raise ValueError(
                f"layer {i} of {name} gives another result when its tokens "
                f"arrive in two parts (relative error {gap:.2g}): it keeps a state or a mask "
                "that Paceline cannot control; this model is not supported"
            )


def _refuse_lost_window(target: Any, cache: RaggedCache) -> None:
    """Refuse a model whose config has windows that its attention was not told of."""
    window = getattr(target.config, "sliding_window", None)
    kinds = getattr(target.config, "layer_types", None) or ()
    expected = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if window and not kinds and getattr(target.config, "use_sliding_window", True):
        expected = [0]
    for i in expected:
        if cache.windows.get(i) is None:
            raise ValueError(
                f"layer {i} of {type(target.model).__name__} has a sliding window that lives in "
                "its mask only, which the packed forward does not build; this model is not "
                "supported"
            )


def _two_rows(ids: list[int], start: int, stop: int, device: torch.device) -> Packed:
    n = stop - start
    return Packed(
        ids_T=torch.tensor(ids[start:stop] * 2, device=device),
        positions_T=torch.tensor(list(range(start, stop)) * 2, device=device),
        slots=[0, 1],
        starts=[start, start],
        counts=[n, n],
        ancestors=[None, None],
    )
