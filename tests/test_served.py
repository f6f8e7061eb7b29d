"""The served-acceptance estimate: its walk by hand, and against decoding with the shipped drafter.

Does not measure speed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline
from paceline.api import packaged_drafters
from paceline.data.prompts import DEMO_PROMPTS
from paceline.drafters.dflash import draft_to_target, load_dflash, read_config
from paceline.evaluate.metrics import acceptance
from paceline.recipes.smollm2 import smollm2_dflash_longer
from paceline.train.capture import Taps, capture
from paceline.train.corpus import Row
from paceline.train.features import FeatureRow
from paceline.train.served import Served, served_estimate, walk
from paceline.train.trainee import Head, Trainee, make_trainee, row_of


@pytest.mark.parametrize(
    ("runs", "rounds"),
    [
        ([], 0),
        ([0], 1),
        ([0, 0, 0], 3),
        ([2, 9, 9, 0], 2),  # commits 3, then the last one; what lies between is not visited
        ([3, 0, 0, 0], 1),  # three right drafts and the bonus token
        ([7, 0, 0], 1),  # the reply ends inside the run
        ([1, 5, 0, 0, 1], 4),
    ],
)
def test_walk_visits_the_rounds_of_decoding(runs: list[int], rounds: int) -> None:
    assert walk(runs) == Served(committed_tokens=len(runs), verify_rounds=rounds)


def test_figures_add_up_and_nothing_gives_one() -> None:
    total = walk([1, 5, 0, 0, 1]) + walk([3, 0, 0, 0])
    assert total.acceptance_length == 9 / 5
    assert Served().acceptance_length == 1.0


def shipped(target: object, rows: list[FeatureRow]) -> Trainee:
    """The packaged drafter as a trainee, with the draft vocabulary it has."""
    folder = packaged_drafters()["smollm2-dflash"]
    shape = read_config(folder)
    config = smollm2_dflash_longer(("text",)).replace(
        init_from=str(folder), draft_vocab_size=shape.draft_vocab_size, compute="fp32"
    )
    trainee = make_trainee(config, target, rows, torch.float32)
    _, _, d2t = load_dflash(folder)
    assert d2t is not None
    trainee.vocabulary = draft_to_target(d2t)
    trainee.head = Head(
        target.get_output_embeddings().weight[trainee.vocabulary].contiguous(),
        row_of(trainee.vocabulary, shape.vocab_size),
        trainee.vocabulary,
    )
    return trainee


def test_the_estimate_is_what_decoding_with_the_shipped_drafter_accepts() -> None:
    """On the target's own greedy replies it must be the bench's acceptance length within 5 %; in
    float32, where no near tie falls differently, it is the very same count."""
    pipeline = paceline.load("smollm2", dtype="fp32")
    prompts = [text for _, text in DEMO_PROMPTS][:5]
    params = paceline.SamplingParams(max_tokens=48)
    outputs = pipeline.generate(prompts, params, batch_size=5)
    served = acceptance(output.outputs[0] for output in outputs)
    rows = []
    for output in outputs:
        reply = output.outputs[0].token_ids
        tokens = np.asarray([*output.prompt_token_ids, *reply], np.int32)
        start = len(tokens) - len(reply)
        rows.append(Row(tokens=tokens, start=start, source="", temperature=0.0, held_out=True))
    model = pipeline.target.model
    taps = Taps(model, read_config(packaged_drafters()["smollm2-dflash"]).target_layer_ids)
    found = []
    for row in rows:
        bits = capture(taps, [row.tokens], 512).view(torch.uint16).numpy()
        found.append(FeatureRow(row, bits))
    trainee = shipped(model, found)
    estimate = sum(served_estimate(trainee, found, 8, limit=64).values(), Served())
    assert estimate.committed_tokens == served.committed_tokens
    ratio = estimate.acceptance_length / served.acceptance_length_pooled
    assert served.verify_rounds > 60 and 0.95 < ratio < 1.05
    assert abs(estimate.verify_rounds - served.verify_rounds) <= 2  # features are kept in bf16
