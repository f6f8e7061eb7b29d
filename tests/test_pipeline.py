"""The pipeline takes prompts in every usual form and names the request it cannot serve.

Does not test generation itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core import SamplingParams
from paceline.pipeline import Pipeline
from tiny import tiny_target

PARAMS = SamplingParams(max_tokens=3)


class Tokenizer:
    """One id per character."""

    chat_template = "{{ messages }}"
    eos_token_id = None

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [1] + [ord(c) % 97 for message in messages for c in message["content"]]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "x" * len(ids)


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return Pipeline(target=tiny_target())


@pytest.fixture(scope="module")
def chatty() -> Pipeline:
    target = tiny_target()
    target.tokenizer = Tokenizer()
    return Pipeline(target=target)


IDS = [[3, 4, 5], [6, 7, 8]]
FORMS = [
    IDS,
    (tuple(IDS[0]), tuple(IDS[1])),
    np.array(IDS),
    torch.tensor(IDS),
    [np.array(IDS[0]), torch.tensor(IDS[1])],
    [list(np.array(IDS[0])), list(torch.tensor(IDS[1]))],
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_ids_come_in_every_form(pipeline: Pipeline, form: Any) -> None:
    want = [output.outputs[0].token_ids for output in pipeline.generate(IDS, PARAMS)]
    outputs = pipeline.generate(form, PARAMS)
    assert [output.prompt_token_ids for output in outputs] == IDS
    assert [output.outputs[0].token_ids for output in outputs] == want
    assert all(type(token) is int for output in outputs for token in output.prompt_token_ids)
    (one,) = pipeline.generate(form[0], PARAMS)
    assert one.prompt_token_ids == IDS[0]


def test_an_array_of_one_id_is_a_prompt_and_not_an_id(pipeline: Pipeline) -> None:
    outputs = pipeline.generate([torch.tensor([3]), np.array([4])], PARAMS)
    assert [output.prompt_token_ids for output in outputs] == [[3], [4]]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([3, 97], {}, "the prompt names token 97"),
        ([3, -1], {}, "the prompt names token -1"),
        ([3, 4.0], {}, "neither text nor token ids nor messages"),
        ([3] * 128, {}, "128 tokens"),
        ([3], {"stop_token_ids": [97]}, "stop_token_ids names token 97"),
        ([3], {"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
        ([3], {"logit_bias": {97: 1.0}}, "logit_bias names token 97"),
        ([3], {"stop": "x"}, "tokenizer"),
        ("text", {}, "no tokenizer"),
    ],
)
def test_the_request_is_named(
    pipeline: Pipeline, prompt: Any, params: dict[str, Any], message: str
) -> None:
    prompts, many = [[3], prompt], [PARAMS, SamplingParams(max_tokens=3, **params)]
    for serve in (pipeline.check, pipeline.rows, pipeline.generate):
        with pytest.raises(ValueError, match=f"^request 1: .*{message}"):
            serve(prompts, many)


@pytest.mark.parametrize("content", ["", None])
def test_empty_text_and_messages_are_an_empty_prompt(chatty: Pipeline, content: Any) -> None:
    empty = {"role": "user", "content": content}
    for prompt in ([empty], [{"role": "system", "content": ""}, empty], content or ""):
        with pytest.raises(ValueError, match="^request 0: the prompt is empty"):
            chatty.check([prompt], PARAMS)
    chatty.check([[{"role": "system", "content": "be brief"}, {**empty, "content": ""}]], PARAMS)


def test_check_looks_at_all_requests_and_generates_nothing(pipeline: Pipeline) -> None:
    prompts: list[Any] = [[3]] * 20 + [[999]]
    with pytest.raises(ValueError, match="request 20"):
        pipeline.check(prompts, PARAMS)
    pipeline.check(prompts[:20], PARAMS)
    with pytest.raises(ValueError, match="2 prompts but 1"):
        pipeline.check([[3], [4]], [PARAMS])


def test_eos_ids_that_the_head_lacks_are_dropped() -> None:
    target = tiny_target(eos_token_id=[5, 97, 10**6])
    (row,) = Pipeline(target=target).rows([[3]], PARAMS)
    assert row.stop_ids == {5}
    params = SamplingParams(max_tokens=3, min_tokens=2)
    assert len(Pipeline(target=target).generate([3], params)[0].outputs[0].token_ids) >= 2
