"""What can be wrong with a drafter's tensors: names, shapes, values, vocabulary maps, borrowed rows.

Reads one tensor at a time, in pieces; loads no model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.drafters.dflash import DFlashConfig, DFlashModule
from paceline.evaluate.doctor_facts import DrafterFacts, Finding, TargetFacts, error, warning

Findings = Iterator[Finding]
_MAPS = {"d2t", "t2d"}
_BORROWED = {"lm_head.weight", "embed_tokens.weight"}
# Heads and parts of relatives that are read by somebody; their insides are not known here.
_HEADS = (
    "markov_head.", "xpress_head.", "thresh_head_two_model.", "confidence_head.", "prefix_gru.",
    "embed_proj.", "candidate_selector.", "mask_embedding", "mask_hidden",
)  # fmt: skip
_SAMPLE = 64  # rows compared with the target's
_FLAT = 1e-12


def layer_shapes(drafter: DrafterFacts, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one decoder layer whose projections read ``inputs`` columns."""
    get = drafter.layer.get
    width, inner = int(get("hidden_size") or 0), int(get("intermediate_size") or 0)
    heads = int(get("num_attention_heads") or 1)
    keys, size = int(get("num_key_value_heads") or heads), int(get("head_dim") or width // heads)
    return {
        f"{prefix}input_layernorm.weight": (width,),
        f"{prefix}post_attention_layernorm.weight": (width,),
        f"{prefix}self_attn.q_proj.weight": (heads * size, inputs),
        f"{prefix}self_attn.k_proj.weight": (keys * size, inputs),
        f"{prefix}self_attn.v_proj.weight": (keys * size, inputs),
        f"{prefix}self_attn.o_proj.weight": (width, heads * size),
        f"{prefix}mlp.gate_proj.weight": (inner, width),
        f"{prefix}mlp.up_proj.weight": (inner, width),
        f"{prefix}mlp.down_proj.weight": (width, inner),
    }


def wanted_shapes(drafter: DrafterFacts) -> dict[str, tuple[int, ...]] | None:
    """Every tensor that the config asks for; None for a whole model (PARD), whose loader checks it."""
    if drafter.family == "pard":
        return None
    width = drafter.hidden_size or 0
    if drafter.family == "eagle3":
        prefix = (
            "layers.0." if any(n.startswith("layers.0.") for n in drafter.tensors) else "midlayer."
        )
        source = drafter.number("target_hidden_size") or width
        words = drafter.draft_vocab_size or 0
        return layer_shapes(drafter, prefix, 2 * width) | {
            f"{prefix}hidden_norm.weight": (width,),
            "fc.weight": (width, 3 * source),
            "norm.weight": (width,),
            "lm_head.weight": (words, width),
        }
    if drafter.format != "speculators":
        try:
            config = DFlashConfig.from_dict(drafter.raw)
        except (ValueError, TypeError):
            config = None  # another check names the key, or `check_refusal`
        if config is not None:
            with torch.device("meta"):
                state = DFlashModule(config).state_dict()
            return {name: tuple(weight.shape) for name, weight in state.items()}
    taps = drafter.get("target_layer_ids", "aux_hidden_state_layer_ids")
    taps = taps if isinstance(taps, list) else []
    source = drafter.number("target_hidden_size") or width
    found = {"norm.weight": (width,), "hidden_norm.weight": (width,)}
    shapes: dict[str, tuple[int, ...]] = found | {"fc.weight": (width, len(taps) * source)}
    size = int(drafter.layer.get("head_dim") or 0)
    for i in range(int(drafter.layer.get("num_hidden_layers") or 0)):
        shapes |= layer_shapes(drafter, f"layers.{i}.", width)
        if size:
            for norm in ("q_norm", "k_norm"):
                shapes[f"layers.{i}.self_attn.{norm}.weight"] = (size,)
    return shapes


def check_names(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Missing tensors (a lenient loader makes them random), unknown ones, other shapes."""
    wanted = wanted_shapes(drafter)
    if wanted is None:
        tied = drafter.layer.get("tie_word_embeddings")
        if not tied and not any(n.endswith("lm_head.weight") for n in drafter.tensors):
            yield error(
                "tensor-missing", "lm_head.weight", "is missing and not tied", "export it again"
            )
        return
    for name, shape in wanted.items():
        stored = drafter.tensors.get(name)
        if stored is None:
            yield error(
                "tensor-missing",
                name,
                "is missing: a lenient loader would leave it random",
                "export the drafter again; was it renamed?",
            )
        elif stored.shape != shape:
            yield error(
                "tensor-shape",
                name,
                f"is {list(stored.shape)}, the config asks for {list(shape)}",
                "config and weights are of different drafters, or one was edited",
            )
    optional = _MAPS | _BORROWED
    for name in sorted(drafter.tensors.keys() - wanted.keys() - optional):
        if not name.startswith(_HEADS) and "rotary_emb" not in name:
            yield error(
                "tensor-unknown", name, "is no part of what the config describes", "export it again"
            )


def check_values(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """NaN and infinity, constant tensors, and weights that no training touched."""
    spreads: list[float] = []
    norms_at_one = True
    for name, stored in sorted(drafter.tensors.items()):
        if name in _MAPS or stored.dtype[0] in "IUB" and stored.dtype != "BF16":
            continue
        low, high, total, squares, count, bad = float("inf"), -float("inf"), 0.0, 0.0, 0, False
        for part in drafter.weights.chunks(name):
            if not part.numel():
                continue
            bad = bad or not bool(part.isfinite().all())
            low, high = min(low, float(part.min())), max(high, float(part.max()))
            total, squares = total + float(part.sum()), squares + float(part.square().sum())
            count += part.numel()
        if bad:
            yield error(
                "tensor-nan",
                name,
                "holds NaN or infinity",
                "take an earlier checkpoint of the training",
            )
            continue
        if len(stored.shape) == 1 and name.endswith("norm.weight"):
            norms_at_one = norms_at_one and low == high == 1.0
        silent = name.startswith(_HEADS) or name.endswith("bias") or name in _BORROWED
        if len(stored.shape) >= 2 and count and not silent:
            mean = total / count
            spread = max(0.0, squares / count - mean * mean) ** 0.5
            spreads.append(spread)
            if spread < _FLAT:
                yield error(
                    "tensor-constant",
                    name,
                    f"is {low:g} everywhere",
                    "it was never loaded or never trained: export again",
                )
    if spreads and norms_at_one and max(spreads) < 1.25 * min(spreads):
        yield error(
            "untrained",
            "*.safetensors",
            f"every norm is 1 and every matrix spreads by {spreads[0]:.3f}: initial values",
            "this is no trained drafter: export the checkpoint of the training",
        )


def check_maps(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """d2t holds offsets: target id of draft token i is i + d2t[i]; t2d marks those ids."""
    reduced, full = drafter.number("draft_vocab_size"), drafter.vocab_size
    has = _MAPS & drafter.tensors.keys()
    if reduced is None or reduced == full:
        if "d2t" in has and bool(drafter.weights.value("d2t").any()):
            yield error(
                "d2t-without-size",
                "d2t",
                "maps words, but draft_vocab_size is the whole vocabulary",
                "write draft_vocab_size, or leave d2t out",
            )
        return
    if "d2t" not in has:
        yield error(
            "d2t-missing",
            "d2t",
            f"draft_vocab_size is {reduced}, but nothing says which words they are",
            "export it again with d2t",
        )
        return
    d2t = drafter.weights.value("d2t").to(torch.int64)
    if len(d2t) != reduced:
        yield error("d2t-length", "d2t", f"has {len(d2t)} of {reduced} words", "export it again")
        return
    ids = torch.arange(len(d2t)) + d2t
    ascending = bool((d2t[1:] > d2t[:-1]).all()) and len(d2t.unique()) == len(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(ids.unique()) < len(ids):
        absolute = ascending and 0 <= int(d2t.min()) and int(d2t.max()) < target.vocab_size
        yield error(
            "d2t-absolute" if absolute else "d2t-out-of-range",
            "d2t",
            "holds target ids, not offsets" if absolute else "leads outside, or twice to one word",
            "store target id minus draft id",
        )
        return
    yield from _marks(drafter, ids)


def _marks(drafter: DrafterFacts, ids: Tensor) -> Findings:
    if "t2d" in drafter.tensors:
        mask = torch.zeros(drafter.weights.tensors["t2d"].shape[0], dtype=torch.bool)
        mask[ids[ids < len(mask)]] = True
        if not torch.equal(drafter.weights.value("t2d").bool(), mask):
            yield error(
                "t2d-disagrees", "t2d", "marks other words than d2t", "derive it from d2t: old map?"
            )
    if not bool(drafter.weights.value("d2t").any()):
        yield warning(
            "d2t-identity",
            "d2t",
            "is zero everywhere: the drafter would propose the first ids only",
            "right only if the vocabulary was cut at its end; else the map was lost",
        )


def check_borrowed(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """A stored head or embedding that should be the target's: sampled rows are compared."""
    if drafter.family != "dflash":
        return
    for name, theirs in (
        ("embed_tokens.weight", target.embedding),
        ("lm_head.weight", target.head),
    ):
        if name not in drafter.tensors or theirs is None:
            continue
        count = drafter.tensors[name].shape[0]
        rows = torch.linspace(0, count - 1, min(_SAMPLE, count)).long()
        mine, ids = drafter.weights.rows(name, rows.tolist()), rows
        if name == "lm_head.weight" and "d2t" in drafter.tensors:
            d2t = drafter.weights.value("d2t").to(torch.int64)
            ids = rows + d2t[rows.clamp_max(len(d2t) - 1)]
        if int(ids.max()) >= target.vocab_size or int(ids.min()) < 0:
            continue  # the map is found to be wrong
        own = target.weights.rows(theirs, ids.tolist())
        if mine.shape != own.shape or not torch.allclose(mine, own, rtol=0.02, atol=1e-3):
            yield error(
                "borrowed-differs",
                name,
                "is not the target's; engines that load it draft with it, others replace it",
                "leave it out, or store the target's rows (paceline export does)",
            )


def check_mask_row(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """The mask's row of the target's embedding, beside others."""
    mask = drafter.mask_id
    if drafter.family != "dflash" or target.embedding is None or mask is None:
        return
    if not 0 <= mask < target.vocab_size:
        return
    rows = torch.linspace(0, target.vocab_size - 1, _SAMPLE).long().tolist()
    sizes = target.weights.rows(target.embedding, [mask, *rows]).norm(dim=1)
    usual = float(sizes[1:].median())
    if not bool(sizes[0].isfinite()) or float(sizes[0]) < 0.01 * usual:
        yield warning(
            "mask-row-degenerate",
            "mask_token_id",
            f"row {mask} of the target's embedding has norm {float(sizes[0]):.2g}, others {usual:.2g}",
            "a zero row says nothing: train with another unused token",
        )


TENSOR_CHECKS = (
    check_names,
    check_values,
    check_maps,
    check_borrowed,
    check_mask_row,
)
