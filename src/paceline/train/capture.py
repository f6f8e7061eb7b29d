"""Loads the frozen target and reads the outputs of its tapped layers for batches of token rows.

Does not know drafters, losses or files of features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from paceline.target import Target

_PER_WEIGHT = 1024  # values of each weight that go into a fingerprint
_SETTINGS = ("rope_parameters", "sliding_window", "layer_types")  # change states, not weights
_WIDTH_STEP = 32  # rows are padded to a multiple: CPU kernels are built per shape


def load_frozen(source: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The target: `smollm2` (the embedded default), a GGUF file, a folder or a hub id; frozen.

    Raises ValueError or OSError when it cannot be loaded or lacks weights.
    """
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    try:
        model, found = load(target_folder(source), dtype=dtype, output_loading_info=True)
    except SafetensorError as error:
        raise ValueError(f"target {source!r}: damaged weights ({error}); fetch it again") from error
    if missing := sorted(found["missing_keys"]):  # they would stay random
        raise ValueError(f"target {source!r} has no weights for {', '.join(missing[:5])}")
    return model.eval().requires_grad_(False)


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


@torch.no_grad()
def target_fingerprint(model: Any) -> str:
    """A hash that tells loaded targets apart, fine-tunes of one model included.

    Covers names, shapes and evenly spaced values of every weight and saved buffer, since a merged
    low-rank fine-tune leaves all norms as they were, and the rope and window settings. A change of
    single rows of one weight may go unseen. A bf16 checkpoint loaded in fp32 is the same target.
    """
    text = model.config.get_text_config()
    settings = {name: getattr(text, name, None) for name in _SETTINGS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        # An odd step visits all columns of a matrix whose width is a power of two.
        step = max(1, weight.numel() // _PER_WEIGHT) | 1
        digest.update(weight.detach().reshape(-1)[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Enough(Exception):
    """Raised by the last tap: the layers above it need not run."""


@dataclass(frozen=True)
class Taps:
    """The layers of a frozen causal LM whose outputs are a drafter's features, in config order.

    The output of layer i is what Hugging Face calls hidden_states[i + 1]. The model stays as it is
    between calls. Raises ValueError for a layer that cannot be tapped: the last one is left out,
    because hidden_states holds its output only after the final norm.
    """

    model: Any
    layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.layer_ids:
            raise ValueError("taps: name at least one layer of the target")
        count = len(self._layers)
        for layer in self.layer_ids:
            if not 0 <= layer < count - 1:
                raise ValueError(f"tap {layer}: the target has layers 0..{count - 2} to tap")

    @property
    def width(self) -> int:
        """F, the columns of a feature row: taps times hidden size."""
        return len(self.layer_ids) * int(self.model.config.get_text_config().hidden_size)

    @property
    def device(self) -> torch.device:
        """Where token ids go and features come from."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @torch.no_grad()
    def run(self, tokens_BS: Tensor) -> Tensor:
        """Features [B, S, F] in the model's dtype, of rows padded on the right.

        Causal attention: padding changes nothing before it.
        """
        layers, found = self._layers, {}
        chosen = set(self.layer_ids)
        last = max(chosen)

        def keep(layer: int) -> Callable[[Any, Any, Any], None]:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                found[layer] = output[0] if isinstance(output, tuple) else output
                if layer == last:
                    raise _Enough

            return hook

        hooks = [layers[i].register_forward_hook(keep(i)) for i in chosen]
        try:
            self.model.get_decoder()(input_ids=tokens_BS.to(self.device), use_cache=False)
        except _Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[layer] for layer in self.layer_ids], dim=-1)

    def run_rows(self, rows: Sequence[npt.NDArray[np.int32]]) -> Tensor:
        """Features [B, S, F] of token rows in one forward; S is the longest, padded a little."""
        width = -(-max(map(len, rows)) // _WIDTH_STEP) * _WIDTH_STEP
        tokens_BS = torch.zeros(len(rows), width, dtype=torch.long)
        for at, row in enumerate(rows):
            tokens_BS[at, : len(row)] = torch.from_numpy(row)
        return self.run(tokens_BS)

    @cached_property
    def _layers(self) -> nn.ModuleList:
        """The layers that decoding taps, too."""
        return Target(self.model, check=False).layers


class _Skipped(nn.Module):
    """Stands for a layer that has run already: hands its input on, or the states it is given."""

    def __init__(self, layer: nn.Module, states: list[Tensor] | None = None) -> None:
        super().__init__()
        self.__dict__["layer"], self.__dict__["states"] = layer, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)  # decoders ask layers for their kind

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        given: list[Tensor] | None = self.__dict__["states"]
        return hidden if given is None else given[0]


@dataclass(frozen=True)
class LastStates:
    """What the target's head sees, from the output of layer ``after``: only later layers run.

    Features of any run can teach a distribution so, though they do not hold the last state.

    Raises ValueError for a target whose layers cannot be left out.
    """

    model: Any
    after: int

    def __post_init__(self) -> None:
        layers = Target(self.model, check=False).layers
        size = int(self.model.config.get_text_config().vocab_size)
        device = self.model.get_input_embeddings().weight.device
        tokens = torch.arange(1, 40, device=device)[None] * 31 % size
        states: list[Tensor] = []
        hook = layers[self.after].register_forward_hook(
            lambda _m, _i, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            want = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        hook.remove()
        if not torch.equal(self.run(states[0]), want):
            raise ValueError(
                f"the target's layers up to {self.after} cannot be left out, so its distribution "
                "is not known to training; use loss=ce"
            )

    @torch.no_grad()
    def run(self, states_RSD: Tensor) -> Tensor:
        """Last states [R, S, D] of rows padded on the right, in the model's dtype."""
        decoder = self.model.get_decoder()
        layers, given = decoder.layers, [states_RSD]
        first = [_Skipped(layer) for layer in layers[: self.after]]
        swapped = [*first, _Skipped(layers[self.after], given), *layers[self.after + 1 :]]
        ids = torch.zeros(states_RSD.shape[:2], dtype=torch.long, device=states_RSD.device)
        decoder.layers = nn.ModuleList(swapped)
        try:
            out = decoder(input_ids=ids, use_cache=False)
        finally:
            decoder.layers = layers
        last: Tensor = out.last_hidden_state
        return last


def capture(taps: Taps, rows: Sequence[npt.NDArray[np.int32]], batch_tokens: int) -> Tensor:
    """Features of all rows behind one another, bf16 [tokens, F] on the CPU.

    Rows of similar length share a forward of about `batch_tokens` tokens, padding included.
    """
    offsets = np.cumsum([0] + [len(row) for row in rows])
    out = torch.empty(int(offsets[-1]), taps.width, dtype=torch.bfloat16)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    while order:
        longest = max(1, len(rows[order[-1]]))
        width = -(-longest // _WIDTH_STEP) * _WIDTH_STEP
        batch = order[-max(1, batch_tokens // width) :]
        del order[-len(batch) :]
        features = taps.run_rows([rows[i] for i in batch])
        for at, i in enumerate(batch):
            out[offsets[i] : offsets[i + 1]] = features[at, : len(rows[i])]
    return out
