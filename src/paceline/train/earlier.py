"""What a run takes over from an earlier drafter: whether it can go on with it, and what stays behind.

Does not know the target's weights or the training loop.
"""

from __future__ import annotations

from paceline.drafters.dflash import DFlashConfig, load_dflash, read_config
from paceline.train.config import Refiner, TrainConfig

_MUST_AGREE = (  # what the weights of an earlier drafter were trained with
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "vocab_size",
    "target_layer_ids",
    "mask_token_id",
    "causal",
    "layer_types",
    "sliding_window",
    "rms_norm_eps",
    "rope_theta",
    "layerwise_fusion",
    "split_kv",
    "tap_norm",
)


def check_start(config: TrainConfig, shape: DFlashConfig) -> None:
    """Raise ValueError for an ``init_from`` that is no drafter of this shape; reads its config only."""
    if not config.init_from:
        return
    theirs = read_config(config.init_from)
    for name in _MUST_AGREE:
        old, new = getattr(theirs, name), getattr(shape, name)
        if old != new:
            raise ValueError(f"{config.init_from} has {name} {old}, this run {new}")


def check_weights(config: TrainConfig) -> None:
    """Raise ValueError for an ``init_from`` whose weights are missing, damaged or not numbers."""
    if not config.init_from:
        return
    for name, weight in load_dflash(config.init_from)[1].named_parameters():
        if not bool(weight.isfinite().all()):
            raise ValueError(
                f"{config.init_from}: {name} holds NaN or infinity; take an earlier checkpoint"
            )


def left_behind(config: TrainConfig, shape: DFlashConfig) -> list[str]:
    """The heads of ``init_from`` that a run of this shape does not go on with; reads its config only."""
    if not config.init_from:
        return []
    theirs = read_config(config.init_from)
    sizes = {
        "markov head": "markov_rank",
        "xpress head": "xpress_rank",
        "length head": "thresh_head_bottleneck_dim",
    }
    had = {name: getattr(theirs, field) for name, field in sizes.items()}
    return [name for name, size in had.items() if size and size != getattr(shape, sizes[name])]


def as_it_stands(config: TrainConfig) -> TrainConfig:
    """For a length head alone: the settings with the words and the refiner of the drafter behind which
    it is trained.

    Raises ValueError for another block size or refiner than that drafter's.
    """
    if not config.heads_only:
        return config
    theirs = read_config(str(config.init_from))
    found = [
        Refiner(kind=kind, rank=rank, tv=0.0, free_sweeps=0, **more)
        for kind, rank, more in (
            ("markov", theirs.markov_rank, {}),
            (
                "xpress",
                theirs.xpress_rank,
                {"mlp_ratio": theirs.xpress_mlp_ratio, "passes": theirs.num_jacobi_passes},
            ),
        )
        if rank
    ]
    if len(found) > 1:
        raise ValueError(f"{config.init_from} has two refiners; a run has one")
    refiner = found[0] if found else None
    mine = config.refiner
    if mine is not None and (
        refiner is None or (mine.kind, mine.rank) != (refiner.kind, refiner.rank)
    ):
        has = "none" if refiner is None else f"{refiner.kind} of rank {refiner.rank}"
        raise ValueError(
            f"a length head alone leaves the refiner as it is, and {config.init_from} has {has}: "
            "leave refiner out"
        )
    if theirs.block_size != config.block_size:
        raise ValueError(
            f"{config.init_from} drafts blocks of {theirs.block_size}: set block_size and the "
            "block_size of every phase to that"
        )
    return config.replace(refiner=refiner, draft_vocab_size=theirs.draft_vocab_size)
