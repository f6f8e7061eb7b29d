"""A conversation as a target is asked it: token ids, or why it cannot be asked.

Does not know methods, clocks or figures.
"""

from __future__ import annotations

from typing import Any

from paceline.data.formats import Message, RowError
from paceline.data.template import Template
from paceline.evaluate.tasks import Question
from paceline.pipeline import Pipeline


def encode(pipeline: Pipeline, messages: list[Message], tools: Any = None) -> list[int]:
    """Ids of a conversation by the target's chat template; without one a single text as it is.

    Raises RowError if the template refuses, or is missing where there is more than one text.
    """
    tokenizer = pipeline.target.tokenizer
    if tokenizer is None:
        raise ValueError("this target has no tokenizer; a bench needs one")
    if tokenizer.chat_template:
        return Template(tokenizer=tokenizer).prompt(messages, tools)
    if len(messages) > 1 or tools:
        raise RowError("no-chat-template", "the target has no chat template for a conversation")
    return pipeline.encode(str(messages[0]["content"]))


def refusal(pipeline: Pipeline, question: Question, max_new_tokens: int) -> str | None:
    """Why this target cannot be asked this question in full, in a word; None if it can."""
    talk: list[Message] = []
    for turn in question.turns:
        talk += [*turn, {"role": "assistant", "content": "-"}]  # stands for the reply
    try:
        size = len(encode(pipeline, talk[:-1], question.tools))
    except RowError as error:
        return error.reason
    room = pipeline.target.max_length - len(question.turns) * max_new_tokens
    return None if size <= room else "too-long"
