"""Prompts whose answers copy: edits of code and summaries that quote, made of a corpus's own replies.

Does not ask the target; `paceline data regenerate` does. One kind asks for a small edit of code, the
other for a text again or for its most important sentences. Maths is left out: a small model answers
with the result.

    python benchmarks/copy_prompts.py --data replies.jsonl --out copy-prompts.jsonl --limit 300
    paceline data regenerate copy-prompts.jsonl --out copy.jsonl --drafter ngram --max-new-tokens 320
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from paceline.train.capture import load_tokenizer

CODE = (
    "Rename the variable or function `{name}` to `renamed` and return the whole code, otherwise "
    "unchanged:\n\n```python\n{text}\n```",
    "Add one comment line at the top of this code and return the whole code, otherwise unchanged:\n\n"
    "```python\n{text}\n```",
)
QUOTE = (
    "Rewrite the following text without changing any word:\n\n{text}",
    "Summarize the following text by quoting its most important sentences:\n\n{text}",
)
SHORTEST, LONGEST = 200, 900  # characters of a text to copy


def prompt_of(reply: str, number: int) -> tuple[str, str] | None:
    """A kind and a prompt made of one reply; None if it is too short or too long for one."""
    if code := re.search(r"```(?:python)?\n(.*?)```", reply, re.DOTALL):
        text, kinds, kind = code[1].strip(), CODE, "copy-code"
    else:
        text, kinds, kind = reply.strip(), QUOTE, "copy-text"
    if not SHORTEST <= len(text) <= LONGEST or (kind == "copy-text" and "```" in text):
        return None
    name = re.search(r"(?:def|for) (\w+)", text) or re.search(r"\b([a-z_]{3,})\b", text)
    asked = kinds[number % len(kinds)].format(text=text, name=name[1] if name else "x")
    return kind, asked


def main() -> None:
    """Parse the options, write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="token rows; their replies are copied"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--limit", type=int, default=300, help="prompts of each kind")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.target)
    rows: list[dict[str, Any]] = [json.loads(line) for line in options.data.open()]
    found: dict[str, list[str]] = {"copy-code": [], "copy-text": []}
    for row in rows:
        if "gsm8k" in row.get("source", ""):
            continue
        reply = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        made = prompt_of(reply, len(found["copy-code"]) + len(found["copy-text"]))
        if made is not None and len(found[made[0]]) < options.limit:
            found[made[0]].append(made[1])
    lines = [
        json.dumps({"source": kind, "messages": [{"role": "user", "content": text}]}) + "\n"
        for kind, texts in found.items()
        for text in texts
    ]
    options.out.write_text("".join(lines))
    print(", ".join(f"{len(texts)} {kind}" for kind, texts in found.items()))


if __name__ == "__main__":
    main()
