"""Where a drafter's weights begin: copied target layers, random values, another drafter; feature scales.

Does not know the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.dflare import start_on
from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    draft_to_target,
    init_random,
    load_dflash,
)
from paceline.train.config import TrainConfig
from paceline.train.earlier import check_start
from paceline.train.features import FeatureRow

# Of a target layer that can be copied: the parts it may have, and no others.
_LAYER_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


@torch.no_grad()
def embedding_table(target: Any, dtype: torch.dtype) -> Tensor:
    """Input embeddings [V, D] as the target's own forward sees them (some models scale them)."""
    module = target.get_input_embeddings()
    ids = torch.arange(module.weight.shape[0], device=module.weight.device)
    out: Tensor = module(ids).to(dtype)
    return out


def drafter_shape(config: TrainConfig, target: Any) -> DFlashConfig:
    """The drafter's shape from the target's Hugging Face config: the layer shape is the target's.

    What a target does not have (rotary positions, grouped keys, RMS norms) gets the usual value.
    Raises ValueError for taps, a mask id or ``init_layers`` that the target does not have.
    """
    text = target.get_text_config()
    if bad := [i for i in config.init_layers if not 0 <= i < text.num_hidden_layers]:
        raise ValueError(
            f"init_layers {bad}: the target has layers 0..{text.num_hidden_layers - 1}"
        )
    heads, reduced = text.num_attention_heads, config.draft_vocab_size
    refiner, length = config.refiner, config.length_head
    added: dict[str, Any] = {}
    if refiner is not None:
        added[f"{refiner.kind}_rank"] = refiner.rank
    if refiner is not None and refiner.kind == "xpress":
        added |= {"xpress_mlp_ratio": refiner.mlp_ratio, "num_jacobi_passes": refiner.passes}
    added |= {"layerwise_fusion": config.fusion == "layerwise"}
    added |= {"split_kv": config.split_kv, "tap_norm": config.tap_norm}
    if length is not None:
        added["thresh_head_bottleneck_dim"] = length.bottleneck
    eps = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    return DFlashConfig(
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_hidden_layers=config.draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        block_size=config.block_size,
        num_target_layers=text.num_hidden_layers,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.taps,
        rope_theta=_rope_theta(text),
        rms_norm_eps=next((getattr(text, name) for name in eps if hasattr(text, name)), 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        draft_vocab_size=None if reduced == text.vocab_size else reduced,
        **added,
    )


def _rope_theta(text: Any) -> float:
    """The rotary base of the layers that see the whole context; 10000 for a target without one.

    Targets with several kinds of layers keep the settings of each kind by itself.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, rope.get("full_attention") or {}):
        if "rope_theta" in part:
            return float(part["rope_theta"])
    if rope:
        raise ValueError(f"the target's rope_parameters have no rope_theta: {rope}")
    return float(getattr(text, "rope_theta", None) or 10000.0)


@torch.no_grad()
def check_head(target: Any, tokens_S: Tensor) -> None:
    """Raise ValueError unless the target's logits are its head applied to its last state.

    Distances to its distribution are taken that way; scaled or soft-capped logits would be another
    distribution. (The most probable token, and so the cross-entropy of greedy text, is the same.)
    """
    ids = tokens_S.long()[None].to(target.get_input_embeddings().weight.device)
    state = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    product = state @ target.get_output_embeddings().weight.T
    logits = target(input_ids=ids, use_cache=False).logits
    if float((product - logits).abs().max()) > 0.05 * float(logits.abs().max()):
        raise ValueError("the target scales or caps its logits: only loss=ce can be used")


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

    A random start is N(0, 0.02) with norms at 1, but every tapped dimension enters at the same
    magnitude (`_level`). Copied layers keep the target's own: their gains were learned with it.
    """
    module = DFlashModule(shape)
    generator = torch.Generator().manual_seed(config.seed)
    init_random(module, generator)
    _start_refiners(module, target, generator)
    if config.init_from:
        check_start(config, shape)
        _, theirs, _ = load_dflash(config.init_from, torch.float32)
        kept, mine = theirs.state_dict(), module.state_dict()
        names = kept_names(theirs, shape)
        module.load_state_dict(mine | {n: _grown(n, mine[n], kept[n]) for n in names})
        return module
    if not config.init_layers:
        _level(module, rms)
        return module
    layers = target.get_decoder().layers
    for source in config.init_layers:
        _check_layer(layers[source], source)
    sample = torch.cat([item.tensor()[1:].cpu().float() for item in rows[:16]])
    for i, source in enumerate(config.init_layers):
        _copy_layer(module.layers[i], layers[source], shape, config.taps, source, sample)
    if shape.layerwise_fusion:
        near = [_feeding(config.taps, source) for source in config.init_layers]
        start_on(module.layer_fusion_weights, near)
    else:
        _start_fc(module, config, rms, generator)
    module.norm.weight.copy_(0.33 * _gain(target.get_decoder().norm))
    return module


def kept_names(theirs: DFlashModule, shape: DFlashConfig) -> list[str]:
    """The weights of an earlier drafter that a run of this shape goes on with: all but those of heads
    that it does not have, or has in another size."""
    with torch.device("meta"):
        mine = DFlashModule(shape).state_dict()
    other = {
        name.partition(".")[0]
        for name, weight in theirs.state_dict().items()
        if name not in mine or (mine[name].shape != weight.shape and not _grows(name, mine, weight))
    }
    return [name for name in theirs.state_dict() if name.partition(".")[0] not in other]


_MIXER = "xpress_head.mix_l"


def _grows(name: str, mine: dict[str, Tensor], theirs: Tensor) -> bool:
    """Whether it is a refiner's mixer [r, b, b] that goes on in a wider block."""
    return name == _MIXER and mine[name].shape[0] == theirs.shape[0]


def _grown(name: str, mine: Tensor, theirs: Tensor) -> Tensor:
    """A kept weight; of a mixer for another block size the part for slots that both have.

    The mixer is causal: what fresh slots add at its end, zero here, changes nothing in the old ones.
    """
    if mine.shape == theirs.shape:
        return theirs
    assert name == _MIXER
    grown, b = torch.zeros_like(mine), min(mine.shape[-1], theirs.shape[-1])
    grown[:, :b, :b] = theirs[:, :b, :b]
    return grown


def kept_vocabulary(config: TrainConfig, shape: DFlashConfig) -> Tensor | None:
    """The draft vocabulary [V'] of an earlier drafter that stays, or whose refiner goes on."""
    if not config.init_from or (config.refiner is None and not config.heads_only):
        return None
    _, theirs, d2t = load_dflash(config.init_from)
    if config.heads_only:
        return None if d2t is None else draft_to_target(d2t)
    assert config.refiner is not None
    head = f"{config.refiner.kind}_head."
    if d2t is None or not any(name.startswith(head) for name in kept_names(theirs, shape)):
        return None
    return draft_to_target(d2t)


def _start_refiners(module: DFlashModule, target: Any, generator: torch.Generator) -> None:
    """Previous tokens start as random projections of their target embeddings, of unit variance: words
    that are alike look alike, also those that training hardly sees. The last matrix starts at zero: a
    refiner begins silent, and words that a phase leaves out (`words`) get no bias meanwhile."""
    for kind, table in (("xpress_head", "token_embed"), ("markov_head", "markov_w1")):
        head: Any = dict(module.named_children()).get(kind)
        if head is None:
            continue
        head.readout.weight.zero_()
        seen: Any = head.get_submodule(table)
        words = embedding_table(target, torch.float32).cpu()
        if len(words) >= len(seen.weight):
            words = words[: len(seen.weight)] - words.mean(0)
            projection = torch.randn(words.shape[1], seen.weight.shape[1], generator=generator)
            mixed = words @ projection
            seen.weight.copy_(mixed / mixed.std())


def _gain(norm: Any) -> Tensor:
    """What an RMS norm multiplies by [D], in float32: not its weight in every family."""
    ones = torch.ones(norm.weight.shape, dtype=torch.float32, device=norm.weight.device)
    out: Tensor = norm(ones).float().cpu()
    return out


def _check_layer(layer: Any, number: int) -> None:
    """Raise ValueError for a target layer that a draft layer cannot begin as."""
    for name, known in _LAYER_PARTS.items():
        part = layer.get_submodule(name)
        found = {child for child, _ in part.named_children()}
        biased = any(weight.endswith(".bias") for weight, _ in part.named_parameters())
        if biased or found - known or known - found - {"q_norm", "k_norm", "rotary_emb", "act_fn"}:
            raise ValueError(
                f"init_layers: the target's layer {number} is not built like a draft layer; "
                "set init_layers=[] and layers=2 for a random start"
            )


def _copy_layer(
    mine: Any, theirs: Any, shape: DFlashConfig, taps: Sequence[int], source: int, sample: Tensor
) -> None:
    """Copy one target layer. Its input norm is folded into q, k and v, because the context does
    not pass through the drafter's input norm; q/k norms become the target's mean q/k magnitude."""
    gain = _gain(theirs.input_layernorm)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(mine.self_attn, name).weight.copy_(
            getattr(theirs.self_attn, name).weight.cpu() * gain
        )
    mine.self_attn.o_proj.weight.copy_(theirs.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mine.mlp, name).weight.copy_(getattr(theirs.mlp, name).weight)
    mine.post_attention_layernorm.weight.copy_(_gain(theirs.post_attention_layernorm))
    near = _feeding(taps, source)
    states = sample[:, near * shape.hidden_size : (near + 1) * shape.hidden_size]
    states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + shape.rms_norm_eps)
    for norm, name in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        projected = states @ getattr(mine.self_attn, name).weight.T
        size = projected.view(len(states), -1, shape.head_dim).square().mean(-1).sqrt().mean()
        getattr(mine.self_attn, norm).weight.fill_(float(size))
    if shape.split_kv:
        mine.self_attn.k_proj_target.weight.copy_(mine.self_attn.k_proj.weight)
        mine.self_attn.v_proj_target.weight.copy_(mine.self_attn.v_proj.weight)


def _feeding(taps: Sequence[int], source: int) -> int:
    """Which tap is, or is nearest to, the input of a target layer."""
    return min(range(len(taps)), key=lambda j: abs(taps[j] + 1 - source))


def _level(module: DFlashModule, rms_F: Tensor) -> None:
    """Let a context of random weights see all tapped dimensions at the same magnitude: a few would
    otherwise drown the others."""
    shape = module.config
    if not shape.layerwise_fusion:
        module.fc.weight.div_(rms_F)
        return
    rms_TD = rms_F.view(len(shape.target_layer_ids), -1)
    if shape.tap_norm:
        module.tap_norm.weight.copy_(rms_TD.square().mean(1, keepdim=True).sqrt() / rms_TD)
    else:  # the norm behind the mixtures is shared: it levels their mean
        mixed_D = rms_TD.square().mean(0).sqrt()
        module.hidden_norm.weight.copy_(mixed_D.square().mean().sqrt() / mixed_D)


def _start_fc(
    module: DFlashModule, config: TrainConfig, rms: Tensor, generator: torch.Generator
) -> None:
    """Identity on the tap that feeds the last copied layer, small noise on the others."""
    width = module.config.hidden_size
    near = _feeding(config.taps, config.init_layers[-1])
    block = slice(near * width, (near + 1) * width)
    level = float(rms[block].median())
    noise = torch.randn(module.fc.weight.shape, generator=generator)
    module.fc.weight.copy_(0.1 * level * noise / rms / module.fc.weight.shape[1] ** 0.5)
    module.fc.weight[:, block] = torch.eye(width)
