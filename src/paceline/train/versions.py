"""Versions of a drafter's weights: published whole by one process, read by others while it trains.

Does not know what a version holds. A version is a folder ``v000012``; the symbolic link ``newest`` names
the latest and is replaced last, so whoever follows it finds a whole folder. Old ones are renamed away
before they are deleted, so that a reader finds all files of a version or none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.train.durable import sync_files, sync_folder

_LINK = "newest"
T = TypeVar("T")


class Versions:
    """The versions in a folder. One process publishes, any number read; each may be killed."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """``keep`` older versions stay beside the newest, for readers that are loading one."""
        self.folder, self._keep = folder, keep

    def newest(self) -> int | None:
        """The number of the newest version; None before the first."""
        try:
            return int(os.readlink(self.folder / _LINK)[1:])
        except FileNotFoundError:
            return None

    def path(self, number: int) -> Path:
        """Where a version stands."""
        return self.folder / f"v{number:06d}"

    def publish(self, write: Callable[[Path], object]) -> int:
        """Publish what ``write(folder)`` puts into a folder that does not exist yet; its number.

        Numbers only grow, also when the publisher was killed and went back to an earlier checkpoint.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*"):  # of a publisher that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        work = self.folder / ".writing"
        write(work)
        sync_files(work)
        number = 1 + max((int(path.name[1:]) for path in self.folder.glob("v*")), default=-1)
        os.rename(work, self.path(number))
        link = self.folder / f".{_LINK}"
        link.symlink_to(self.path(number).name)
        os.replace(link, self.folder / _LINK)
        sync_folder(self.folder)
        for path in sorted(self.folder.glob("v*"))[: -1 - self._keep]:
            old = self.folder / f".old-{path.name}"
            os.rename(path, old)
            shutil.rmtree(old)
        return number

    def load(self, read: Callable[[Path], T], newer_than: int = -1) -> tuple[int, T] | None:
        """``read(folder)`` of the newest version, with its number; None if there is none newer.

        When the version is deleted while it is being read, the one that took its place is read. An
        error of ``read`` on a version that is still there is the caller's.
        """
        while True:
            number = self.newest()
            if number is None or number <= newer_than:
                return None
            try:
                return number, read(self.path(number))
            except Exception:
                # The link moves before what it named goes: a link to nothing is damage, not a race.
                if self.path(number).exists() or self.newest() == number:
                    raise
