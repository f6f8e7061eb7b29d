"""`model.generate(custom_generate=...)` gives the ids of plain generate, for padded batches.

Does not test drafters.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import paceline
from paceline import hf
from tiny import tiny_model

PROMPTS = [[3, 4, 5], [9, 9, 58, 9, 9, 58, 9]]


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(inputs: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What generate returns, and what it returns with our decoding function."""
    model = tiny_model("llama")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    want = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, custom_generate=paceline.custom_generate("ngram"))
    return want, got


def test_a_left_padded_batch_equals_plain_generate() -> None:
    want, got = both(padded(PROMPTS))
    assert torch.equal(got, want)


def allowed(batch: int, ids: torch.Tensor) -> list[int]:
    """Other tokens for every row, by its length, too; a foreign row's ids are noticed."""
    assert ids[-1] >= 0 and ids[: len(PROMPTS[1])].tolist() in padded(PROMPTS)["input_ids"].tolist()
    assert ids[: len(PROMPTS[1])].tolist() == padded(PROMPTS)["input_ids"][batch].tolist()
    return list(range(10 + 20 * batch + len(ids) % 3, 30 + 20 * batch))


def eos_at_once(**options: Any) -> dict[str, Any]:
    """EOS ids so many that a reply ends early unless an option forbids it."""
    return {"eos_token_id": list(range(1, 97, 2)), **options}


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"encoder_repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        eos_at_once(min_new_tokens=6),
        eos_at_once(min_length=11),
        {"begin_suppress_tokens": list(range(0, 97, 2))},
        {"forced_eos_token_id": 7, "eos_token_id": 7},
        {"prefix_allowed_tokens_fn": allowed},
        {"bad_words_ids": [[i] for i in range(0, 90, 2)], "eos_token_id": 1},
        {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": [1, 2, 3, 4, 6]},
        {"max_length": 11, "max_new_tokens": None},
    ],
    ids=lambda options: next(name for name in options if name != "eos_token_id"),
)
def test_processors_of_a_padded_batch_act_as_in_plain_generate(options: dict[str, Any]) -> None:
    inputs = padded(PROMPTS)
    want, got = both(inputs, **options)
    assert torch.equal(got, want)
    without = {name: options[name] for name in ("eos_token_id",) if name in options}
    assert want.tolist() != both(inputs, **without)[0].tolist(), "the option must matter"


class RowBias:
    """A user's processor with something per row, that writes into the scores it is given."""

    def __init__(self) -> None:
        self.bias_BV = torch.randn(2, 97, generator=torch.Generator().manual_seed(0)) * 10

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(ids) == len(scores) == 2
        scores += self.bias_BV
        return scores


def test_a_users_processor_sees_its_row_at_its_place() -> None:
    want, got = both(padded(PROMPTS), logits_processor=LogitsProcessorList([RowBias()]))
    assert torch.equal(got, want)


def test_several_samples_of_a_prompt_ask_about_the_prompts_index() -> None:
    options = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed}
    _, got = both(padded(PROMPTS), **options)
    assert [10 <= row[-1] < 30 for row in got.tolist()] == [True, True, False, False]


def test_the_first_of_several_eos_ids_pads() -> None:
    options = {"eos_token_id": [96, *range(0, 50)], "pad_token_id": None}
    want, got = both(padded(PROMPTS), **options)
    assert torch.equal(got, want) and 96 in want[:, len(PROMPTS[1]) :]


def test_sampling_follows_torchs_seed() -> None:
    model, decode = tiny_model("llama"), paceline.custom_generate("ngram")
    inputs = padded([[3, 4, 5]])
    options = {"max_new_tokens": 8, "pad_token_id": 0, "custom_generate": decode}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(**inputs, do_sample=True, temperature=1.5, **options).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beams"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate"),
        ({"max_time": 1.0}, "MaxTimeCriteria"),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode = paceline.custom_generate("ngram")
        options = {"max_new_tokens": 4, "pad_token_id": 0, "custom_generate": decode} | options
        tiny_model("llama").generate(**padded([[3, 4, 5]]), **options)


def test_embeddings_are_refused() -> None:
    model = tiny_model("llama")
    embeds = model.get_input_embeddings()(torch.tensor([[3, 4, 5]]))
    with pytest.raises(ValueError, match="inputs_embeds"):
        decode = paceline.custom_generate("ngram")
        model.generate(inputs_embeds=embeds, max_new_tokens=4, custom_generate=decode)


class Listed(BaseStreamer):
    """Writes down what a streamer is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_a_streamer_is_given_what_plain_generate_gives_it() -> None:
    model, seen = tiny_model("llama"), []
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for more in ({}, {"custom_generate": paceline.custom_generate("ngram")}):
        streamer = Listed()
        model.generate(**padded(PROMPTS[1:]), **options, **more, streamer=streamer)
        seen.append(streamer.seen)
    assert seen[0] == seen[1] and seen[1][-1] == "end"
    with pytest.raises(ValueError, match="streamer"):
        model.generate(**padded(PROMPTS), **options, **more, streamer=Listed())


def test_train_mode_comes_back_module_by_module() -> None:
    model = tiny_model("llama", attention_dropout=0.5).train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    decode = paceline.custom_generate("ngram")
    got = [model.generate(**padded(PROMPTS), **options, custom_generate=decode) for _ in range(2)]
    assert [module.training for module in model.modules()] == before
    want = model.eval().generate(**padded(PROMPTS), **options)
    assert torch.equal(got[0], want) and torch.equal(got[1], want)


def generate_inline(model: Any, *drafter: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(
        **padded(PROMPTS),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        custom_generate=paceline.custom_generate(*drafter),
    )
    return out


@pytest.mark.parametrize("drafter", [(), ("default",), ("ngram",), (None,), ("none",)], ids=str)
def test_it_takes_the_drafters_of_load(drafter: tuple[Any, ...]) -> None:
    model = tiny_model("llama")
    want = model.generate(**padded(PROMPTS), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(generate_inline(model, *drafter), want)


def counted(made: list[Any], what: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: made.append(args) or what(*args, **kwargs)


def test_a_model_is_probed_once_and_freed_with_its_pipelines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(hf, "Target", counted(made, hf.Target))
    model = tiny_model("llama")
    for _ in range(2):
        generate_inline(model, "ngram")
        generate_inline(model, None)
    assert len(made) == 2
    generate_inline(model.double(), None)  # other weights, another drafter
    assert len(made) == 3
    made.clear()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(generate_inline(other, None), generate_inline(model, None))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
