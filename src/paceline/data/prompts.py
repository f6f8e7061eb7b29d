"""Reads prompt files: JSON lines with `prompt`, `question`, `turns` or `messages`.

Knows nothing about models or templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

# Written for this project: a few kinds of text, so that the demo shows where drafting pays.
DEMO_PROMPTS: tuple[tuple[str, str], ...] = (
    ("maths", "A baker sells 14 loaves in the morning and twice as many in the afternoon. Each loaf "
     "costs $3. How much money does the baker earn in a day?"),
    ("maths", "A tank holds 240 litres. A pump empties 15 litres each minute. After 9 minutes, how "
     "many litres are left in the tank?"),
    ("code", "Write a Python function that returns the largest number in a list, without using max."),
    ("code", "Write a Python function `is_palindrome(text)` that checks whether a string reads the "
     "same backwards, and show how to call it."),
    ("facts", "Explain why the sky is blue, in a short paragraph."),
    ("list", "Give me five tips for learning a new language."),
    ("rewrite", "Rewrite this sentence in a polite tone: Send me the report now, I need it today."),
    ("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
)  # fmt: skip


def read_prompts(path: str | Path, limit: int | None = None) -> list[Messages]:
    """Conversations of a JSONL file; of several turns only the first user turn is asked.

    Raises ValueError naming file and line for a row that is broken or has none of the fields.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such prompt file")
    found: list[Messages] = []
    with file.open("rb") as stream:  # split at line feeds only: JSON text may hold U+2028
        for number, raw in enumerate(stream, start=1):
            if limit is not None and len(found) >= limit:
                break
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    found.append(_messages(json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: not JSON ({error})") from None
            except ValueError as error:  # also text that is not UTF-8
                raise ValueError(f"{file}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{file}: no prompt in it")
    return found


def _messages(row: Any) -> Messages:
    if not isinstance(row, dict):
        raise ValueError("the row is not an object")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, Sequence) or not messages:
            raise ValueError("messages is empty or no list")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise ValueError("a message lacks its text content")
        return [{"role": str(m.get("role", "user")), "content": m["content"]} for m in messages]
    text = row.get("prompt", row.get("question"))
    if text is None and isinstance(row.get("turns"), list) and row["turns"]:
        text = row["turns"][0]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the row has no text in prompt, question, turns or messages")
    return [{"role": "user", "content": text}]
