"""Prepacked bf16 linears for CPUs: weights laid out once for the matrix kernel, not at every call.

Knows nothing about models beyond their `nn.Linear` modules. The operators are private to PyTorch,
so their absence means plain linears, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether prepacking works here: bf16 on a CPU whose PyTorch build has the operators."""
    if dtype != torch.bfloat16 or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops: Any = torch.ops.mkldnn
    try:
        packed = ops._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 8)
        ops._linear_pointwise(torch.zeros(1, 16, dtype=dtype), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


class PackedLinear(nn.Module):
    """A linear layer of frozen bf16 weights [out, in] in the kernel's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.packed = _pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; plain when called with other weights than those packed."""
        if self.weight.dtype != torch.bfloat16:
            return F.linear(x, self.weight, self.bias)
        return _product(x, self.packed, self.bias)


class SiblingLinear(nn.Module):
    """One of several linear layers that read the same input, as q, k and v do.

    The first sibling called computes all of them in one product: a CPU reads one large matrix
    faster than three small ones. The others hand out their columns if the input is the very same
    tensor, and compute anew if it is not.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, family: Family, columns: slice) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.family, self.columns = family, columns

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], a view of the family's product."""
        if self.weight.dtype != torch.bfloat16:
            return F.linear(x, self.weight, self.bias)
        return self.family.product(x, self.columns.start)[..., self.columns]


class Family:
    """The stacked weights of sibling layers and their latest product."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.packed = _pack(torch.cat(tuple(layer.weight for layer in layers)))
        self.bias = torch.cat(biases).detach() if biases else None
        self.size = len(layers)
        self.served: set[int] = set()
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def product(self, x: Tensor, sibling: int) -> Tensor:
        """The outputs of all siblings side by side; a sibling's second call is a new product."""
        if x is not self.input or self.output is None or sibling in self.served:
            self.input, self.output = x, _product(x, self.packed, self.bias)
            self.served.clear()
        self.served.add(sibling)
        out = self.output
        if len(self.served) == self.size:
            self.input = self.output = None
        return out


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def prepack(module: nn.Module) -> None:
    """Swap every linear layer below ``module`` for its prepacked twin, in place."""
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    for names in _SIBLINGS:
        layers = [linears[name] for name in names if name in linears]
        alike = {(layer.in_features, layer.bias is None) for layer in layers}
        if len(layers) < len(names) or len(alike) > 1:
            continue
        family, at = Family(layers), 0
        for name, layer in zip(names, layers, strict=True):
            columns = slice(at, at + layer.out_features)
            setattr(module, name, SiblingLinear(layer.weight, layer.bias, family, columns))
            at = columns.stop
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            prepack(child)
