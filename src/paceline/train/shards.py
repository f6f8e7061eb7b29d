"""Files of captured features: one safetensors file a shard, checked, and read by memory mapping.

Does not know models, nor which shards a run needs.

Layout of a shard of n rows with T tokens: `features` bf16 [T, F], `tokens` int32 [T] and
`offsets` int64 [n + 1] (row i is tokens offsets[i] to offsets[i + 1]). The header's metadata has
one key, `paceline`: JSON that names the schema, the taps, hashes of the target and of the rows, and
the CRC-32 of each tensor's bytes. Equal rows and features give equal bytes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.train.corpus import Row, fingerprint

SCHEMA = "paceline-features-1"
_HEADER = 1024  # bytes, an upper bound for the usual number of taps
_NAMES = {"features", "tokens", "offsets"}
_KEY = "paceline"
_FOREIGN = {
    "taps": "other taps",
    "target": "another target (weights, rope or attention windows)",
    "rows": "other rows (texts, their order, max_tokens or rows_per_shard)",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What features were captured from, next to the rows: the tapped layers and the target."""

    taps: tuple[int, ...]
    target: str
    width: int  # F

    def head(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The metadata that a shard of these rows must carry."""
        return {
            "taps": list(self.taps),
            "target": self.target,
            "rows": fingerprint(rows),
        }


def shard_path(folder: Path, number: int) -> Path:
    """Where shard `number` stands."""
    return folder / f"shard-{number:05d}.safetensors"


def shard_bytes(rows: Sequence[Row], width: int) -> int:
    """The size of the file of these rows."""
    tokens = sum(len(row.tokens) for row in rows)
    return _HEADER + tokens * (width * 2 + 4) + (len(rows) + 1) * 8


def write_shard(path: Path, origin: Origin, rows: Sequence[Row], features_TF: Tensor) -> None:
    """Write a shard; the file appears whole or not at all.

    Raises ValueError when the disk takes no more, and when another process took the unfinished
    file away.
    """
    tensors = {"features": features_TF, "tokens": _tokens(rows), "offsets": _offsets(rows)}
    head: dict[str, Any] = {"schema": SCHEMA} | origin.head(rows)
    head |= {f"crc32_{name}": _crc(part) for name, part in tensors.items()}
    # One key: safetensors writes several in an order that changes from run to run.
    metadata = {_KEY: json.dumps(head, sort_keys=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*"):  # of a capture that was killed
        left.unlink(missing_ok=True)
    work = path.parent / f".{path.name}.{os.getpid()}"
    try:
        save_file(tensors, work, metadata=metadata)
        with work.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(work, path)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: another process is capturing into this folder; let one of them finish"
        ) from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: cannot be written ({error}); make room or set a smaller cache_gb, then run "
            "again: the shards before it are kept"
        ) from error
    finally:
        work.unlink(missing_ok=True)


@dataclass
class Shard:
    """An opened shard. The features are mapped and their checksum is taken when first read."""

    path: Path
    offsets: list[int]
    width: int
    checksum: str
    _mapped_TF: Tensor | None = field(default=None, init=False, repr=False)

    def read(self, row: int, stop: int | None = None) -> Tensor:
        """Mapped features bf16 [S, F] of the first `stop` tokens of a row; not to be written to.

        Raises ValueError for a damaged file.
        """
        if self._mapped_TF is None:
            try:
                with safe_open(self.path, "pt") as file:
                    mapped = file.get_tensor("features")
            except (SafetensorError, OSError) as error:
                raise _refuse(self.path, f"is cut short or damaged ({error})") from None
            if _crc(mapped) != self.checksum:
                raise _refuse(self.path, "is damaged: `features` does not match its checksum")
            self._mapped_TF = mapped
        begin, end = self.offsets[row], self.offsets[row + 1]
        return self._mapped_TF[begin : end if stop is None else min(begin + stop, end)]


def open_shard(path: Path, origin: Origin, rows: Sequence[Row]) -> Shard:
    """Open the shard of `rows`, all but its features checked.

    Raises ValueError naming the file and the fix when it is damaged, cut short or not of these
    rows, taps and target.
    """
    try:
        with safe_open(path, "pt") as file:
            head, names = read_head(file), set(file.keys())
            if head.get("schema") != SCHEMA or names != _NAMES:
                raise _refuse(path, f"is not a feature shard of schema {SCHEMA}")
            shape = tuple(file.get_slice("features").get_shape())
            kind = file.get_slice("features").get_dtype()
            tokens, offsets = file.get_tensor("tokens"), file.get_tensor("offsets")
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise _refuse(path, f"is cut short or damaged ({error})") from None
    for name, expected in origin.head(rows).items():
        if head.get(name) != expected:
            raise _foreign(path, name)
    for name, part in {"tokens": tokens, "offsets": offsets}.items():
        if head.get(f"crc32_{name}") != _crc(part):
            raise _refuse(path, f"is damaged: `{name}` does not match its checksum")
    if not torch.equal(tokens, _tokens(rows)) or not torch.equal(offsets, _offsets(rows)):
        raise _foreign(path, "rows")
    if shape != (len(tokens), origin.width) or kind != "BF16":
        raise _refuse(path, f"is damaged: `features` is {kind} {list(shape)}")
    return Shard(path, offsets.tolist(), origin.width, head.get("crc32_features", ""))


def read_head(file: Any) -> dict[str, Any]:
    """The metadata of an opened shard; empty for a file that is no shard."""
    head: dict[str, Any] = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    return head


def _refuse(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}; delete that file: it is captured again")


def _foreign(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} was captured from {_FOREIGN[what]}; delete the folder {path.parent} to capture "
        "anew, or use another run_dir"
    )


def _tokens(rows: Sequence[Row]) -> Tensor:
    return torch.from_numpy(np.concatenate([row.tokens for row in rows]).astype(np.int32))


def _offsets(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([0, *np.cumsum([len(row.tokens) for row in rows])], dtype=torch.int64)


def _crc(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.view(torch.uint8).numpy().data):08x}"
