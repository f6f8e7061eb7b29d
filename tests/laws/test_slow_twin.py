"""Law 8: prepacked linears equal plain ones to one bf16 rounding.

Does not test speed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.prepack import PackedLinear, can_prepack, prepack

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


def test_fp32_is_never_prepacked() -> None:
    assert not can_prepack(torch.float32, CPU)
