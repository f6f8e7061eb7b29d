"""Files that appear whole or not at all, and are there after a power cut.

Does not know what is in them.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a small file; a reader sees the old text or the new one.

    Not ``durable`` is faster: after a power cut (not a kill) the old text may be back.
    """
    work = path.with_name(f".{path.name}.{os.getpid()}")
    with work.open("w") as stream:
        stream.write(text)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())
    os.replace(work, path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder, and its new files' names, survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_files(folder: Path) -> None:
    """Make all files of a folder (no folders below it) survive a power cut."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)
