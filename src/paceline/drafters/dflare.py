"""DFlare's context: each draft layer mixes the target's taps for itself, instead of one fusing matrix.

Does not know attention, blocks or folders: it turns tapped features into one context per draft layer.

Source: DFlare, arXiv 2606.02091, and its published code, whose tensor names these are
(`layer_fusion_weights`, `hidden_norm`, `k_proj_target`, `v_proj_target`). Everything else of a DFlare
drafter is DFlash's: blocks, heads, drafting, training. Letters: C context tokens, T taps, F = T * D
tapped width, L draft layers, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ARCHITECTURE = "QwenDFlareDraftModel"
START = 2.0  # the logit of the tap that a layer starts on; the others have 0


def shares(logits_LT: Tensor) -> Tensor:
    """What each draft layer takes of each tap [L, T], float32: softmax over *taps*, rows sum to 1.

    Constants once training is over: drafting keeps them.
    """
    return logits_LT.float().softmax(-1)


def mix_shares(features_CF: Tensor, shares_LT: Tensor) -> Tensor:
    """Mixtures [L, C, D] of features whose taps stand behind one another."""
    L, T = shares_LT.shape
    taps_CTD = features_CF.view(len(features_CF), T, -1)
    mixed = shares_LT.to(features_CF.dtype) @ taps_CTD  # [C, L, D]
    return mixed.transpose(0, 1)


class TapNorm(nn.Module):
    """RMS norm of each tap by itself, with a weight [T, D]. Our own variant, not in the paper.

    Taps are residual streams whose magnitude grows with depth: without it the last one drowns the
    others in every mixture.
    """

    def __init__(self, taps: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((taps, width), math.nan))
        self.eps = eps

    def forward(self, features_CF: Tensor) -> Tensor:
        """[C, F] -> [C, F]."""
        x = features_CF.view(len(features_CF), *self.weight.shape).float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * x.to(features_CF.dtype)).view_as(features_CF)


@torch.no_grad()
def start_on(logits_LT: Tensor, taps: Sequence[int]) -> None:
    """Let layer d start on tap ``taps[d]``: softly, the others keep a share."""
    logits_LT.zero_()
    for layer, tap in enumerate(taps):
        logits_LT[layer, tap] = START


def diagonal(layers: int, taps: int) -> list[int]:
    """The tap each layer starts on as published: floor(d * T / L), its own depth's."""
    return [d * taps // layers for d in range(layers)]
