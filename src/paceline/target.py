"""The frozen target: loads a Hugging Face causal LM and scores packed nodes with its own forward.

Knows nothing about drafters, sampling or stop rules; it turns tokens into logits and tapped states.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.attention import IMPLEMENTATION, Packed, RaggedCache, register
from paceline.core import Draft, Row
from paceline.prepack import can_prepack, prepack
from paceline.support import keep_output, probe, refuse_state

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one packed forward returns.

    ``logits_TV`` covers each row's root and its draft nodes, rows behind one another. ``taps_TF``
    covers every node that was forwarded (uncached committed tokens first), or is None.
    """

    logits_TV: Tensor
    taps_TF: Tensor | None
    batch: Packed


def parse_dtype(name: str | torch.dtype, device: str | torch.device = "cpu") -> torch.dtype:
    """bf16, fp16 or fp32 as a torch dtype; ``auto`` is `fast_dtype`; ValueError for anything else."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return fast_dtype(torch.device(device))
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def fast_dtype(device: torch.device) -> torch.dtype:
    """bf16, or fp32 on a CPU without instructions for bf16 products, where bf16 is far slower."""
    return torch.bfloat16 if device.type != "cpu" or _has_bf16() else torch.float32


def _has_bf16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a private operator
        return False


class Target:
    """A frozen causal LM whose layers all keep ordinary attention keys and values.

    The model is used as it is: one ``[1, T]`` forward of its own code with every row's nodes, our
    attention function and positions. It is left unchanged between calls, so that its owner can go
    on using ``model.generate``.

    Raises:
        ValueError: a layer keeps state that cannot be rolled back, or ignores the packed mask; the
            message names the layer.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str = "", check: bool = True):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        text = model.config.get_text_config()
        self.config = text
        self.layers = _decoder_layers(model, text.num_hidden_layers)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = text.hidden_size
        self.num_layers: int = text.num_hidden_layers
        self.max_length: int = getattr(text, "max_position_embeddings", None) or 2**31
        register()
        refuse_state(text, self.layers)
        if check:
            probe(self)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.embedding.weight.dtype

    @property
    def dtype_name(self) -> str:
        """Such as bfloat16: what figures say."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def embedding(self) -> Any:
        """The input embedding module."""
        return self.model.get_input_embeddings()

    @property
    def head(self) -> Any:
        """The language-model head, [V, D]."""
        return self.model.get_output_embeddings()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that the model's generation config, config or tokenizer calls end of sequence."""
        found: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        sources = (generation, self.config, self.tokenizer)
        for eos in (getattr(s, "eos_token_id", None) for s in sources if s is not None):
            if eos is not None:
                found.update(eos if isinstance(eos, (list, tuple)) else [int(eos)])
        return frozenset(found)

    def new_cache(self, slots: int) -> RaggedCache:
        """An empty cache for rows in slots 0 .. slots-1."""
        return RaggedCache(slots)

    @torch.inference_mode()
    def forward(
        self, batch: Packed, cache: RaggedCache, logit_rows: Tensor, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """One packed forward. Returns logits [len(logit_rows), V] and taps [T, len(taps) * D].

        Writes every node's keys and values behind its row's length; moves no length. Taps are the
        outputs of the named layers, as HF's ``hidden_states[id + 1]``; no other layer is kept.
        """
        states: dict[int, Tensor] = {}
        hooks = [self.layers[i].register_forward_hook(keep_output(states, i)) for i in taps]
        config, before = self.config, self.config._attn_implementation
        cache.batch = batch
        try:
            config._attn_implementation = IMPLEMENTATION
            out = self.model(
                input_ids=batch.ids_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                logits_to_keep=logit_rows,
                ragged_cache=cache,
            )
        finally:
            config._attn_implementation = before
            cache.batch = None
            for hook in hooks:
                hook.remove()
        features = torch.cat([states[i] for i in taps], dim=-1) if taps else None
        return out.logits[0], features

    def score(
        self, draft: Draft, rows: Sequence[Row], cache: RaggedCache, taps: Sequence[int] = ()
    ) -> Scored:
        """Forward each row's uncached committed tokens and its draft nodes together.

        A fresh row's uncached tokens are its whole prompt, so that prefill is a round like any
        other and shares the forward with rows that are decoding.
        """
        batch, logit_rows = pack(draft, rows, cache, self.device)
        logits, features = self.forward(batch, cache, logit_rows, taps)
        return Scored(logits_TV=logits, taps_TF=features, batch=batch)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Input embeddings [T, D] of ids."""
        out: Tensor = self.embedding(ids_T)
        return out

    @torch.inference_mode()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] after ``ids`` by the model's own plain forward, without any cache."""
        tokens = torch.tensor([list(ids)], device=self.device)
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0, -1]
        return logits


def pack(
    draft: Draft, rows: Sequence[Row], cache: RaggedCache, device: torch.device
) -> tuple[Packed, Tensor]:
    """The packed layout of a scoring round, and which nodes need logits (roots and drafts)."""
    ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    ancestors: list[Tensor | None] = []
    all_tokens, all_parents = draft.tokens_BN.tolist(), draft.parents_BN.tolist()
    for b, row in enumerate(rows):
        start, size = cache.lengths[row.slot], draft.sizes_B[b]
        waiting, parents = row.tokens[start:], all_parents[b][:size]
        root = len(waiting) - 1
        wanted += range(len(ids) + root, len(ids) + root + 1 + size)
        ids += waiting + all_tokens[b][:size]
        positions += range(start, len(row.tokens))
        if parents == list(range(-1, size - 1)):
            positions += range(len(row.tokens), len(row.tokens) + size)
            ancestors.append(None)
        else:
            depths = node_depths(parents)
            positions += [len(row.tokens) - 1 + depth for depth in depths]
            ancestors.append(_ancestors(parents, len(waiting)).to(device))
        starts.append(start)
        counts.append(len(waiting) + size)
    packed = Packed(
        ids_T=torch.tensor(ids, device=device),
        positions_T=torch.tensor(positions, device=device),
        slots=[row.slot for row in rows],
        starts=starts,
        counts=counts,
        ancestors=ancestors,
    )
    return packed, torch.tensor(wanted, device=device)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each draft node; a child of the root has depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _ancestors(parents: Sequence[int], waiting: int) -> Tensor:
    """[n, n] bool: uncached committed tokens as a chain, then the tree hanging from the last."""
    n = waiting + len(parents)
    seen = torch.zeros(n, n, dtype=torch.bool)
    seen[:waiting, :waiting] = torch.ones(waiting, waiting).tril().bool()
    for node, parent in enumerate(parents):
        above = waiting - 1 if parent < 0 else waiting + parent
        seen[waiting + node] = seen[above]
        seen[waiting + node, waiting + node] = True
    return seen


def _decoder_layers(model: Any, count: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            if all(any(True for _ in layer.parameters()) for layer in module):
                return module
    raise ValueError(f"{type(model).__name__}: found no list of {count} decoder layers")


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> Target:
    """Load by folder, hub id, GGUF file, or the name ``smollm2`` (the embedded model).

    Raises:
        ValueError: a folder without weights, a corrupt GGUF, or a model that cannot be supported.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading takes a second; errors must stay readable
    kind = parse_dtype(dtype, device)
    source: str | Path = name
    if name == "smollm2":
        from paceline.gguf import convert_gguf, smollm2_gguf

        source = convert_gguf(smollm2_gguf())
    elif str(name).endswith(".gguf"):
        from paceline.gguf import convert_gguf

        source = convert_gguf(Path(name))
    elif os.path.isdir(name):
        _check_folder(Path(name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loading: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=kind, trust_remote_code=trust_remote_code, output_loading_info=True
            )
            model, report = loading
            _check_loaded(name, report)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot load target {name!r}: {error}") from error
    model = model.to(device)
    for weight in model.parameters():
        weight.requires_grad_(False)
    if can_prepack(kind, model.device):
        prepack(model)
    return Target(model, tokenizer, name=str(name))


def _check_loaded(name: str, report: Mapping[str, Any]) -> None:
    """No weight may stay random; a tensor that the model does not know is worth a word."""
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            names = ", ".join(sorted(map(str, report[kind]))[:5])
            raise ValueError(f"target {name!r}: {kind.partition('_')[0]} tensors: {names}")
    if report["unexpected_keys"]:
        names = ", ".join(sorted(report["unexpected_keys"])[:5])
        warnings.warn(f"target {name!r} holds tensors its model ignores: {names}", stacklevel=3)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; a target folder needs config and weights")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(f"{folder} has no weights (*.safetensors)")
