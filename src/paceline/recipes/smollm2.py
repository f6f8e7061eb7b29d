"""Training recipes for the embedded SmolLM2-135M-Instruct.

Does not know commands; each function returns the full frozen config.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.api import DEFAULT_DRAFTERS, WEIGHTS
from paceline.drafters.dflash import read_config
from paceline.train.config import LengthHead, Phase, Refiner, TrainConfig
from paceline.train.policy_config import OnPolicy


def smollm2_dflash(data: tuple[str, ...], run_dir: str = "runs/smollm2-dflash") -> TrainConfig:
    """The packaged drafter's first run: 2 layers from target layers 9 and 21, blocks of 8, 16k words.

    Blocks of 4 first: more first slots per second while nothing later can be learnt yet.
    """
    return TrainConfig(
        target="smollm2",
        data=data,
        run_dir=run_dir,
        taps=(1, 8, 14, 20, 27),
        init_layers=(9, 21),
        phases=(
            Phase(share=0.3, block_size=4, anchors_per_row=24),
            Phase(share=0.7, block_size=8, anchors_per_row=12),
        ),
        mask_token_id=16,
        draft_vocab_size=16384,
        steps=9000,
    )


def smollm2_dflash_longer(
    data: tuple[str, ...], run_dir: str = "runs/smollm2-dflash-longer"
) -> TrainConfig:
    """The packaged drafter's later runs: more words, and again short blocks and few words first.

    Half of a step is the head: with few words and short blocks the first slots are taught most often a
    second. Set ``init_from`` to the earlier drafter; without it the run starts at target layers.
    """
    return smollm2_dflash(data, run_dir).replace(
        phases=(
            Phase(share=0.55, block_size=4, anchors_per_row=32, words=8192),
            Phase(share=0.2, block_size=8, anchors_per_row=16, words=16384),
            Phase(share=0.25, block_size=8, anchors_per_row=16),
        ),
        draft_vocab_size=32768,
        rows_per_step=3,
        lr=1.5e-3,
        steps=14000,
    )


def smollm2_dflash_full_vocab(
    data: tuple[str, ...], init_from: str, run_dir: str = "runs/smollm2-dflash-full-vocab"
) -> TrainConfig:
    """A short continuation with the whole vocabulary, for engines without a reduced one."""
    return smollm2_dflash(data, run_dir).replace(
        draft_vocab_size=None,
        init_from=init_from,
        phases=(Phase(share=1.0, block_size=8, anchors_per_row=12),),
        lr=5e-4,
        steps=600,
    )


def smollm2_continued(
    data: tuple[str, ...], run_dir: str = "runs/smollm2-continued"
) -> TrainConfig:
    """Goes on with the packaged drafter: the yardstick for every stage that is trained behind it.

    Set ``init_from`` to continue another drafter.
    """
    return smollm2_dflash_longer(data, run_dir).replace(
        init_from=str(WEIGHTS / DEFAULT_DRAFTERS["smollm2"]),
        phases=(
            Phase(share=0.6, block_size=8, anchors_per_row=16, words=8192),
            Phase(share=0.4, block_size=8, anchors_per_row=16),
        ),
        lr=1e-3,
        steps=7000,
    )


def smollm2_xpress(data: tuple[str, ...], run_dir: str = "runs/smollm2-xpress") -> TrainConfig:
    """The packaged drafter with an xPress refiner, trained together on the continued run's budget."""
    return smollm2_continued(data, run_dir).replace(refiner=Refiner(kind="xpress"))


def smollm2_markov(data: tuple[str, ...], run_dir: str = "runs/smollm2-markov") -> TrainConfig:
    """The packaged drafter with a Markov head, on the same budget: the refiner's baseline."""
    refiner = Refiner(kind="markov", free_sweeps=0)
    return smollm2_continued(data, run_dir).replace(refiner=refiner)


def smollm2_dflare(data: tuple[str, ...], run_dir: str = "runs/smollm2-dflare") -> TrainConfig:
    """DFlare on `smollm2_dflash`'s budget: three layers, each with its own mixture of nine taps.

    Layers 9, 15 and 21 start as copies that are fed by the tap before them.
    """
    return smollm2_dflash(data, run_dir).replace(
        taps=(1, 4, 8, 11, 14, 17, 20, 24, 27),
        init_layers=(9, 15, 21),
        fusion="layerwise",
        split_kv=True,
    )


def shape_of(drafter: str) -> dict[str, Any]:
    """The settings with which a run goes on with a drafter folder as it is; not its block or heads."""
    theirs = read_config(drafter)
    return {
        "init_from": drafter,
        "init_layers": (),
        "layers": theirs.num_hidden_layers,
        "taps": theirs.target_layer_ids,
        "fusion": "layerwise" if theirs.layerwise_fusion else "fc",
        "split_kv": theirs.split_kv,
        "tap_norm": theirs.tap_norm,
        "mask_token_id": theirs.mask_token_id,
        "draft_vocab_size": theirs.draft_vocab_size,
    }


def smollm2_bloom(
    data: tuple[str, ...],
    run_dir: str = "runs/smollm2-bloom",
    *,
    init_from: str | None = None,
    block_size: int = 12,
) -> TrainConfig:
    """DBloom, arm A: widens the block of a trained drafter (--from, --block-size), nothing else.

    One flat step of weights, three for a fresh slot, no decay, a small learning rate. Goes on with a
    DFlash or DFlare drafter; a refiner head goes on only if ``refiner`` names it.
    """
    start = init_from or str(WEIGHTS / DEFAULT_DRAFTERS["smollm2"])
    theirs = read_config(start)
    if block_size <= theirs.block_size:
        raise ValueError(
            f"{start} drafts blocks of {theirs.block_size} already: --block-size must be more than that"
        )
    wide = Phase(
        share=1.0, block_size=block_size, anchors_per_row=12, widened_from=theirs.block_size
    )
    return smollm2_continued(data, run_dir).replace(
        **shape_of(start),
        block_size=block_size,
        phases=(wide,),
        lr=5e-4,
        steps=1400,
    )


def smollm2_bloom_continued(
    data: tuple[str, ...],
    run_dir: str = "runs/smollm2-bloom-continued",
    *,
    init_from: str | None = None,
    block_size: int = 12,
) -> TrainConfig:
    """DBloom, arm B: goes on at the old block first, on text that was rare, then widens as arm A.

    The first stage has twice the learning rate of the second, and the decay of any training.
    """
    wide = smollm2_bloom(data, run_dir, init_from=init_from, block_size=block_size)
    old = read_config(str(wide.init_from)).block_size
    return wide.replace(
        phases=(
            Phase(share=0.5, block_size=old, anchors_per_row=16, lr_share=2.0),
            dataclasses.replace(wide.phases[0], share=0.5),
        ),
        steps=2 * wide.steps,
    )


def smollm2_length_head(
    data: tuple[str, ...], run_dir: str = "runs/smollm2-length-head"
) -> TrainConfig:
    """AdaFlash's length head behind the packaged drafter, which stays as it is.

    Anchors anywhere in the reply, against the whole draft vocabulary: labels are what would be accepted.
    """
    return smollm2_continued(data, run_dir).replace(
        length_head=LengthHead(alone=True),
        phases=(Phase(share=1.0, block_size=8, anchors_per_row=32),),
        lr=2e-3,
        steps=1000,
    )


def smollm2_adaflash(data: tuple[str, ...], run_dir: str = "runs/smollm2-adaflash") -> TrainConfig:
    """The packaged drafter on its own rollouts by AdaFlash's mixture; needs a budget of time, not steps.

    Anchors drawn on what was just decoded; the published learning rate.
    """
    return smollm2_continued(data, run_dir).replace(
        loss="adaflash",
        on_policy=OnPolicy(),
        phases=(Phase(share=1.0, block_size=8, anchors_per_row=16),),
        lr=3e-4,
        steps=2000,
    )


def smollm2_draft_opd(
    data: tuple[str, ...], run_dir: str = "runs/smollm2-draft-opd"
) -> TrainConfig:
    """The packaged drafter replayed where it stood in its own rollouts, by Draft-OPD as published."""
    return smollm2_adaflash(data, run_dir).replace(
        loss="draft_opd",
        on_policy=OnPolicy(anchors="recorded"),
        phases=(Phase(share=1.0, block_size=8, anchors_per_row=64),),
    )
