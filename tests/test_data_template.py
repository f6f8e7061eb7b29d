"""Rows hold exactly what is served before a reply and what the model says, for every template kind.

Does not know real templates; those are tried with the embedded model elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from chat import CHATML, TAGGED, THINKING, byte_tokenizer
from paceline.data.formats import Conversation, RowError, parse_row
from paceline.data.template import Reply, Template

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "Six."},
    ]
}


def chat(row: Any = CHAT) -> Conversation:
    return parse_row(row, place="file:1", source="test")


def rows(template: str, row: Any = CHAT, **arguments: Any) -> list[tuple[str, str, bool]]:
    """Prompt text, reply text and whether it ended, per reply."""
    made = Template(tokenizer=byte_tokenizer(template), arguments=arguments)
    out = []
    for reply in made.replies(chat(row)):
        assert isinstance(reply, Reply), reply
        out.append((made.decode(reply.prompt_ids), made.decode(reply.response_ids), reply.ended))
    return out


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])
def test_every_reply_is_a_row_with_its_end_of_turn_and_nothing_behind_it(template: str) -> None:
    first, second = rows(template)
    assert first[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert first[1:] == ("Four.<|im_end|>", True)
    assert second[0] == first[0] + (
        "Four.<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second[1:] == ("Six.<|im_end|>", True)


@pytest.mark.parametrize("template", [CHATML, TAGGED, THINKING])
def test_the_prompt_of_a_row_is_what_is_served(template: str) -> None:
    made = Template(tokenizer=byte_tokenizer(template))
    found = made.replies(chat())
    for reply, turn in zip(found, (2, 4), strict=True):
        assert isinstance(reply, Reply)
        assert reply.prompt_ids == made.prompt(chat().messages[:turn])


def test_tags_around_header_and_reply_do_not_supervise_the_header() -> None:
    wide = CHATML.replace(
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n",
        "{% if m['role'] == 'assistant' %}{% generation %}<|im_start|>assistant\n"
        "{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}",
    )
    assert [row[1] for row in rows(wide)] == ["Four.<|im_end|>", "Six.<|im_end|>"]


THOUGHT = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "Easy."},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "Six.", "reasoning_content": "Also easy."},
    ]
}


def test_a_template_that_strips_thinking_from_history_is_rendered_turn_by_turn() -> None:
    first, second = rows(THINKING, THOUGHT)
    assert first[1] == "<think>\nEasy.\n</think>\n\nFour.<|im_end|>"
    assert second[1] == "<think>\nAlso easy.\n</think>\n\nSix.<|im_end|>"
    assert "Easy." not in second[0] and "Four.<|im_end|>" in second[0]


def test_an_empty_thinking_block_of_the_question_is_prompt() -> None:
    first, second = rows(THINKING, CHAT, enable_thinking=False)
    assert first[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert [first[1], second[1]] == ["Four.<|im_end|>", "Six.<|im_end|>"]


def test_a_question_that_no_reply_continues_is_an_error_with_the_fix() -> None:
    made = Template(tokenizer=byte_tokenizer(THINKING), arguments={"enable_thinking": False})
    first, _ = made.replies(chat(THOUGHT))
    assert isinstance(first, RowError) and first.reason == "prompt-mismatch"
    assert "--template-arg" in str(first)


def test_tags_do_not_excuse_a_reply_behind_another_header_than_it_is_asked_with() -> None:
    ask = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made = Template(tokenizer=byte_tokenizer(TAGGED.replace(ask, ask.replace("ant\n", "ant\n<t>"))))
    (found, _) = made.replies(chat())
    assert isinstance(found, RowError) and found.reason == "prompt-mismatch"


def test_tools_and_calls_are_rendered() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    row = {
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    first, second = rows(THINKING, row)
    assert first[0].startswith("<|im_start|>system\nTools: [") and '"add"' in first[0]
    assert '<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>' in first[1]
    assert "<|im_start|>tool\n2<|im_end|>" in second[0]


def test_a_token_across_the_border_does_not_move_it() -> None:
    made = Template(tokenizer=byte_tokenizer())
    row = {"prompt": "Hi", "response": "\nHello."}  # "assistant\n" + "\n" is one token if joined
    (reply,) = made.replies(chat(row))
    assert isinstance(reply, Reply)
    assert reply.prompt_ids == made.prompt(chat(row).messages[:1])
    assert made.decode(reply.response_ids) == "\nHello.<|im_end|>"


@pytest.mark.parametrize(
    "template, reason",
    [
        # Nothing of the reply is shown, with and without tags.
        (CHATML.replace("{{ m['content'] }}<|im_end|>\n", ""), "mask-all-zeros"),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
            "{% endfor %}",
            "mask-all-zeros",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}"
            "<|im_end|>{% endfor %}",
            "mask-all-zeros",
        ),
        (
            "{% generation %}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
            "{% endgeneration %}{% if add_generation_prompt %}:{% endif %}",
            "mask-all-ones",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>"
            "{% endif %}{% endfor %}",
            "mask-all-ones",
        ),
        ("{{ raise_exception('no such roles') }}", "template-refused"),
        ("{{ messages[0].content.nothing.at_all }}", "template-refused"),
    ],
)
def test_a_mask_of_all_zeros_or_ones_and_a_refusal_are_errors(template: str, reason: str) -> None:
    made = Template(tokenizer=byte_tokenizer(template))
    (found,) = made.replies(chat({"prompt": "Hi", "response": "Hello."}))
    assert isinstance(found, RowError)
    assert found.reason == reason


def test_a_tokenizer_without_a_template_is_a_users_mistake() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Template(tokenizer=byte_tokenizer(None))


def test_a_conversation_without_a_reply_has_no_row() -> None:
    with pytest.raises(RowError, match="no-reply"):
        rows(CHATML, {"prompt": "Hi"})


def test_a_reply_cut_short_has_no_end_of_turn() -> None:
    made = Template(tokenizer=byte_tokenizer())
    before, message = chat().messages[:2], {"role": "assistant", "content": "Fo"}
    reply = made.reply(before, message, ended=False)
    assert made.decode(reply.response_ids) == "Fo" and not reply.ended


def test_thinking_cut_short_has_no_close_that_was_not_said() -> None:
    made = Template(tokenizer=byte_tokenizer(THINKING))
    before = [{"role": "user", "content": "Hi"}]
    message = {"role": "assistant", "content": "", "reasoning_content": "half a tho"}
    reply = made.reply(before, message, ended=False)
    assert made.decode(reply.response_ids) == "<think>\nhalf a tho"
    message["content"] = "Well, "  # templates may strip what comes last
    reply = made.reply(before, message, ended=False)
    assert made.decode(reply.response_ids) == "<think>\nhalf a tho\n</think>\n\nWell,"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(RowError, match="bad-tool-call"):
        made.reply(before, message | {"tool_calls": [call]}, ended=False)


def test_tags_that_leave_a_part_of_the_reply_out_do_not_move_the_prompt() -> None:
    template = CHATML.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' %}<think>TH</think>"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}",
    )
    made = Template(tokenizer=byte_tokenizer(template))
    before = [{"role": "user", "content": "Hi"}]
    reply = made.reply(before, {"role": "assistant", "content": "Ho"})
    assert reply.prompt_ids == made.prompt(before)
    assert made.decode(reply.response_ids) == "<think>TH</think>Ho<|im_end|>"


def test_a_template_for_tools_by_itself_is_read_for_its_own_tags() -> None:
    made = Template(tokenizer=byte_tokenizer({"default": TAGGED, "tool_use": CHATML}))
    before, tools = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {}}]
    message = {"role": "assistant", "content": "Ho"}
    assert made.reply(before, message, tools) == made.reply(before, message)


def test_a_template_that_fails_in_any_way_refuses_the_row() -> None:
    made = Template(tokenizer=byte_tokenizer("{{ 1 // (messages | length - 1) }}"))
    with pytest.raises(RowError, match="template-refused"):
        made.prompt([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "prompt, response, kept, ended",
    [
        (10, 19, 19, True),  # max - 1
        (10, 20, 20, True),  # max
        (10, 21, 20, False),  # max + 1
        (10, 290, 20, False),  # 10 x
        (29, 5, 1, False),  # one supervised token is left
    ],
)
def test_long_rows_are_cut_at_the_limit(prompt: int, response: int, kept: int, ended: bool) -> None:
    whole = Reply(prompt_ids=[1] * prompt, response_ids=list(range(response)), ended=True)
    short = whole.cut(30)
    assert (short.response_ids, short.ended) == (list(range(kept)), ended)
    assert short.prompt_ids == whole.prompt_ids


@pytest.mark.parametrize("prompt", [30, 31, 300])
def test_a_row_without_a_supervised_token_in_the_limit_is_dropped(prompt: int) -> None:
    with pytest.raises(RowError, match="too-long"):
        Reply(prompt_ids=[1] * prompt, response_ids=[2, 3], ended=True).cut(30)


def test_a_token_that_the_model_lacks_is_not_servable() -> None:
    made = Template(tokenizer=byte_tokenizer(), vocab_size=257)
    with pytest.raises(RowError, match="not-servable: token 258, the model has 257"):
        made.prompt([{"role": "user", "content": "Hi"}])
