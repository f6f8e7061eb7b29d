"""Packed attention: all rows' nodes in one forward, each row attending to its own cache slots.

Knows nothing about models, drafters or tokens; it sees queries, keys, values and a layout.

Source: the packed forward of docs/life-of-a-request.md. Shapes: T packed nodes, H query heads,
G key/value heads, d head width. A row's length is the truth: slots at or beyond it hold rejected
drafts and are overwritten by the next write, so rolling back costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IMPLEMENTATION = "paceline_packed"


@dataclass(slots=True, kw_only=True)
class Packed:
    """The layout of one packed forward: for each row a run of nodes behind its committed tokens.

    ``starts`` is the committed length of each row before the forward; node i of a row is written
    to cache slot ``start + i``. ``ancestors[r]`` is [n, n] bool (node sees itself and its
    ancestors) for a tree and None for a causal chain. ``bidirectional`` lets every node see its
    whole run, as a block-diffusion drafter needs.
    """

    ids_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T], absolute; depth counts, not slot, for trees
    slots: list[int]
    starts: list[int]
    counts: list[int]
    ancestors: list[Tensor | None]
    bidirectional: bool = False
    _masks: dict[tuple[Any, ...], list[Tensor | None]] = field(default_factory=dict)
    _targets: tuple[Tensor, Tensor] | None = None

    @property
    def ends(self) -> list[int]:
        """Row lengths with all nodes of this forward included."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def write_index(self) -> tuple[Tensor, Tensor]:
        """(row slot [T], cache position [T]) of every node."""
        if self._targets is None:
            device = self.ids_T.device
            counts = torch.tensor(self.counts, device=device)
            rows = torch.repeat_interleave(torch.tensor(self.slots, device=device), counts)
            places = [torch.arange(s, s + n) for s, n in zip(self.starts, self.counts, strict=True)]
            self._targets = rows, torch.cat(places).to(device)
        return self._targets

    def first_visible(self, row: int, window: int | None) -> int:
        """The first cache position that any node of the row can see."""
        if window is None:
            return 0
        return max(0, self.starts[row] - window + 1)

    def mask(self, row: int, window: int | None, heads: int, dtype: torch.dtype) -> Tensor | None:
        """[heads * n, end - first_visible]: 0 where visible, else minus infinity, to be added.

        None when every node sees everything from there. The row's mask stands ``heads`` times, once
        per query head of a key head. All layers share it.
        """
        key = window, heads, dtype
        if key not in self._masks:
            masks = [self._make_mask(r, window) for r in range(len(self.slots))]
            self._masks[key] = [
                None if mask is None else _additive(mask.repeat(heads, 1), dtype) for mask in masks
            ]
        return self._masks[key][row]

    def _make_mask(self, row: int, window: int | None) -> Tensor | None:
        start, count, device = self.starts[row], self.counts[row], self.ids_T.device
        if window is None and (self.bidirectional or count == 1):
            return None
        first = self.first_visible(row, window)
        offset = sum(self.counts[:row])
        nodes = self.positions_T[offset : offset + count]
        old = torch.arange(first, start, device=device).expand(count, -1)
        inside = self.ancestors[row]
        if self.bidirectional:
            inside = torch.ones(count, count, dtype=torch.bool, device=device)
        elif inside is None:
            inside = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        before = torch.ones_like(old, dtype=torch.bool)
        if window is not None:
            before = nodes[:, None] - old < window
            inside = inside & (nodes[:, None] - nodes[None, :] < window)
        mask = torch.cat((before, inside.to(device)), dim=1)
        return None if bool(mask.all()) else mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Done once per forward: SDPA would turn a bool mask into this one in every layer."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, float("-inf"))


class RaggedCache:
    """Keys and values of many rows, each with its own length: [slots, G, capacity, d] per layer.

    ``lengths[slot]`` counts committed entries. Forwards write beyond it; whoever commits moves it.
    Layers take their shapes from the first write, so layers may differ.
    """

    _STEP = 256

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.batch: Packed | None = None  # the layout of the forward that is running
        self.windows: dict[int, int | None] = {}  # the window each layer asked for

    def write(self, layer: int, k_GTd: Tensor, v_GTd: Tensor, batch: Packed) -> None:
        """Store the nodes' keys and values in their rows' slots, growing the layer if needed."""
        keys, values = self._room(layer, k_GTd, v_GTd, max(batch.ends))
        if len(batch.slots) == 1:
            slot, start, end = batch.slots[0], batch.starts[0], batch.ends[0]
            keys[slot, :, start:end] = k_GTd
            values[slot, :, start:end] = v_GTd
            return
        rows, places = batch.write_index()
        keys[rows, :, places] = k_GTd.transpose(0, 1)
        values[rows, :, places] = v_GTd.transpose(0, 1)

    def read(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """The committed keys and values [G, length, d] of one row."""
        keys, values = self.layers[layer]
        end = self.lengths[slot]
        return keys[slot, :, :end], values[slot, :, :end]

    @torch.inference_mode()
    def keep_path(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move accepted draft nodes (offsets behind ``start``) to consecutive places at ``start``."""
        if list(nodes) == list(range(len(nodes))):
            return
        source = torch.tensor([start + node for node in nodes])
        for keys, values in self.layers.values():
            for store in (keys, values):
                moved = store[slot, :, source.to(store.device)]
                store[slot, :, start : start + len(nodes)] = moved

    def _room(self, layer: int, k: Tensor, v: Tensor, needed: int) -> tuple[Tensor, Tensor]:
        old = self.layers.get(layer)
        if old is not None and old[0].shape[2] >= needed:
            return old
        held = 0 if old is None else old[0].shape[2]
        capacity = max(2 * held, -(-needed // self._STEP) * self._STEP)
        fresh = []
        for i, new in enumerate((k, v)):
            shape = (len(self.lengths), new.shape[0], capacity, new.shape[-1])
            store = new.new_zeros(shape)
            if old is not None:
                store[:, :, :held] = old[i]
            fresh.append(store)
        self.layers[layer] = (fresh[0], fresh[1])
        return self.layers[layer]


def packed_attention(
    q_HTd: Tensor,
    cache: RaggedCache,
    layer: int,
    batch: Packed,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend row by row; keys and values of the nodes must have been written. Returns [T, H, d].

    Committed slots up to the row's start are visible to all its nodes (within ``window``
    positions, the node's own included), and inside the run what the layout says.
    """
    keys, values = cache.layers[layer]
    H, G = q_HTd.shape[0], keys.shape[1]
    outputs, offset = [], 0
    for row, (slot, count, end) in enumerate(
        zip(batch.slots, batch.counts, batch.ends, strict=True)
    ):
        first = batch.first_visible(row, window)
        q = q_HTd[:, offset : offset + count]
        k, v = keys[slot, :, first:end], values[slot, :, first:end]
        offset += count
        # The query heads that share a key head become further queries of it: no copies of K and V.
        q = q.reshape(G, H // G * count, -1)
        mask = batch.mask(row, window, H // G, q.dtype)
        if sinks_H is None and softcap is None:
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
        else:
            sinks = None if sinks_H is None else sinks_H.view(G, -1).repeat_interleave(count, 1)
            out = _plain_attention(q, k, v, mask, scale, sinks, softcap)
        outputs.append(out.reshape(H, count, -1).transpose(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks_GQ: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Softmax attention written out, for sinks (gpt-oss) and soft-capped scores (Gemma 2)."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks_GQ is not None:
        scores = torch.cat((scores, sinks_GQ.to(scores.dtype).unsqueeze(-1)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return weights[..., : k.shape[-2]] @ v


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    ragged_cache: RaggedCache | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function registered with transformers: [1, H, T, d] in, [1, T, H, d] out.

    Raises ValueError when the model does not hand the packed layout on, or masks by itself.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if ragged_cache is None or ragged_cache.batch is None:
        raise ValueError(f"layer {layer} does not hand keyword arguments on to its attention")
    if attention_mask is not None:
        raise ValueError(f"layer {layer} brings an attention mask of its own")
    batch = ragged_cache.batch
    ragged_cache.windows[layer] = sliding_window
    ragged_cache.write(layer, key[0], value[0], batch)
    out = packed_attention(
        query[0],
        ragged_cache,
        layer,
        batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        sinks_H=s_aux,
        softcap=softcap,
    )
    return out[None], None


def register() -> None:
    """Make the packed attention known to transformers (idempotent)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, transformers_attention)
