"""Drafters walked along the target's own greedy replies: shared by benchmarks that do not decode.

Does not time anything. At temperature 0 what a drafter gets accepted is a function of the target's own
reply, so drafters of any taps, heads and block are walked along the same text (near ties of bf16 aside;
tails that loop are cut).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.dflash import read_config
from paceline.recipes.smollm2 import shape_of, smollm2_continued
from paceline.train.capture import load_frozen, load_tokenizer
from paceline.train.config import LengthHead, Phase, TrainConfig
from paceline.train.earlier import as_it_stands
from paceline.train.features import FeatureRow
from paceline.train.fit import feature_rows, read_rows
from paceline.train.logs import RunLog
from paceline.train.served import runs_of
from paceline.train.trainee import make_trainee


class Walker:
    """Rows of token files, their features in ``out`` by taps, and the target."""

    def __init__(self, data: list[str], out: Path) -> None:
        self.data, self.out = tuple(data), out
        out.mkdir(parents=True, exist_ok=True)
        self._rows: dict[tuple[int, ...], list[FeatureRow]] = {}

    @cached_property
    def target(self) -> Any:
        """The frozen target."""
        return load_frozen("smollm2", torch.bfloat16)

    def config(self, folder: str) -> TrainConfig:
        """A run that would leave this drafter exactly as it is."""
        theirs = read_config(folder)
        block = theirs.block_size
        config = smollm2_continued(self.data, str(self.out)).replace(
            **shape_of(folder),
            block_size=block,
            phases=(Phase(share=1.0, block_size=block, anchors_per_row=1),),
            length_head=LengthHead(alone=True),
            features_dir=str(self.out / "-".join(map(str, ("taps", *theirs.target_layer_ids)))),
        )
        return as_it_stands(config)

    def rows(self, config: TrainConfig) -> list[FeatureRow]:
        """The greedy rows with features of the config's taps; captured once."""
        if config.taps not in self._rows:
            log = RunLog(self.out, first=True, say=print, progress=lambda *_: None)
            found = feature_rows(config, self.target, read_rows(config), log)
            self._rows[config.taps] = [item for item in found if item.row.greedy]
        return self._rows[config.taps]

    def runs(self, folder: str, block: int) -> Iterator[tuple[FeatureRow, list[int]]]:
        """Each row with the leading right drafts at all its reply tokens but the last."""
        config = self.config(folder)
        rows, tokenizer = self.rows(config), load_tokenizer(config.target)
        trainee = make_trainee(config, self.target, rows, torch.bfloat16, tokenizer=tokenizer)
        yield from runs_of(trainee, rows, block)
