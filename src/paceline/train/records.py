"""Rollouts on disk: replies with their rounds and features, written by one process, trained by another.

Does not know who rolls out or what is trained.

Record ids count from 0. Shard n holds the ids from n * records_per_shard on, and ``index.json`` says how
many shards there are; a shard that it does not count is not there. So a writer that was killed goes on
at the first id that is not counted, and no id is left out or written twice. Readers name ids, so what
was trained is one number in a checkpoint: all ids below it. ``taken.json`` tells the writer how far the
reader is.

Layout of a shard (safetensors) with n records, T tokens, Q rounds and P proposals: `tokens` int32 [T],
`features` bf16 [T - n, F] (a reply's last token has none), `rounds` int32 [Q, 4] (anchor, accepted,
proposals, version), `corrections` f32 [Q] (NaN without one), `proposals` int32 [P], `logprobs` f32 [P];
the header has the rest of each record, the taps, the target's fingerprint and CRC-32s.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.train.corpus import Ints, Row
from paceline.train.durable import sync_folder, write_text
from paceline.train.features import FeatureRow

SCHEMA = "paceline-records-1"
_KEY = "paceline"
_NAMES = ("tokens", "features", "rounds", "corrections", "proposals", "logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One verify round: what was drafted behind ``anchor`` and what the target said of it.

    Log-probabilities are the target's, natural, of its unmodified logits at temperature 1, each given
    the proposals before it. What was drafted behind the end of a reply was not judged and is not here.
    """

    anchor: int  # position of the last committed token
    proposals: tuple[int, ...]
    logprobs: tuple[float, ...]  # one per proposal
    accepted: int  # the first so many proposals were committed
    correction: float | None  # of the token behind them; None where the reply ended before it
    version: int  # of the weights that proposed


@dataclass(frozen=True, kw_only=True)
class Record:
    """One reply of the target, drafted by weights in training."""

    id: int
    tokens: Ints  # [S], prompt then reply
    start: int
    source: str
    temperature: float
    features: Tensor  # bf16 [S - 1, F]
    rounds: tuple[Judged, ...]

    @property
    def version(self) -> int:
        """The oldest weights that proposed for it."""
        return min(judged.version for judged in self.rounds)

    def row(self) -> FeatureRow:
        """The reply as a training row; its features are not copied."""
        text = Row(
            tokens=self.tokens,
            start=self.start,
            source=self.source,
            temperature=self.temperature,
            held_out=False,
        )
        return FeatureRow(text, self.features.view(torch.uint16).numpy())


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What all records of a folder have in common."""

    taps: tuple[int, ...]
    target: str  # fingerprint
    records_per_shard: int

    def head(self) -> dict[str, Any]:
        """What index and shards carry."""
        return {
            "schema": SCHEMA,
            "taps": list(self.taps),
            "target": self.target,
            "records_per_shard": self.records_per_shard,
        }


class RecordWriter:
    """Writes shards, one process a folder; a context manager that holds the folder's lock.

    Raises ValueError when another process writes there, or the folder's records are of another kind.
    """

    def __init__(self, folder: Path, origin: Origin) -> None:
        self.folder, self.origin = folder, origin
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(".shard-*"):  # of a writer that was killed
                left.unlink()
            self._shards = _counted(folder, origin)
        except (OSError, ValueError) as error:
            self._lock.close()
            if isinstance(error, BlockingIOError):
                raise ValueError(f"{folder}: another process writes records there") from None
            raise

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write."""
        self._lock.close()

    @property
    def next_id(self) -> int:
        """The first id that is not written; a multiple of records_per_shard."""
        return self._shards * self.origin.records_per_shard

    def write(self, records: Sequence[Record]) -> None:
        """Write the next shard: records_per_shard records with ids from ``next_id`` on.

        Raises ValueError when the disk takes no more.
        """
        wanted = list(range(self.next_id, self.next_id + self.origin.records_per_shard))
        assert [record.id for record in records] == wanted, "ids are written in order, each once"
        path = shard_path(self.folder, self._shards)
        work = path.with_name(f".{path.name}")
        tensors = _tensors(records)
        head = self.origin.head() | {"records": [_entry(record) for record in records]}
        head["crc32"] = {name: _crc(part) for name, part in tensors.items()}
        try:
            save_file(tensors, work, metadata={_KEY: json.dumps(head)})
            with work.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(work, path)
            sync_folder(self.folder)
            index = self.origin.head() | {"shards": self._shards + 1}
            write_text(self.folder / "index.json", json.dumps(index) + "\n")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: cannot be written ({error}); make room and start the rollouts again: "
                "what was written before is kept"
            ) from error
        self._shards += 1

    @property
    def taken(self) -> int:
        """How many ids the reader has taken; 0 before it says."""
        return int(_json(self.folder / "taken.json").get("taken", 0))

    @property
    def done(self) -> bool:
        """Whether the reader wants no more."""
        return bool(_json(self.folder / "taken.json").get("done", False))


class RecordReader:
    """Reads records by id. Shards are mapped, and checked when first read."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self.folder, self.origin = folder, origin
        self._open: dict[int, list[Record]] = {}

    @property
    def available(self) -> int:
        """All ids below this one are written. Raises ValueError for records of another kind."""
        return _counted(self.folder, self.origin) * self.origin.records_per_shard

    @property
    def first(self) -> int:
        """The first id that was not deleted yet."""
        numbers = [_number(path) for path in self.folder.glob("shard-*.safetensors")]
        return min(numbers, default=0) * self.origin.records_per_shard

    def read(self, record: int) -> Record:
        """One record that is available.

        Raises ValueError naming the file when it is damaged, or was deleted.
        """
        number, at = divmod(record, self.origin.records_per_shard)
        if number not in self._open:
            self._open[number] = read_shard(shard_path(self.folder, number), self.origin)
        return self._open[number][at]

    def tell(self, taken: int, *, done: bool = False) -> None:
        """Tell the writer that all ids below ``taken`` are in use, and whether it may stop."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"taken": taken, "done": done}) + "\n"
        write_text(self.folder / "taken.json", text, durable=False)

    def delete(self, below: int) -> None:
        """Delete the shards whose ids are all below: call it once a checkpoint says they are trained."""
        for path in self.folder.glob("shard-*.safetensors"):
            if (_number(path) + 1) * self.origin.records_per_shard <= below:
                self._open.pop(_number(path), None)
                path.unlink()


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard stands."""
    return folder / f"shard-{number:06d}.safetensors"


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete its folder to begin anew") from None
    return found


def _counted(folder: Path, origin: Origin) -> int:
    """How many shards the index counts."""
    path = folder / "index.json"
    index = _json(path)
    if index:
        _check_head(path, index, origin)
    return int(index.get("shards", 0))


def _check_head(path: Path, found: dict[str, Any], origin: Origin) -> None:
    for name, value in origin.head().items():
        if found.get(name) != value:
            raise ValueError(
                f"{path}: records with {name} {found.get(name)}, but this run has {value}; name "
                "another folder, or delete this one"
            )


def _entry(record: Record) -> dict[str, Any]:
    """What the header says of a record."""
    return {
        "id": record.id,
        "tokens": len(record.tokens),
        "start": record.start,
        "source": record.source,
        "temperature": record.temperature,
        "rounds": len(record.rounds),
    }


def _tensors(records: Sequence[Record]) -> dict[str, Tensor]:
    judged = [one for record in records for one in record.rounds]
    table = [(one.anchor, one.accepted, len(one.proposals), one.version) for one in judged]
    nan = float("nan")
    return {
        "tokens": torch.from_numpy(np.concatenate([record.tokens for record in records])),
        "features": torch.cat([record.features for record in records]).contiguous(),
        "rounds": torch.tensor(table, dtype=torch.int32).view(-1, 4),
        "corrections": torch.tensor(
            [nan if o.correction is None else o.correction for o in judged]
        ),
        "proposals": torch.tensor([t for one in judged for t in one.proposals], dtype=torch.int32),
        "logprobs": torch.tensor([p for o in judged for p in o.logprobs], dtype=torch.float32),
    }


def read_shard(path: Path, origin: Origin) -> list[Record]:
    """All records of a shard. Raises ValueError naming the file when it is damaged or missing."""
    try:
        with safe_open(path, "pt") as file:
            head = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            _check_head(path, head, origin)
            parts = {name: file.get_tensor(name) for name in _NAMES}
    except FileNotFoundError:
        raise ValueError(
            f"{path} is gone: it was trained and deleted, or an earlier checkpoint was put back; "
            "delete the run folder's records and checkpoint to begin anew"
        ) from None
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete its folder to begin anew") from None
    for name, part in parts.items():
        if head["crc32"].get(name) != _crc(part):
            raise ValueError(f"{path}: {name} does not match its checksum; delete its folder")
    return _records(head["records"], parts)


def _records(entries: list[dict[str, Any]], parts: dict[str, Tensor]) -> list[Record]:
    rounds, corrections = parts["rounds"].tolist(), parts["corrections"].tolist()
    proposals, logprobs = parts["proposals"].tolist(), parts["logprobs"].tolist()
    tokens = parts["tokens"].numpy()
    found, token, line, proposal = [], 0, 0, 0
    for i, entry in enumerate(entries):
        judged = []
        for at in range(line, line + entry["rounds"]):
            anchor, accepted, count, version = rounds[at]
            given = slice(proposal, proposal + count)
            right = corrections[at]
            judged.append(
                Judged(
                    anchor=anchor,
                    proposals=tuple(proposals[given]),
                    logprobs=tuple(logprobs[given]),
                    accepted=accepted,
                    correction=None if right != right else right,
                    version=version,
                )
            )
            proposal += count
        end = token + entry["tokens"]
        found.append(
            Record(
                id=entry["id"],
                tokens=tokens[token:end],
                start=entry["start"],
                source=entry["source"],
                temperature=entry["temperature"],
                features=parts["features"][token - i : end - i - 1],
                rounds=tuple(judged),
            )
        )
        token, line = end, line + entry["rounds"]
    return found


def _crc(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data):08x}"
