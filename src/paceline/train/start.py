"""Where a drafter's weights begin: copied target layers, random values, another drafter; feature scales.

Does not know the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.dflash import DFlashConfig, DFlashModule, init_random, load_dflash
from paceline.train.config import TrainConfig
from paceline.train.features import FeatureRow

_MUST_AGREE = (  # what the weights of an earlier drafter were trained with
    "hidden_size",
    "num_hidden_layers",
    "target_layer_ids",
    "mask_token_id",
    "causal",
    "layer_types",
    "sliding_window",
    "rms_norm_eps",
    "rope_theta",
)


@torch.no_grad()
def embedding_table(target: Any, dtype: torch.dtype) -> Tensor:
    """Input embeddings [V, D] as the target's own forward sees them (some models scale them)."""
    module = target.get_input_embeddings()
    out: Tensor = module(torch.arange(module.weight.shape[0])).to(dtype)
    return out


def drafter_config(config: TrainConfig, target: Any) -> DFlashConfig:
    """The drafter's shape for a loaded target; see ``drafter_shape``."""
    return drafter_shape(config, target.config)


def drafter_shape(config: TrainConfig, text: Any) -> DFlashConfig:
    """The drafter's shape from the target's Hugging Face config: the layer shape is the target's.

    Raises ValueError for taps, a mask id or ``init_layers`` that the target does not have.
    """
    if bad := [i for i in config.init_layers if not 0 <= i < text.num_hidden_layers]:
        raise ValueError(
            f"init_layers {bad}: the target has layers 0..{text.num_hidden_layers - 1}"
        )
    rope = text.rope_parameters or {}
    heads = text.num_attention_heads
    return DFlashConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=config.draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        block_size=config.block_size,
        num_target_layers=text.num_hidden_layers,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.taps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        draft_vocab_size=config.draft_vocab_size,
    )


def parameter_count(shape: DFlashConfig) -> int:
    """Trained parameters of a drafter of this shape; nothing is allocated."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in DFlashModule(shape).parameters())


def feature_scales(rows: Sequence[FeatureRow]) -> Tensor:
    """Root mean square [F] of each tapped dimension; position 0 (the attention sink) left out."""
    total, count = torch.zeros(rows[0].width), 0
    for item in rows:
        values = item.tensor()[1:].cpu().float()
        total += values.square().sum(0)
        count += len(values)
    return (total / max(1, count)).sqrt().clamp_min(1e-3)


@torch.no_grad()
def start_module(
    config: TrainConfig, shape: DFlashConfig, target: Any, rows: Sequence[FeatureRow], rms: Tensor
) -> DFlashModule:
    """A module in float32 with every weight set: from ``init_from``, target layers or at random.

    A random start is N(0, 0.02) with norms at 1; the fusing layer sees every tapped dimension at
    the same magnitude, for a few dimensions would otherwise drown the others.
    """
    if config.init_from:
        theirs, module, _ = load_dflash(config.init_from, torch.float32)
        for name in _MUST_AGREE:
            old, new = getattr(theirs, name), getattr(shape, name)
            if old != new:
                raise ValueError(f"{config.init_from} has {name} {old}, this run {new}")
        return module
    module = DFlashModule(shape)
    generator = torch.Generator().manual_seed(config.seed)
    init_random(module, generator)
    if not config.init_layers:
        module.fc.weight.div_(rms)
        return module
    layers = target.get_decoder().layers
    sample = torch.cat([item.tensor()[1:].cpu().float() for item in rows[:16]])
    for i, source in enumerate(config.init_layers):
        _copy_layer(module.layers[i], layers[source], shape, config.taps, source, sample)
    _start_fc(module, config, rms, generator)
    module.norm.weight.copy_(0.33 * target.get_decoder().norm.weight.float())
    return module


def _copy_layer(
    mine: Any, theirs: Any, shape: DFlashConfig, taps: Sequence[int], source: int, sample: Tensor
) -> None:
    """Copy one target layer. Its input norm is folded into q, k and v, because the context does
    not pass through the drafter's input norm; q/k norms become the target's mean q/k magnitude."""
    gain = theirs.input_layernorm.weight.float()
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(mine.self_attn, name).weight.copy_(getattr(theirs.self_attn, name).weight * gain)
    mine.self_attn.o_proj.weight.copy_(theirs.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mine.mlp, name).weight.copy_(getattr(theirs.mlp, name).weight)
    mine.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
    near = min(range(len(taps)), key=lambda j: abs(taps[j] + 1 - source))
    states = sample[:, near * shape.hidden_size : (near + 1) * shape.hidden_size]
    states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + shape.rms_norm_eps)
    for norm, name in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        projected = states @ getattr(mine.self_attn, name).weight.T
        size = projected.view(len(states), -1, shape.head_dim).square().mean(-1).sqrt().mean()
        getattr(mine.self_attn, norm).weight.fill_(float(size))


def _start_fc(
    module: DFlashModule, config: TrainConfig, rms: Tensor, generator: torch.Generator
) -> None:
    """Identity on the tap that feeds the last copied layer, small noise on the others."""
    width = module.config.hidden_size
    near = min(
        range(len(config.taps)), key=lambda j: abs(config.taps[j] + 1 - config.init_layers[-1])
    )
    block = slice(near * width, (near + 1) * width)
    level = float(rms[block].median())
    noise = torch.randn(module.fc.weight.shape, generator=generator)
    module.fc.weight.copy_(0.1 * level * noise / rms / module.fc.weight.shape[1] ** 0.5)
    module.fc.weight[:, block] = torch.eye(width)
