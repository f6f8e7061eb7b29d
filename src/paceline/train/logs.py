"""Figures of a run as they come: JSON lines, TensorBoard, lines for a reader and a progress bar.

Does not know what the figures mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: for a bar."""


class RunLog:
    """Writes ``log.jsonl`` and, if it is installed, TensorBoard's files in ``tensorboard/``.

    A resumed run drops what an earlier one logged behind the checkpoint, so every step is there
    once. A process that is not ``first`` writes and says nothing.
    """

    def __init__(self, run: Path, *, first: bool, say: Say, progress: Progress) -> None:
        self._run, self._first = run, first
        self._board: Any = None
        self.say: Say = say if first else lambda _: None
        self.progress: Progress = progress if first else lambda _what, _done, _total: None

    def open(self, *, resumed_at: int) -> None:
        """Begin to write behind step ``resumed_at``."""
        if self._first:
            _keep_until(self._run / "log.jsonl", resumed_at)
            self._board = _tensorboard(self._run / "tensorboard", resumed_at, self.say)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Log figures of the state after ``step`` steps; nested ones are no curves."""
        if not self._first:
            return
        with (self._run / "log.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step} | figures) + "\n")
        for name, value in figures.items():
            if self._board is not None and isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the files."""
        if self._board is not None:
            self._board.close()


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a line that was cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            kept.append(line + "\n")
    work = path.with_suffix(".tmp")
    work.write_text("".join(kept))
    os.replace(work, path)


def _tensorboard(folder: Path, step: int, say: Say) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard files: pip install 'paceline[train]' for them; log.jsonl has it all")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
