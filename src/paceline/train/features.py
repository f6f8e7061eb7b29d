"""Captures the tapped hidden states of the frozen target once, to memory-mapped shards on disk.

Does not know drafters or losses; a shard holds the features of whole rows and their token ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from paceline.train.corpus import Row, fingerprint


def load_frozen(source: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The target: `smollm2` (the embedded default), a GGUF file, a folder or a hub id; frozen."""
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    return load(target_folder(source), dtype=dtype).eval().requires_grad_(False)


def load_tokenizer(source: str) -> Any:
    """The tokenizer of the same target; None for a folder that has none."""
    from transformers import AutoTokenizer

    folder = target_folder(source)
    if Path(folder).is_dir() and not any(Path(folder).glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def target_folder(source: str) -> str:
    """What `from_pretrained` should get for a target named on the command line."""
    from paceline.gguf import convert_gguf, smollm2_gguf

    if source == "smollm2":
        return str(convert_gguf(smollm2_gguf()))
    return str(convert_gguf(source)) if source.endswith(".gguf") else source


def target_fingerprint(model: nn.Module) -> str:
    """A hash that tells targets apart: names, shapes and the values of all vectors (norms)."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        if weight.dim() == 1:
            digest.update(weight.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Enough(Exception):
    """Raised by the last tap: the layers above it need not run."""


class Taps:
    """Forward hooks on decoder layers; `run` returns the outputs of the layers in config order.

    The output of layer i is what Hugging Face calls hidden_states[i + 1].
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self._decoder = model.get_decoder()
        self._layer_ids = list(layer_ids)
        layers = self._decoder.layers
        for layer in self._layer_ids:
            if not 0 <= layer < len(layers) - 1:
                raise ValueError(f"tap {layer}: the target has layers 0..{len(layers) - 2} to tap")
        self._found: dict[int, Tensor] = {}
        for layer in self._layer_ids:
            layers[layer].register_forward_hook(self._hook(layer, layer == max(self._layer_ids)))

    def _hook(self, layer: int, last: bool) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self._found[layer] = output[0] if isinstance(output, tuple) else output
            if last:
                raise _Enough

        return keep

    @torch.no_grad()
    def run(self, tokens_BS: Tensor) -> Tensor:
        """Features [B, S, m * D] of right-padded rows (causal: padding changes nothing before it)."""
        try:
            self._decoder(input_ids=tokens_BS, use_cache=False)
        except _Enough:
            pass
        features = torch.cat([self._found[layer] for layer in self._layer_ids], dim=-1)
        self._found.clear()
        return features


def capture_shards(
    model: Any,
    rows: Sequence[Row],
    folder: Path,
    *,
    layer_ids: Sequence[int],
    rows_per_shard: int = 128,
    batch_tokens: int = 1024,
    worker: int = 0,
    workers: int = 1,
    report: Callable[[dict[str, float]], None] = lambda _: None,
) -> None:
    """Write the missing shards of `rows` (shard i holds rows i*n..). Safe to stop and to repeat.

    Several workers may share the folder; each takes every `workers`-th shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taps, source = Taps(model, layer_ids), target_fingerprint(model)
    began, tokens = time.monotonic(), 0
    for shard in range(worker, -(-len(rows) // rows_per_shard), workers):
        part = rows[shard * rows_per_shard : (shard + 1) * rows_per_shard]
        head = {"rows": fingerprint(part), "taps": list(layer_ids), "target": source}
        if _read_head(folder, shard) == head:
            continue
        features = _capture(taps, part, batch_tokens)
        _publish(folder, shard, head, features)
        tokens += len(features)
        rate = tokens / (time.monotonic() - began)
        report({"shard": shard, "tokens": tokens, "tokens_per_s": round(rate, 1)})


def _capture(taps: Taps, rows: Sequence[Row], batch_tokens: int) -> npt.NDArray[np.uint16]:
    """Features [tokens of all rows, F] as bf16 bits; rows of similar length share a batch."""
    offsets = np.cumsum([0] + [len(row.tokens) for row in rows])
    out: npt.NDArray[np.uint16] | None = None
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens))
    while order:
        width = (
            -(-len(rows[order[-1]].tokens) // 32) * 32
        )  # few shapes: kernels are built per shape
        batch = order[-max(1, batch_tokens // width) :]
        del order[-len(batch) :]
        tokens_BS = torch.zeros(len(batch), width, dtype=torch.long)
        for at, i in enumerate(batch):
            tokens_BS[at, : len(rows[i].tokens)] = torch.from_numpy(rows[i].tokens)
        features = taps.run(tokens_BS).bfloat16().view(torch.uint16).numpy()
        if out is None:
            out = np.empty((int(offsets[-1]), features.shape[-1]), dtype=np.uint16)
        for at, i in enumerate(batch):
            out[offsets[i] : offsets[i + 1]] = features[at, : len(rows[i].tokens)]
    assert out is not None
    return out


def _publish(
    folder: Path, shard: int, head: dict[str, Any], features: npt.NDArray[np.uint16]
) -> None:
    work = folder / f".shard-{shard:05d}.{os.getpid()}"
    features.tofile(work)
    os.replace(work, folder / f"shard-{shard:05d}.bf16")
    work.write_text(json.dumps(head))
    os.replace(work, folder / f"shard-{shard:05d}.json")  # last: says that the shard is whole


def _read_head(folder: Path, shard: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / f"shard-{shard:05d}.json").read_text())
    except FileNotFoundError:
        return None
    return found


@dataclass(frozen=True)
class FeatureRow:
    """A row and its captured features: `features` [S, m * D], bf16 bits, memory-mapped."""

    row: Row
    features: npt.NDArray[np.uint16]

    def tensor(self, stop: int | None = None) -> Tensor:
        """The features of tokens [0, stop) as a bf16 tensor (a copy)."""
        return torch.from_numpy(np.array(self.features[:stop])).view(torch.bfloat16)


def open_shards(
    rows: Sequence[Row], folder: Path, *, layer_ids: Sequence[int], width: int, rows_per_shard: int
) -> list[FeatureRow]:
    """The rows whose shard is complete, with features of `width` columns.

    Raises ValueError when a shard was captured from other rows, another target or other taps.
    """
    found: list[FeatureRow] = []
    targets = set()
    for shard in range(-(-len(rows) // rows_per_shard)):
        head = _read_head(folder, shard)
        if head is None:
            continue
        part = rows[shard * rows_per_shard : (shard + 1) * rows_per_shard]
        if head["rows"] != fingerprint(part) or head["taps"] != list(layer_ids):
            raise ValueError(
                f"{folder}: shard {shard} was captured from other rows or taps; remove the folder"
            )
        targets.add(head["target"])
        bits: Any = np.memmap(folder / f"shard-{shard:05d}.bf16", dtype=np.uint16, mode="r")
        bits = bits.reshape(-1, width)
        offsets = np.cumsum([0] + [len(row.tokens) for row in part])
        if len(bits) != offsets[-1]:
            raise ValueError(f"{folder}: shard {shard} is cut short; remove the folder")
        found += [FeatureRow(row, bits[offsets[i] : offsets[i + 1]]) for i, row in enumerate(part)]
    if len(targets) > 1:
        raise ValueError(f"{folder}: shards of different targets; remove the folder")
    return found
