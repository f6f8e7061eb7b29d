"""Given conversations become token rows: one per assistant turn, as it would have been served.

Knows nothing about models; the replies are those of the file, not the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.data.formats import Conversation, Problems, RowError
from paceline.data.rows import RowFile, conversation_key, row_key
from paceline.data.template import Template


def tokenise(
    conversations: Iterable[Conversation],
    template: Template,
    out: RowFile,
    problems: Problems,
    *,
    max_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, int]:
    """Append one row per assistant turn, at most ``max_tokens`` ids each. Returns counts.

    A turn without a supervised token within the limit is counted and left out. ``temperature`` of
    such rows is 1: they are nobody's greedy text.
    """
    counts = {"rows": 0, "tokens": 0, "supervised": 0, "cut": 0, "repeated": 0}
    for conversation in conversations:
        try:
            replies = template.replies(conversation)
        except RowError as error:
            problems.add(conversation.place, error)
            continue
        for found in replies:
            try:
                if isinstance(found, RowError):
                    raise found
                reply = found.cut(max_tokens)
            except RowError as error:
                problems.add(conversation.place, error)
                continue
            key = row_key(prompt=reply.prompt_ids, reply=reply.response_ids)
            if key in out:
                counts["repeated"] += 1
                continue
            out.append(
                {
                    "source": conversation.source,
                    "prompt": conversation.question,
                    "temperature": 1.0,
                    "prompt_ids": reply.prompt_ids,
                    "response_ids": reply.response_ids,
                    "finish": "stop" if reply.ended else "length",
                    "key": key,
                    "conversation": conversation_key(conversation),
                }
            )
            counts["rows"] += 1
            counts["tokens"] += len(reply.prompt_ids) + len(reply.response_ids)
            counts["supervised"] += len(reply.response_ids)
            counts["cut"] += len(reply.response_ids) < len(found.response_ids)
            progress(len(reply.prompt_ids) + len(reply.response_ids))
    return counts
