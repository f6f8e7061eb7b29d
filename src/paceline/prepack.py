"""Prepacked bf16 linears for CPUs: weights laid out once for the matrix kernel, not at every call.

Knows nothing about models beyond their `nn.Linear` modules. The operators are private to PyTorch,
so their absence means plain linears, with the same results.
"""

from __future__ import annotations

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
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; plain when called with other weights than those packed."""
        if self.weight.dtype != torch.bfloat16:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.reshape(-1, x.shape[-1]), self.packed, self.bias, "none", [], ""
        )
        return out.view(*x.shape[:-1], -1)


def prepack(module: nn.Module) -> None:
    """Swap every linear layer below ``module`` for its prepacked twin, in place."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            packed = PackedLinear(child.weight, child.bias)
            setattr(module, name, packed)
        else:
            prepack(child)
