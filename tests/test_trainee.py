"""The frozen head in training: its rows for a draft vocabulary and for a phase's most frequent words.

Does not know steps or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.train.blocks import every, make_blocks
from paceline.train.config import Phase, TrainConfig
from paceline.train.corpus import Row
from paceline.train.features import FeatureRow
from paceline.train.fit import train_step
from paceline.train.sources import CorpusSource
from paceline.train.trainee import Trainee, make_trainee
from tiny import tiny_model

# Token t occurs 40 - t times in the replies: the first words are the most frequent.
REPLY = [t for t in range(40) for _ in range(40 - t)]


def row() -> FeatureRow:
    tokens = np.random.default_rng(0).permutation(REPLY).astype(np.int32)
    features = torch.randn(len(tokens) + 1, 64).bfloat16().view(torch.uint16).numpy()
    text = Row(
        tokens=np.append(np.int32(90), tokens), start=1, source="", temperature=0.0, held_out=False
    )
    return FeatureRow(text, features)


def config_with(words: int | None, draft_vocab_size: int | None) -> TrainConfig:
    return TrainConfig(
        target="-",
        data=("-",),
        run_dir="-",
        taps=(1,),
        layers=1,
        phases=(Phase(share=1.0, block_size=8, anchors_per_row=9, words=words),),
        mask_token_id=16,
        draft_vocab_size=draft_vocab_size,
        compute="fp32",
        steps=4,
    )


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model("llama", hidden_size=64, num_hidden_layers=3)


def made(target: Any, words: int | None, draft_vocab_size: int | None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    config, rows = config_with(words, draft_vocab_size), [row()]
    trainee = make_trainee(config, target, rows, torch.float32)
    source = CorpusSource(config, rows, trainee.shape.max_position_embeddings)
    return config, trainee, source


@pytest.mark.parametrize("draft_vocab_size", [None, 25])
def test_a_phase_sees_the_heads_rows_of_its_words_and_no_other_label(
    target: Any, draft_vocab_size: int | None
) -> None:
    trainee: Trainee = made(target, 10, draft_vocab_size)[1]
    blocks = make_blocks(
        [row().row],
        anchors=len(REPLY),
        block_size=8,
        choose=every,
        limit=trainee.shape.vocab_size * 99,
    )
    weight = target.get_output_embeddings().weight
    for words, size in ((10, 10), (None, draft_vocab_size or 97), (90, draft_vocab_size or 90)):
        head, labels = trainee.head_of(words), trainee.head_of(words).labels(blocks)
        assert len(head.rows_VD) == size
        inside = (blocks.labels_RAk >= 0) & (blocks.labels_RAk < size)
        assert torch.equal(labels >= 0, inside)
        assert torch.equal(head.rows_VD[labels[inside]], weight[blocks.labels_RAk[inside]])
    assert trainee.head_of(None) is trainee.head
    assert trainee.head_of(10) is trainee.head_of(10), "made once, not once a step"


def test_as_many_words_as_there_are_change_nothing_and_fewer_do(target: Any) -> None:
    found = {}
    for words in (None, 25, 10):
        config, trainee, source = made(target, words, 25)
        found[words] = train_step(config, trainee, source, 0)
        assert trainee.shape.draft_vocab_size == 25 and trainee.d2t is not None
        assert len(trainee.d2t) == 25, "what is exported does not depend on the phase"
    assert found[None] == found[25]
    assert found[10]["positions"] < found[25]["positions"]
    assert found[10]["loss"] < found[25]["loss"], "fewer words to tell apart"
