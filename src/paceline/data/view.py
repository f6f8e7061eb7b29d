"""Looks at files before something is done with them: counts, plans, rows to show.

Knows nothing about terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paceline.data.estimate import Estimate, estimate
from paceline.data.formats import Conversation, Problems, RowError, raw_rows, read_conversations
from paceline.data.regenerate import Walk
from paceline.data.rows import is_row, read_rows
from paceline.data.template import Template

_SAMPLE = 32  # prompts kept to measure speed with


def shape_counts(
    conversations: Iterable[Conversation], template: Template | None, problems: Problems
) -> dict[str, int]:
    """How many conversations there are and what they hold; with a template, rows they would give.

    A conversation without replies gives none before the target has answered it.
    """
    counts = dict.fromkeys(
        ("usable", "with_replies", "multi_turn", "with_system", "with_tools", "replies"), 0
    )
    if template is not None:
        counts["rows"] = 0
    for conversation in conversations:
        roles = [message["role"] for message in conversation.messages]
        replies = roles.count("assistant")
        counts["usable"] += 1
        counts["with_replies"] += replies > 0
        counts["multi_turn"] += roles.count("user") > 1
        counts["with_system"] += "system" in roles
        counts["with_tools"] += conversation.tools is not None or "tool" in roles
        counts["replies"] += replies
        if template is not None:
            found = _rows(conversation, template, problems)
            counts["rows"] += sum(1 for row in found if row["response_ids"])
    return counts


def is_row_file(path: str) -> bool:
    """Whether the first line of a file is a token row."""
    return any(is_row(row) for _, row in _first(raw_rows(path)))


def open_rows(
    path: str, template: Template, problems: Problems
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and row of a row file, or of conversations as they would become rows."""
    if is_row_file(path):
        for place, row in read_rows(path):
            yield place, {"finish": "?", **row}
        return
    for conversation in read_conversations(path, problems):
        for row in _rows(conversation, template, problems):
            yield conversation.place, row


def _rows(
    conversation: Conversation, template: Template, problems: Problems
) -> Iterator[dict[str, Any]]:
    """The rows of one conversation; one without replies is a prompt and has none."""
    if all(message["role"] != "assistant" for message in conversation.messages):
        try:
            ids = template.prompt(conversation.messages, conversation.tools)
        except RowError as error:
            problems.add(conversation.place, error)
        else:
            yield {"prompt_ids": ids, "response_ids": [], "finish": "not answered yet"}
        return
    for found in template.replies(conversation):
        if isinstance(found, RowError):
            problems.add(conversation.place, found)
        else:
            yield {
                "prompt_ids": found.prompt_ids,
                "response_ids": found.response_ids,
                "finish": "stop" if found.ended else "length",
            }


def plan(
    path: str,
    template: Template,
    limit: int | None,
    max_new_tokens: int,
    taps: int,
    hidden_size: int,
) -> tuple[Estimate, list[list[int]]]:
    """What rows hold, or what answering conversations would make; and prompts to measure with.

    A conversation counts with a reply of ``max_new_tokens`` for every question it asks. Malformed
    rows are left out silently; the run that follows reports them.
    """
    sample: list[list[int]] = []

    def lengths() -> Iterator[tuple[int, int]]:
        for prompt, before, reply in _lengths(path, template, limit, max_new_tokens):
            if len(sample) < _SAMPLE:
                sample.append(prompt)
            yield len(prompt) + before, reply

    total = estimate(lengths(), taps=taps, hidden_size=hidden_size)
    if not total.rows:
        raise ValueError(f"{path}: no usable row; `paceline data check` says why")
    return total, sample


def _lengths(
    path: str, template: Template, limit: int | None, max_new_tokens: int
) -> Iterator[tuple[list[int], int, int]]:
    """Prompt ids, tokens of replies that will stand in the prompt, tokens of the reply."""
    if is_row_file(path):
        for _, row in read_rows(path):
            yield row["prompt_ids"], 0, len(row["response_ids"])
        return
    for conversation in read_conversations(path, Problems(), limit):
        walk, own = Walk(conversation), 0
        while messages := walk.question():
            try:
                yield template.prompt(messages, conversation.tools), own, max_new_tokens
            except RowError:
                break
            before = len(walk.history)
            walk.answered({"role": "assistant", "content": "."})
            own += 0 if walk.history[before].get("tool_calls") else max_new_tokens


def _first(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for found in rows:
        yield found
        return
