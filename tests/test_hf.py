"""`model.generate(custom_generate=...)` gives the ids of plain generate, for padded batches.

Does not test drafters.
"""

from __future__ import annotations

import pytest
import torch

import paceline
from tiny import tiny_model


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def test_a_left_padded_batch_equals_plain_generate() -> None:
    model = tiny_model("llama")
    inputs = padded([[3, 4, 5], [9, 9, 1, 9, 9, 1, 9]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, custom_generate=paceline.custom_generate("ngram"))
    assert torch.equal(got, want)


def test_sampling_follows_torchs_seed_and_beams_are_refused() -> None:
    model, decode = tiny_model("llama"), paceline.custom_generate("ngram")
    inputs = padded([[3, 4, 5]])
    options = {"max_new_tokens": 8, "pad_token_id": 0, "custom_generate": decode}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(**inputs, do_sample=True, temperature=1.5, **options).tolist())
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match="beams"):
        model.generate(**inputs, num_beams=2, do_sample=False, **options)
