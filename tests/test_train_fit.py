"""A whole tiny run: corpus, capture, training, stop and resume, export; and the corpus rules.

Does not know real models: the target is a random Llama of five layers.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.dflash import draft_to_target, load_dflash
from paceline.train.config import Phase, TrainConfig, parse_settings
from paceline.train.corpus import draft_vocabulary, is_held_out, loop_start, read_corpus
from paceline.train.fit import fit, learning_rate
from tiny import tiny_model


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("train")
    model = tiny_model("llama", num_hidden_layers=5)
    model.save_pretrained(folder / "target")
    rng = random.Random(0)
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as stream:
        for i in range(40):
            row = {"source": "test", "prompt": str(i), "temperature": 0.0}
            row |= {"prompt_ids": [rng.randrange(97) for _ in range(5)]}
            row |= {"response_ids": [rng.randrange(97) for _ in range(rng.randint(6, 30))]}
            stream.write(json.dumps(row) + "\n")
    return TrainConfig(
        target=str(folder / "target"),
        data=(str(folder / "corpus.jsonl.gz"),),
        run_dir=str(folder / "run"),
        taps=(0, 2, 3),
        init_layers=(1, 3),
        phases=(
            Phase(share=0.5, block_size=2, anchors_per_row=4),
            Phase(share=0.5, block_size=4, anchors_per_row=2),
        ),
        mask_token_id=16,
        draft_vocab_size=60,
        block_size=4,
        rows_per_step=2,
        steps=8,
        held_out_share=0.2,
        rows_per_shard=8,
        eval_every=4,
    )


def silent(_: str) -> None:
    pass


def finish(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    fit(config.replace(run_dir=str(folder)), log=silent)
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["step"] == config.steps
    return dict(state["masters"])


def test_a_resumed_run_is_identical(
    setup: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finish(setup, tmp_path / "whole")
    import paceline.train.fit as module

    real, calls = module.train_step, 0

    def break_off(*args: Any) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "train_step", break_off)
    with pytest.raises(KeyboardInterrupt):
        finish(setup.replace(checkpoint_seconds=0.0), tmp_path / "resumed")
    monkeypatch.setattr(module, "train_step", real)
    resumed = finish(setup, tmp_path / "resumed")
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    config, _, d2t = load_dflash(tmp_path / "resumed" / "drafter")
    assert d2t is not None and config.draft_vocab_size == 60 == len(draft_to_target(d2t))
    text = (tmp_path / "resumed" / "drafter" / "provenance.json").read_text()
    assert str(tmp_path) not in text and "/" not in json.loads(text)["settings"]["data"][0]


def test_loops_are_cut_at_the_second_copy() -> None:
    text = list(range(20)) + [70, 71, 72, 73, 74, 75, 76, 77, 78] * 6
    assert loop_start(text) == 20 + 9
    assert loop_start(list(range(300))) == 300
    apart = [5] * 8 + list(range(10, 200))
    assert loop_start(apart * 4) == len(apart) * 4  # repeats, but not within the window


def test_held_out_rows_depend_on_the_prompt_only() -> None:
    chosen = [is_held_out([i, i + 1], 0.2) for i in range(2000)]
    assert 300 < sum(chosen) < 500
    assert chosen == [is_held_out([i, i + 1], 0.2) for i in range(2000)]


def test_draft_vocabulary_takes_frequent_tokens_then_extra_then_ids() -> None:
    counts, extra = np.zeros(10, np.int64), np.zeros(10, np.int64)
    counts[[7, 3]] = 5, 9
    extra[8] = 2
    assert draft_vocabulary(counts, 4, extra).tolist() == [0, 3, 7, 8]


def test_bad_corpora_are_named(tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_tokens": 64, "min_reply": 1, "held_out_share": 0.0}
    with pytest.raises(ValueError, match=r"absent\.jsonl"):
        read_corpus([tmp_path / "absent.jsonl"], **how)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt_ids": [1]}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1.*response_ids"):
        read_corpus([bad], **how)
    bad.write_text("{\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: not JSON"):
        read_corpus([bad], **how)


def test_settings_are_checked(setup: TrainConfig) -> None:
    assert setup.replace(**parse_settings(["steps=20", "lr=1e-3"])).steps == 20
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        setup.replace(gama=2)
    with pytest.raises(ValueError, match="sum to 1"):
        setup.replace(phases=setup.phases[:1])
    rates = [learning_rate(setup.replace(steps=100), step) for step in range(100)]
    assert max(rates) == setup.lr and rates[-1] < 0.01 * setup.lr and rates[0] < setup.lr
