"""A bench's finished parts on disk, so that the same bench goes on where it stopped.

Does not know what the parts hold: JSON values under keys, one line each, only ever appended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHOWN_CHANGES = 4


@dataclass(kw_only=True)
class SideFile:
    """The parts of one bench, whose ``header`` says which. ``path`` None keeps nothing on disk.

    Every line carries a hash of itself. A last line without its end was being written when the
    bench was killed: it is dropped. Any other damage is an error.

    Raises:
        ValueError: the file holds parts of another bench (the message says what differs), or was
            edited.
    """

    path: Path | None
    header: Mapping[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        whole = self.path.read_bytes()
        lines = whole[: whole.rfind(b"\n") + 1].splitlines()
        records = [self._record(i, line) for i, line in enumerate(lines, start=1)]
        if not records and not whole.startswith(b'["'):
            raise self._edited(1)
        if len(records) < 2:  # no part was finished
            self.path.unlink()
            return
        self._check_header(records[0])
        for i, record in enumerate(records[1:], start=2):
            if not isinstance(record, dict) or record.keys() != {"key", "part"}:
                raise self._edited(i)
            if record["key"] in self.parts:
                raise ValueError(
                    f"{self.path}: line {i} repeats {record['key']}: two benches wrote to it at the "
                    "same time; delete it"
                )
            self.parts[record["key"]] = record["part"]
        os.truncate(self.path, sum(len(line) + 1 for line in lines))

    def add(self, key: str, part: Any) -> None:
        """Keep a finished part; it is on disk when this returns."""
        text = "" if self.parts else _line(self.header)
        self.parts[key] = part
        if self.path is None:
            return
        with self.path.open("ab") as stream:
            stream.write((text + _line({"key": key, "part": part})).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def remove(self) -> None:
        """Forget the parts: the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _record(self, number: int, line: bytes) -> Any:
        try:
            digest, body = json.loads(line)
            good = digest == _digest(json.dumps(body))
        except (ValueError, TypeError):
            good = False
        if not good:
            raise self._edited(number)
        return body

    def _edited(self, number: int) -> ValueError:
        return ValueError(
            f"{self.path}: line {number} is damaged or edited, or this is not a bench's side file; "
            "delete it"
        )

    def _check_header(self, was: Any) -> None:
        found = _changes(was, json.loads(json.dumps(self.header)))
        if len(found) > SHOWN_CHANGES:
            found[SHOWN_CHANGES:] = [f"{len(found) - SHOWN_CHANGES} more"]
        if found:
            raise ValueError(
                f"{self.path} holds the unfinished results of another bench ({'; '.join(found)}); "
                "finish that one with its own command, write to another file, or delete it"
            )


def side_path(out: Path) -> Path:
    """Where the unfinished parts of ``out`` are."""
    return out.with_name(out.name + ".partial")


def _line(body: Any) -> str:
    text = json.dumps(body)
    return f'["{_digest(text)}", {text}]\n'


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changes(was: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two headers, as `name was x, is now y`."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*was, *(key for key in now if key not in was)]
        lists = [_changes(was.get(key), now.get(key), f"{name} {key}".strip()) for key in keys]
        return sum(lists, [])
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        lists = [
            _changes(a, b, f"{name} {a.get('name', '') if isinstance(a, dict) else i}")
            for i, (a, b) in enumerate(zip(was, now, strict=True))
        ]
        return sum(lists, [])
    return [] if was == now else [f"{name} was {was}, is now {now}"]
