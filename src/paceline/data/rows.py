"""The file of token rows: appended line by line, resumed without repeats, never torn.

Knows nothing about where rows come from; what it was written for is in its sidecar.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.data.fingerprint import Fingerprint, check_fingerprint, read_meta, write_meta
from paceline.data.formats import Conversation, RowError, raw_rows


def row_key(**parts: Any) -> str:
    """A hash of everything that decides a row: prompt, tools, settings."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def conversation_key(conversation: Conversation) -> str:
    """The same for all rows of a conversation, so that training holds out all of them or none."""
    return row_key(opening=conversation.question)


class RowFile:
    """A JSONL file of rows with a ``key`` each, open for appending; a context manager.

    Opening drops a torn last line (a run was killed while writing) and learns the keys.
    ``repaired`` says whether there was one. ``facts`` go into the sidecar; all but ``target`` (the
    same model may have another path now) must be those that the file was begun with.

    Raises:
        ValueError: the file was written for another target or by another command, has no sidecar,
            or is not rows.
    """

    def __init__(
        self, path: str | Path, fingerprint: Fingerprint, facts: Mapping[str, Any]
    ) -> None:
        self.path = Path(path)
        if self.path.suffix == ".gz":
            raise ValueError(f"{path}: rows are appended as plain JSON lines; gzip the file later")
        self.repaired = False
        self._places: dict[str, int] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self.path.open("ab")
        try:
            self._begin(fingerprint, facts)
        except BaseException:
            self._stream.close()
            raise

    def _begin(self, fingerprint: Fingerprint, facts: Mapping[str, Any]) -> None:
        path = self.path
        try:  # the lock ends with the process, however that ends
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process writes there; name another file") from None
        if path.stat().st_size:
            if not check_fingerprint(self.path, fingerprint):
                raise ValueError(f"{path} does not say what it was written for; name a new file")
            self._check_facts(facts)
            self._read()
        else:
            write_meta(self.path, fingerprint, facts)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(self._places)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and flush it. Its key must be new."""
        assert row["key"] not in self._places, "a row is written once"
        self._places[row["key"]] = self._stream.seek(0, 2)
        self._stream.write(json.dumps(row).encode() + b"\n")
        self._stream.flush()

    def row(self, key: str) -> dict[str, Any]:
        """The row of a key that is in the file."""
        with self.path.open("rb") as stream:
            stream.seek(self._places[key])
            found: dict[str, Any] = json.loads(stream.readline())
        return found

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        began = read_meta(self.path) or {}
        for name, value in facts.items():
            if name != "target" and began.get(name) != value:
                raise ValueError(
                    f"{self.path} was begun with {name} {began.get(name)!r}, now {value!r}; "
                    "name a new file"
                )

    def _read(self) -> None:
        with self.path.open("r+b") as stream:
            at = 0
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    self.repaired = True
                    break
                try:
                    self._places[json.loads(line)["key"]] = at
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{self.path}:{number}: not a row with a key; name a new file"
                    ) from None
                at += len(line)
            stream.truncate(at)


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and row of every line of a row file (also .gz), for looking at.

    Raises ValueError naming file and line for anything that is not a row.
    """
    for place, row in raw_rows(path):
        if isinstance(row, RowError):
            raise ValueError(f"{place}: {row}")
        if not is_row(row):
            raise ValueError(f"{place}: no token row (prompt_ids and response_ids)")
        yield place, row


def is_row(row: Any) -> bool:
    """Whether it has the ids that training reads."""
    return isinstance(row, dict) and all(
        isinstance(row.get(key), list) and all(type(i) is int and 0 <= i < 2**31 for i in row[key])
        for key in ("prompt_ids", "response_ids")
    )
