"""The target writes the user's turns itself, when there are no prompts to answer.

Knows nothing about replies; the texts are prompts like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from paceline.core import Row, SamplingParams
from paceline.data.formats import RowError
from paceline.data.loops import loop_start
from paceline.data.rows import RowFile, row_key
from paceline.data.template import Template
from paceline.pipeline import Pipeline

_SENTINEL = "PACELINEUSERTURN"
MIN_CHARACTERS = 12
MIN_WORDS = 3


def user_prefix(template: Template) -> tuple[list[int], frozenset[int], str]:
    """The ids that stand before a user's text, and what ends it: special ids, or a text.

    Found in the template's own rendering of a user turn, cut at its text.

    Raises:
        ValueError: the template does not show the user's text.
    """
    try:
        whole = template.text([{"role": "user", "content": _SENTINEL}])
    except RowError as error:
        raise ValueError(f"cannot write user turns with this chat template: {error}") from error
    before, found, after = whole.partition(_SENTINEL)
    if not found or not before:
        raise ValueError("the chat template does not show where a user's text begins")
    special = next((i for i in template.ids(after) if i in template.ends), None)
    ends = frozenset() if special is None else frozenset({special})
    return template.ids(before), ends, "" if ends else after.strip()


def write_prompts(
    pipeline: Pipeline,
    template: Template,
    count: int,
    *,
    known: set[str],
    dropped: Counter[str],
    first_seed: int = 0,
    max_new_tokens: int = 256,
    batch_size: int = 8,
) -> Iterator[tuple[int, str]]:
    """Seed and text of up to ``count`` new user turns, drawn at temperature 1, top-p 0.95.

    Empty, short, endless, garbled, looping and ``known`` texts are dropped and counted in ``dropped``;
    ``known`` holds ``fold`` of the texts and grows. Stops early after 8 tries per wanted text.
    """
    prefix, ends, text_end = user_prefix(template)
    session = pipeline.session(batch_size)
    seeds = iter(range(first_seed, first_seed + 8 * count + 8))
    kept = 0
    while kept < count:
        while session.free and (seed := next(seeds, None)) is not None:
            params = SamplingParams(
                max_tokens=max_new_tokens,
                temperature=1.0,
                top_p=0.95,
                seed=seed,
                stop_token_ids=tuple(sorted(ends)),
                stop=(text_end,) if text_end else (),
            )
            (row,) = pipeline.rows([prefix], params)
            session.add(row)
        if not session.rows:
            return
        for row, _ in session.step():
            if row.finish_reason is None or kept >= count:
                continue
            text = _text(row, pipeline.target.tokenizer)
            if why := _useless(row, text, known):
                dropped[why] += 1
                continue
            known.add(fold(text))
            kept += 1
            assert row.params.seed is not None
            yield row.params.seed, text


def fill(
    pipeline: Pipeline,
    template: Template,
    out: RowFile,
    count: int,
    *,
    dropped: Counter[str],
    max_new_tokens: int = 256,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Append prompts (``prompt``, ``source``, ``seed``) until ``out`` holds ``count``; how many.

    Seeds go on behind the last one in the file, so that a further run draws other texts.
    """
    held = [out.row(key) for key in out.keys()]
    texts = write_prompts(
        pipeline,
        template,
        count - len(held),
        known={fold(row["prompt"]) for row in held},
        dropped=dropped,
        first_seed=max((row["seed"] + 1 for row in held), default=0),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    for seed, text in texts:
        key = row_key(prompt=fold(text))
        out.append({"prompt": text, "source": "self-written", "seed": seed, "key": key})
        progress(len(template.ids(text)))
    return len(out) - len(held)


def fold(text: str) -> str:
    """Texts that fold alike are the same prompt."""
    return " ".join(text.casefold().split())


def _text(row: Row, tokenizer: Any) -> str:
    if row.text is not None and isinstance(row.stop_reason, str):
        row.text.finish()
        return str(row.text.text).strip()
    return str(tokenizer.decode(row.output, skip_special_tokens=True)).strip()


def _useless(row: Row, text: str, known: set[str]) -> str | None:
    """Why a text is no prompt, or None."""
    if not text:
        return "empty"
    if row.finish_reason != "stop":
        return "endless"
    if len(text) < MIN_CHARACTERS or len(text.split()) < MIN_WORDS:
        return "short"
    if "\ufffd" in text:
        return "garbled"
    if loop_start(row.output) < len(row.output):
        return "looping"
    return "repeated" if fold(text) in known else None
