"""Incremental text: pieces that never split a character, and stop strings across pieces.

Knows nothing about models or rounds; it sees token ids of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Turns a growing reply into text; the joined pieces equal decoding the whole reply.

    Each push decodes a short window only, so its cost does not grow with the reply.
    """

    _WINDOW = 6

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, list(stops)
        self._ids: list[int] = []
        self._base = 0  # ids before it lie outside the window
        self._shown = 0  # ids up to here are in ``text``
        self.text = ""
        self._emitted = 0
        self.stopped: str | None = None
        self._may_stop = True

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add one id; returns the stop string it completed, if any (``text`` is then cut).

        Without ``may_stop`` (min_tokens not reached) stop strings in the new text are ignored.
        """
        self._may_stop = may_stop
        self._ids.append(token)
        before = self._decode(self._ids[self._base : self._shown])
        now = self._decode(self._ids[self._base :])
        if now.endswith("\ufffd") or not now.startswith(before):
            return None  # inside a character: wait for the rest of it
        self._append(now[len(before) :])
        self._base, self._shown = max(self._base, self._shown - self._WINDOW), len(self._ids)
        return self.stopped

    def take(self) -> str:
        """Text that is certain by now and was not taken yet; holds back a possible stop string."""
        end = len(self.text)
        if self.stopped is None:
            held = 0
            for stop in self._stops:
                for length in range(min(len(stop) - 1, end), held, -1):
                    if self.text.endswith(stop[:length]):
                        held = length
                        break
            end -= held
        piece = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def finish(self) -> str:
        """Flush what was held back; returns the last piece."""
        if self.stopped is None and self._shown < len(self._ids):
            before = self._decode(self._ids[self._base : self._shown])
            self._append(self._decode(self._ids[self._base :])[len(before) :])
            self._shown = len(self._ids)
        piece = self.text[self._emitted :]
        self._emitted = len(self.text)
        return piece

    def _append(self, new: str) -> None:
        start = len(self.text)
        self.text += new
        found = []
        for stop in self._stops if self._may_stop else ():
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if found:
            at, self.stopped = min(found)
            self.text = self.text[:at]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
