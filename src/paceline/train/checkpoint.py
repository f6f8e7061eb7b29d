"""Checkpoints, exported drafters and their provenance: what a run leaves on disk.

Does not know how a step works.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from paceline.drafters.dflash import DFlashModule, save_dflash
from paceline.provenance import source_commit
from paceline.train.capture import target_fingerprint
from paceline.train.config import TrainConfig
from paceline.train.corpus import Corpus, fingerprint
from paceline.train.durable import sync_folder
from paceline.train.trainee import Trainee, fused

# Settings that say where and how fast, not what comes out: a resumed run may change them.
_FREE = {
    "run_dir",
    "data",
    "compute",
    "recompute",
    "parallel",
    "micro_batches",
    "cache_gb",
    "features_dir",
    "rows_per_shard",
    "eval_every",
    "eval_rows",
    "checkpoint_seconds",
}
_DAMAGED = (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, UnpicklingError)
_PACKAGES = ("paceline", "torch", "transformers", "numpy")
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run is made from; no path and no host in it."""

    settings: dict[str, Any]
    data: list[dict[str, Any]]  # name, rows, left out, fingerprint of each corpus file
    target: str  # fingerprint
    versions: dict[str, str]
    commit: str | None

    def provenance(self, figures: dict[str, Any]) -> str:
        """The text of a provenance.json."""
        return json.dumps(asdict(self) | {"figures": figures}, indent=1) + "\n"


def origin(config: TrainConfig, target: Any, corpora: Sequence[Corpus]) -> Origin:
    """Describe a run with its corpus files."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    for name in ("data", "run_dir", "features_dir"):
        settings.pop(name)
    for name in ("target", "init_from"):
        settings[name] = _name(settings[name])
    if settings["on_policy"]:
        settings["on_policy"]["replay_from"] = _name(settings["on_policy"]["replay_from"])
    return Origin(
        settings=settings,
        data=[
            {
                "name": Path(corpus.path).name,
                "rows": len(corpus.rows),
                "left_out": dict(corpus.left_out),
                "fingerprint": fingerprint(corpus.rows, supervision=True),
            }
            for corpus in corpora
        ],
        target=target_fingerprint(target),
        versions={name: version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
        commit=source_commit(),
    )


def _name(source: str | None) -> str | None:
    """A hub id or name as it is; of a path the last part."""
    return Path(source).name if source and Path(source).exists() else source


def save_checkpoint(path: Path, trainee: Trainee, step: int, made: Origin) -> None:
    """Write masters, optimiser and step, provenance beside them; all processes must call this.

    The file appears whole or not at all, and does not depend on how many processes there are.
    """
    masters = get_model_state_dict(trainee.model, options=_WHOLE)
    moments = get_optimizer_state_dict(trainee.model, trainee.optimizer, options=_WHOLE)
    if trainee.ranks.first:
        state = {
            "step": step,
            "masters": masters,
            "optimizer": moments,
            "rms": trainee.rms_F.cpu(),
            "totals": trainee.totals,
            "origin": json.dumps(asdict(made)),
        }
        work = path.with_suffix(".tmp")
        try:
            with work.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(work, path)
            sync_folder(path.parent)  # what it covers is deleted behind it
            text = made.provenance({"step": step} | trainee.totals)
            (path.parent / "provenance.tmp").write_text(text)
            os.replace(path.parent / "provenance.tmp", path.parent / "provenance.json")
        except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError
            work.unlink(missing_ok=True)
            raise ValueError(
                f"{path} cannot be written ({error}); free some space and run again: "
                "an earlier checkpoint is still whole"
            ) from None
    trainee.ranks.wait()


def load_checkpoint(path: Path, trainee: Trainee, made: Origin) -> int:
    """Restore a checkpoint into a trainee; returns the next step.

    Raises ValueError when the file is damaged, or was made with other settings, text or target.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        theirs = json.loads(state["origin"])
    except _DAMAGED as error:
        raise ValueError(
            f"{path} cannot be read ({error}); delete it to start over, or name another --run-dir"
        ) from None
    _compare(path, theirs, asdict(made))
    set_model_state_dict(trainee.model, state["masters"], options=_WHOLE)
    set_optimizer_state_dict(trainee.model, trainee.optimizer, state["optimizer"], options=_WHOLE)
    trainee.rms_F = state["rms"].to(trainee.ranks.device)
    trainee.totals = state["totals"]
    return int(state["step"])


def _compare(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    fix = "name another --run-dir, or give the same again"
    for key, value in ours["settings"].items():
        old = theirs["settings"].get(key, value)  # a setting that did not exist yet
        if key not in _FREE and old != value:
            raise ValueError(f"{path} was made with {key}={old}, not {value}; {fix}")
    for what in ("data", "target"):
        if theirs[what] != ours[what]:
            raise ValueError(f"{path} was made from another {what}; {fix}")


def export(trainee: Trainee, folder: Path, text: str) -> Path:
    """Write the drafter as a plain DFlash folder (bf16) with its provenance beside it.

    All processes must call this; one writes.
    """
    masters: dict[str, Any] = get_model_state_dict(trainee.model, options=_WHOLE)
    if trainee.ranks.first:
        module = DFlashModule(trainee.shape)
        module.load_state_dict(fused(masters, trainee.rms_F))
        files = {"provenance.json": text}
        save_dflash(folder, trainee.shape, module, trainee.d2t, files=files)
    trainee.ranks.wait()
    return folder
