"""Small heads behind a block drafter: logit biases from previous tokens, and a verify length.

Does not know drafters, sampling or caches: it gets final hidden states and token ids.

Sources: xPress, arXiv 2608.02438, sections 3.1-3.2 (causal refiner, r = 256 there); DSpark, arXiv
2607.05147 (vanilla Markov head); AdaFlash, arXiv 2607.19223 (adaptive length head). Tensor names are
those of speculators and of AdaFlash's engine branch. Letters: n blocks, b block size with the anchor,
D hidden width, r rank, V target vocabulary, V' draft vocabulary. Parameters start as NaN.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BiasHead(Protocol):
    """Adds a bias to the block's logits that depends on the token before each slot.

    Slot k predicts the token at anchor + k. ``prev_nb[:, k]`` is the token at anchor + k - 1, a target
    id: slot 0's is the committed token before the anchor. The bias of slot k depends on ``prev_nb[:,
    : k + 1]`` alone, which is what makes sampling from it exact.
    """

    walks: bool  # resolved slot by slot; else in sweeps over the whole block
    readout: nn.Module  # the last matrix, r -> V'

    def fixed(self, hidden_nbD: Tensor, mean_nD: Tensor) -> Tensor:
        """What does not depend on previous tokens [n, b, *]; computed once per block."""

    def latent(self, fixed_nb: Tensor, prev_nb: Tensor) -> Tensor:
        """What `readout` turns into the bias, [n, b, r]."""

    def bias(
        self, hidden_nbD: Tensor, mean_nD: Tensor, prev_nb: Tensor, base_nbV: Tensor | None = None
    ) -> Tensor:
        """The bias [n, b, V'] from final states, their block mean and previous ids."""


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    device = torch.get_default_device()
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=device)
    _spoil(linear)
    return linear


def _table(rows: int, width: int) -> nn.Embedding:
    device = torch.get_default_device()
    table = nn.utils.skip_init(nn.Embedding, rows, width, device=device)
    _spoil(table)
    return table


@torch.no_grad()
def _spoil(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.fill_(math.nan)


class MarkovHead(nn.Module):
    """bias = W2 W1[previous token]: one row of a low-rank bigram table, walked slot by slot."""

    walks = True

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = _table(vocab_size, rank)
        self.markov_w2 = _linear(rank, draft_vocab_size)

    @property
    def readout(self) -> nn.Module:
        """W2, r -> V'."""
        return self.markov_w2

    def fixed(self, hidden_nbD: Tensor, mean_nD: Tensor) -> Tensor:
        """Nothing: hidden states do not enter."""
        return hidden_nbD[..., :0]

    def latent(self, fixed_nb: Tensor, prev_nb: Tensor) -> Tensor:
        """W1[previous token], [n, b, r]."""
        out: Tensor = F.embedding(prev_nb, self.markov_w1.weight)
        return out

    def bias(
        self, hidden_nbD: Tensor, mean_nD: Tensor, prev_nb: Tensor, base_nbV: Tensor | None = None
    ) -> Tensor:
        """As `BiasHead`."""
        out: Tensor = self.readout(self.latent(self.fixed(hidden_nbD, mean_nD), prev_nb))
        return out


class XPressHead(nn.Module):
    """The causal refiner: previous token, hidden state and block mean, mixed along the block.

    z = W_in [W_h h; W_g mean; E[prev]]; u = z + (L * tril) z per channel along slots; v = u + SwiGLU(u);
    bias = W_o v. ``mix_l`` [r, b, b] ties the head to one block size at most: being causal, it serves
    shorter blocks by its first slots.
    """

    walks = False

    def __init__(
        self,
        vocab_size: int,
        draft_vocab_size: int,
        hidden_size: int,
        block_size: int,
        rank: int,
        mlp_ratio: int,
    ) -> None:
        super().__init__()
        self.token_embed = _table(vocab_size, rank)
        self.down_h = _linear(hidden_size, rank)
        self.down_g = _linear(hidden_size, rank)
        self.in_proj = _linear(3 * rank, rank)
        self.mix_l = nn.Parameter(torch.full((rank, block_size, block_size), math.nan))
        self.mlp_gate = _linear(rank, rank * mlp_ratio)
        self.mlp_up = _linear(rank, rank * mlp_ratio)
        self.mlp_down = _linear(rank * mlp_ratio, rank)
        self.readout = _linear(rank, draft_vocab_size)

    def fixed(self, hidden_nbD: Tensor, mean_nD: Tensor) -> Tensor:
        """[W_h h; W_g mean], [n, b, 2 r]."""
        mean = self.down_g(mean_nD)[:, None].expand(-1, hidden_nbD.shape[1], -1)
        return torch.cat((self.down_h(hidden_nbD), mean), dim=-1)

    def mixer(self) -> Tensor:
        """(L * tril) + I, [r, b, b]: what training computes in two steps, folded for drafting."""
        eye = torch.eye(self.mix_l.shape[-1], dtype=self.mix_l.dtype, device=self.mix_l.device)
        return self.mix_l.tril() + eye

    def latent(self, fixed_nb: Tensor, prev_nb: Tensor, mixer: Tensor | None = None) -> Tensor:
        """v, [n, b, r]. ``mixer`` is the folded mixer if the caller keeps it."""
        seen = F.embedding(prev_nb, self.token_embed.weight)
        z = self.in_proj(torch.cat((fixed_nb, seen), dim=-1))
        if mixer is None:
            u = z + _mix(self.mix_l.tril(), z)
        else:
            u = _mix(mixer, z)
        out: Tensor = u + self.mlp_down(F.silu(self.mlp_gate(u)) * self.mlp_up(u))
        return out

    def bias(
        self, hidden_nbD: Tensor, mean_nD: Tensor, prev_nb: Tensor, base_nbV: Tensor | None = None
    ) -> Tensor:
        """As `BiasHead`."""
        out: Tensor = self.readout(self.latent(self.fixed(hidden_nbD, mean_nD), prev_nb))
        return out


def _mix(weights_rbb: Tensor, z_nbr: Tensor) -> Tensor:
    """Sum over slots j of weights[c, k, j] z[n, j, c], as one batched product over channels.

    Blocks may be shorter than the weights': these are lower triangular, so slots see what they saw.
    """
    b = z_nbr.shape[1]
    mixed = torch.matmul(weights_rbb[:, :b, :b], z_nbr.permute(2, 1, 0))
    return mixed.permute(2, 1, 0)


class LengthHead(nn.Module):
    """AdaFlash's adaptive length head: the share of the block worth verifying, one number a block.

    f = [mean of all slots; last slot]; h = SiLU(W f); h = h + SiLU(W' h); share = sigmoid(w h).
    """

    def __init__(self, hidden_size: int, bottleneck: int) -> None:
        super().__init__()
        self.down = _linear(2 * hidden_size, bottleneck, bias=True)
        self.res = nn.ModuleList([_linear(bottleneck, bottleneck, bias=True)])
        self.out = _linear(bottleneck, 1, bias=True)

    def forward(self, hidden_nbD: Tensor) -> Tensor:
        """Shares [n] in (0, 1), fp32, from final states of whole blocks, the anchor's included."""
        f = torch.cat((hidden_nbD.mean(1), hidden_nbD[:, -1]), dim=-1)
        h = F.silu(self.down(f))
        h = h + F.silu(self.res[0](h))
        share: Tensor = self.out(h).float().squeeze(-1).sigmoid()
        return share


@torch.no_grad()
def init_head(module: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Fill a head: matrices with N(0, std), biases and the mixer with 0, so that it begins silent."""
    for name, weight in module.named_parameters():
        if weight.dim() == 1 or name.endswith("mix_l"):
            weight.zero_()
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
