"""Incremental text: pieces that never split a character, and stop strings across pieces.

Knows nothing about models or rounds; it sees token ids of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Turns a growing reply into text; the joined pieces equal decoding the whole reply.

    Each push decodes a short window of ids only, so its cost does not grow with the reply. Where a
    byte-fallback tokenizer turns a whole run of bytes into U+FFFD because its last character is
    broken, the characters that were shown already stay.
    """

    _WINDOW = 6
    _LONGEST_CHARACTER = 4  # bytes in UTF-8, so also ids

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, list(stops)
        self._ids: list[int] = []  # the window
        self._known = 0  # characters of the window that are in ``text``
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
        now = self._decode(self._ids)
        # U+FFFD at the end may be the first bytes of a character; what stands before is certain.
        certain = now.rstrip("\ufffd")
        self._append(certain[self._known :])
        self._known = max(self._known, len(certain))
        if len(self._ids) >= 2 * self._WINDOW and self.stopped is None:
            self._shorten(now, certain == now)
        return self.stopped

    def _shorten(self, now: str, whole: bool) -> None:
        """Drop old ids at a cut that reproduces the text's end; text without one gets a limit."""
        size = len(self._ids)
        first = size - self._WINDOW
        for cut in range(first, first - self._LONGEST_CHARACTER, -1) if whole else ():
            tail = self._decode(self._ids[cut:])
            if tail and "\ufffd" not in tail and self.text.endswith(tail):
                self._ids, self._known = self._ids[cut:], len(tail)
                return
        if size < (4 if whole else 8) * self._WINDOW:
            return
        self._append(now[self._known :])
        self._known = max(self._known, len(now))
        tail = self._decode(self._ids[first:])
        if tail:
            self._ids, self._known = self._ids[first:], len(tail)
        else:  # without text before it the next id would look like the reply's first
            del self._ids[first:]

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
        if self.stopped is None:
            now = self._decode(self._ids)
            self._append(now[self._known :])
            self._known = max(self._known, len(now))
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
