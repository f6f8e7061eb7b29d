"""The processes of a run: one, or those that torchrun started; and the device each works on.

Does not know what is trained.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among ``world``, and its device."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """Whether this process writes the files that a run has once."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the processes; all must call this."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def join_processes() -> Iterator[Ranks]:
    """The process group that torchrun's environment describes, for the time of a run.

    gloo on CPUs, NCCL on CUDA. Without torchrun it is this process alone.
    """
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if kind is None else torch.device(kind.type, local)
    if device.type != "cpu":
        torch.accelerator.set_device_index(local)
    if world == 1:
        yield Ranks(device=device)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(rank=dist.get_rank(), world=world, device=device)
    finally:
        dist.destroy_process_group()


@contextmanager
def only_run(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of a folder; the lock ends with the process, however that ends.

    Raises ValueError when another process trains there.
    """
    if not ranks.first:
        yield
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another process trains there; name another --run-dir"
            ) from None
        yield
