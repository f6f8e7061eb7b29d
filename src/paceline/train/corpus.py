"""Reads prompt-and-reply token rows, cuts looping tails and splits off held-out prompts.

Does not know models, features or losses: a row is token ids and where its reply starts.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.fingerprint import check_fingerprint, read_meta
from paceline.data.loops import loop_start
from paceline.data.source import fingerprint_now

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training text: `tokens` [S] is prompt then reply; the reply starts at `start`."""

    tokens: Ints
    start: int
    source: str
    temperature: float
    held_out: bool

    @property
    def reply(self) -> Ints:
        return self.tokens[self.start :]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus file: its rows in the order of a run, and how many it could not use, by reason."""

    path: str
    rows: list[Row]
    left_out: Counter[str]


def is_held_out(key: str | Sequence[int], share: float) -> bool:
    """Whether a row belongs to the held-out split; decided by its conversation's key, or its prompt's
    token ids if it has none: the rows of a conversation hold one another's text."""
    text = key.encode() if isinstance(key, str) else np.asarray(key, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2.0**64 < share


def check_corpus(paths: Sequence[str | Path], target: str) -> None:
    """Refuse rows that were written for another target, tokenizer or chat template.

    ``target`` is a folder, hub id, GGUF file or ``smollm2``; its model is not loaded. A file without
    a sidecar (written by other means) says nothing and is accepted.

    Raises:
        ValueError: a stale file, or one that holds prompts without replies; names it and the fix.
    """
    known = {path: meta for path in paths if (meta := read_meta(path)) is not None}
    for path, meta in known.items():
        if meta.get("kind") == "self-write":
            raise ValueError(
                f"{path} holds prompts without replies; answer them first: "
                f"paceline data regenerate {path} --out rows.jsonl"
            )
    if known:
        now = fingerprint_now(target)
        for path in known:
            check_fingerprint(path, now)


def read_corpus(
    paths: Sequence[str | Path],
    *,
    max_tokens: int,
    min_reply: int,
    held_out_share: float,
    left_out: Counter[str] | None = None,
) -> list[Row]:
    """All rows of the files, in file order: loops cut, long rows cut at `max_tokens`.

    Rows without `min_reply` tokens to train on are counted in `left_out` by reason. Raises
    ValueError naming file and line of a row whose `prompt_ids` or `response_ids` are missing or no
    token ids.
    """
    rows, left_out = [], Counter() if left_out is None else left_out
    for path in paths:
        for number, record in _records(Path(path)):
            try:
                prompt, reply = (_ids(record, key) for key in ("prompt_ids", "response_ids"))
                temperature = float(record.get("temperature", 0.0))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            reply = reply[: loop_start(reply)]
            room = max(0, max_tokens - len(prompt))
            if min(room, len(reply)) < min_reply:
                long = room < min_reply
                left_out[f"prompt over {max_tokens} tokens" if long else "reply too short"] += 1
                continue
            reply = reply[:room]
            rows.append(
                Row(
                    tokens=np.asarray(prompt + reply, dtype=np.int32),
                    start=len(prompt),
                    source=str(record.get("source", "")),
                    temperature=temperature,
                    held_out=is_held_out(record.get("conversation", prompt), held_out_share),
                )
            )
    if not rows:
        if not paths:
            raise ValueError("name at least one corpus file (--data)")
        names, why = ", ".join(str(path) for path in paths), reasons(left_out)
        raise ValueError(f"no usable row in {names}" + (f": {why}" if why else ""))
    return rows


def _ids(record: Any, key: str) -> list[int]:
    if not isinstance(record, dict) or key not in record:
        raise ValueError(
            f"the row has no {key}; conversations become rows by `paceline data tokenize` or "
            "`paceline data regenerate`"
        )
    ids = record[key]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"{key} is not a list of token ids")
    return ids


def reasons(left_out: Counter[str]) -> str:
    """Counts of left-out rows in words; empty without any."""
    return ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such corpus file; name one with --data")
    opened: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file behind line {number} ({error})") from None
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise ValueError(f"{path}:{number}: not JSON ({error})") from None


def count_tokens(rows: Sequence[Row], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token id occurs in the training replies, [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        if not row.held_out:
            counts += np.bincount(row.reply, minlength=vocab_size)
    return counts


def draft_vocabulary(
    counts: npt.NDArray[np.int64], size: int, extra: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """The `size` target ids a reduced drafter may propose, ascending, [V'].

    Most frequent reply tokens first; ties and the rest are filled by `extra` counts (text of the
    kind expected at serving time), then by id.
    """
    fill = np.zeros_like(counts) if extra is None else extra
    order = np.lexsort((np.arange(len(counts)), -fill, -counts))
    return np.sort(order[:size]).astype(np.int64)


def fingerprint(rows: Sequence[Row], *, supervision: bool = False) -> str:
    """A hash of the token ids of `rows`, in order; with `supervision` of all that training uses."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.tokens).to_bytes(4, "big"))
        digest.update(row.tokens.tobytes())
        if supervision:
            facts = (row.start, row.source, row.temperature, row.held_out)
            digest.update(json.dumps(facts).encode())
    return digest.hexdigest()[:16]
