"""Law 8: prepacked linears equal plain ones to one bf16 rounding.

Does not test speed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.prepack import PackedLinear, SiblingLinear, can_prepack, prepack

CPU = torch.device("cpu")


@pytest.mark.skipif(not can_prepack(torch.bfloat16, CPU), reason="no bf16 kernels on this CPU")
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_prepacked_linear_is_the_plain_one(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(96, 160, bias=bias).bfloat16().requires_grad_(False))
    x = torch.randn(1, rows, 96).bfloat16()
    with torch.inference_mode():
        want = plain(x)
        prepack(plain)
        assert isinstance(plain[0], PackedLinear)
        torch.testing.assert_close(plain(x), want, rtol=1.6e-2, atol=1e-2)


class Reads(nn.Module):
    """Layers named as attention and MLP layers are: q, k, v and gate, up share their input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        for name, size in (("q", 96), ("k", 32), ("v", 32), ("gate", 80), ("up", 80), ("o", 64)):
            setattr(self, f"{name}_proj", nn.Linear(64, size, bias=bias, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """Same input, another input in between, and the same tensor with other contents."""
        out = [self.q_proj(x), self.k_proj(y), self.v_proj(x), self.k_proj(x), self.o_proj(x)]
        out += [self.up_proj(x), self.gate_proj(x), self.gate_proj(y)]
        changed = x.clone()
        out += [self.k_proj(changed), self.v_proj(changed)]
        changed += 1
        return [*out, self.k_proj(changed), self.q_proj(changed)]


@pytest.mark.skipif(not can_prepack(torch.bfloat16, CPU), reason="no bf16 kernels on this CPU")
@pytest.mark.parametrize("bias", [False, True])
def test_siblings_in_one_product_are_the_layers_alone(bias: bool) -> None:
    torch.manual_seed(2)
    module = Reads(bias)
    x, y = torch.randn(2, 1, 9, 64).bfloat16().unbind(0)
    with torch.inference_mode():
        expected = module(x, y)
        names = list(module.state_dict())
        prepack(module)
        assert isinstance(module.q_proj, SiblingLinear) and isinstance(module.o_proj, PackedLinear)
        assert list(module.state_dict()) == names
        for found, right in zip(module(x, y), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=2**-7, atol=1e-3)


def test_fp32_is_never_prepacked() -> None:
    assert not can_prepack(torch.float32, CPU)
