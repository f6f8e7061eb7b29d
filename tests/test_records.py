"""Records on disk: whole, in order, each once, whoever is killed; damage is named.

Does not know drafters.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.train.records import (
    Judged,
    Origin,
    Record,
    RecordReader,
    RecordWriter,
    read_shard,
    shard_path,
)

ORIGIN = Origin(taps=(0, 2), target="abc", records_per_shard=3)


def record(number: int) -> Record:
    rng = np.random.default_rng(number)
    size, start = int(rng.integers(6, 12)), 3
    rounds = [
        Judged(
            anchor=start - 1, proposals=(), logprobs=(), accepted=0, correction=-0.5, version=number
        )
    ]
    for at in range(start, size - 1):
        count = int(rng.integers(0, 4))
        rounds.append(
            Judged(
                anchor=at,
                proposals=tuple(rng.integers(0, 97, count).tolist()),
                logprobs=tuple(rng.normal(size=count).astype(np.float32).tolist()),
                accepted=min(1, count),
                correction=None if at == size - 2 else float(np.float32(rng.normal())),
                version=number + 1,
            )
        )
    return Record(
        id=number,
        tokens=rng.integers(0, 97, size).astype(np.int32),
        start=start,
        source=f"s{number % 2}",
        temperature=0.5 * (number % 2),
        features=torch.randn(
            size - 1, 8, generator=torch.Generator().manual_seed(number)
        ).bfloat16(),
        rounds=tuple(rounds),
    )


def same(mine: Record, theirs: Record) -> None:
    assert mine.rounds == theirs.rounds and torch.equal(mine.features, theirs.features)
    assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.tokens.dtype == np.int32
    for name in ("id", "start", "source", "temperature", "version"):
        assert getattr(mine, name) == getattr(theirs, name)


def write(folder: Path, shards: int) -> None:
    with RecordWriter(folder, ORIGIN) as writer:
        for _ in range(shards):
            at = writer.next_id
            writer.write([record(at + i) for i in range(3)])


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path, ORIGIN)
    assert reader.available == 0 and reader.first == 0
    write(tmp_path, 2)
    assert reader.available == 6
    for number in (4, 0, 5, 1, 3, 2):
        same(reader.read(number), record(number))
    item = reader.read(4).row()
    assert item.width == 8 and item.row.start == 3 and item.row.source == "s0"
    assert torch.equal(item.tensor(), record(4).features)
    assert torch.equal(item.tensor(4), record(4).features[:4])


def test_a_shard_that_is_not_counted_is_not_there(tmp_path: Path) -> None:
    """The writer dies between a shard and its index, or within a shard: the ids come again."""
    write(tmp_path, 1)
    (tmp_path / ".shard-000001.safetensors").write_bytes(b"half a sha")
    shard_path(tmp_path, 1).write_bytes(b"whole, but its writer died before it was counted")
    reader = RecordReader(tmp_path, ORIGIN)
    assert reader.available == 3
    with RecordWriter(tmp_path, ORIGIN) as writer:
        assert writer.next_id == 3 and not list(tmp_path.glob(".shard*"))
        writer.write([record(3 + i) for i in range(3)])
    assert reader.available == 6
    same(reader.read(3), record(3))


def test_ids_are_written_in_order_each_once(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, ORIGIN) as writer:
        with pytest.raises(AssertionError, match="in order"):
            writer.write([record(i) for i in (0, 2, 1)])
        with pytest.raises(ValueError, match="another process writes"):
            RecordWriter(tmp_path, ORIGIN)
    RecordWriter(tmp_path, ORIGIN).close()


def test_only_shards_below_the_checkpoint_are_deleted(tmp_path: Path) -> None:
    write(tmp_path, 3)
    reader = RecordReader(tmp_path, ORIGIN)
    same(reader.read(1), record(1))
    reader.delete(5)
    assert not shard_path(tmp_path, 0).exists() and shard_path(tmp_path, 1).exists()
    assert reader.first == 3 and reader.available == 9
    with pytest.raises(ValueError, match="is gone"):
        reader.read(1)
    same(reader.read(5), record(5))
    with RecordWriter(tmp_path, ORIGIN) as writer:
        assert writer.next_id == 9, "deleted shards are still counted"


def test_the_writer_learns_what_was_taken(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path / "records", ORIGIN)
    reader.tell(0)
    with RecordWriter(tmp_path / "records", ORIGIN) as writer:
        assert writer.taken == 0 and not writer.done
        reader.tell(4)
        assert writer.taken == 4
        reader.tell(2, done=True)  # went back to an earlier checkpoint
        assert writer.taken == 2 and writer.done


def test_records_of_another_kind_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for change in ({"taps": (0, 1)}, {"target": "def"}, {"records_per_shard": 4}):
        other = Origin(**({"taps": (0, 2), "target": "abc", "records_per_shard": 3} | change))
        with pytest.raises(ValueError, match=next(iter(change))):
            RecordWriter(tmp_path, other)
        with pytest.raises(ValueError, match=next(iter(change))):
            _ = RecordReader(tmp_path, other).available


def test_damage_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = shard_path(tmp_path, 0)
    whole = path.read_bytes()
    for at in (len(whole) - 3, len(whole) // 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"shard-000000\.safetensors.*checksum"):
            read_shard(path, ORIGIN)
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"shard-000000\.safetensors is damaged"):
        read_shard(path, ORIGIN)
    (tmp_path / "index.json").write_text(json.dumps({})[:1])
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        _ = RecordReader(tmp_path, ORIGIN).available
