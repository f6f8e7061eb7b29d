"""Versions are read whole or not at all, also while their publisher is killed at any moment.

Does not know drafters: a version is two files that must agree.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from paceline.train.versions import Versions

SIZE = 200_000


def write(folder: Path, number: int) -> None:
    """Two files of one number, written slowly enough to be caught in between."""
    folder.mkdir()
    for name in ("a", "b"):
        with (folder / name).open("wb") as stream:
            for part in range(4):
                stream.write(bytes([(number + part) % 251]) * (SIZE // 4))
                stream.flush()


def read(folder: Path) -> int:
    """The number both files agree on, with their whole length."""
    parts = [(folder / name).read_bytes() for name in ("a", "b")]
    assert [len(part) for part in parts] == [SIZE, SIZE] and parts[0] == parts[1]
    return parts[0][0]


def publish_on(folder: str) -> None:
    versions = Versions(Path(folder), keep=0)
    while True:
        upcoming = 1 + max((int(p.name[1:]) for p in Path(folder).glob("v*")), default=-1)
        versions.publish(lambda work, n=upcoming: write(work, n))  # type: ignore[misc]


def test_a_killed_publisher_leaves_only_whole_versions(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.train.versions"])
    rng, reader, seen = random.Random(0), Versions(tmp_path), [-1]
    for _ in range(8):
        publisher = context.Process(target=publish_on, args=(str(tmp_path),), daemon=True)
        publisher.start()
        before, until = seen[-1], float("inf")
        while time.monotonic() < until:
            found = reader.load(read)
            if found is not None:
                number, content = found
                assert content == number % 251, "a version holds its own weights"
                seen.append(number)
                if before < number and until == float("inf"):
                    until = time.monotonic() + rng.uniform(0.02, 0.2)
        publisher.kill()
        publisher.join()
        found = reader.load(read)
        assert found is not None and found[0] >= seen[-1]
    assert seen == sorted(seen), "versions only grow"
    assert len(set(seen)) > 8, "the test has seen many versions"


def test_numbers_go_on_and_old_versions_go(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "versions", keep=1)
    assert versions.newest() is None and versions.load(read) is None
    for number in range(4):
        assert versions.publish(lambda work: work.mkdir()) == number
        assert versions.newest() == number
    assert sorted(path.name for path in versions.folder.glob("*")) == [
        "newest",
        "v000002",
        "v000003",
    ]
    assert Versions(tmp_path / "versions").publish(lambda work: work.mkdir()) == 4
    assert versions.load(lambda path: path.name) == (4, "v000004")
    assert versions.load(lambda path: path.name, newer_than=4) is None
    assert versions.load(lambda path: path.name, newer_than=3) == (4, "v000004")


def test_what_a_killed_publisher_left_is_swept_away(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.publish(lambda work: write(work, 0))
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / "a").write_text("half")
    (tmp_path / ".newest").symlink_to("v000007")
    (tmp_path / "v000001").mkdir()  # renamed, but the link still names the one before
    assert versions.load(read) == (0, 0)
    assert versions.publish(lambda work: write(work, 2)) == 2
    assert not list(tmp_path.glob(".*"))
    assert versions.load(read) == (2, 2)


def test_an_error_of_the_reader_is_the_readers(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.publish(lambda work: work.mkdir())
    with pytest.raises(FileNotFoundError):
        versions.load(read)


def test_a_version_that_goes_while_it_is_read_is_read_anew(tmp_path: Path) -> None:
    versions = Versions(tmp_path, keep=0)
    versions.publish(lambda work: write(work, 0))
    calls = []

    def slow(folder: Path) -> int:
        calls.append(folder.name)
        if len(calls) == 1:
            versions.publish(lambda work: write(work, 1))
        return read(folder)

    assert versions.load(slow) == (1, 1) and calls == ["v000000", "v000001"]


def test_a_link_to_nothing_is_said_and_not_waited_for(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.publish(lambda work: work.mkdir())
    versions.path(0).rmdir()
    with pytest.raises(FileNotFoundError):
        versions.load(read)
