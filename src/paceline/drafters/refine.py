"""The refine stage: resolves a block's tokens with a bias head, each slot seeing the token before it.

Does not know accept rules or how heads are trained.

Sources: xPress, arXiv 2608.02438, section 3.3 (Jacobi sweeps with noise frozen for the block); DSpark,
arXiv 2607.05147 (sequential walk). Letters: R drafted rows, b block size, N = b - 1, r rank, V' draft
vocabulary, V target vocabulary.

Why a sampled draft is exact after any number of sweeps: the token of slot k after sweep j is a function
of the noise of slots up to k, because the head is causal. The last sweep's law of slot k is therefore a
function of the noise before slot k; the noise of slot k is independent of it, so the token is a draw from
that law, given all earlier ones. (Laws recomputed from the final tokens would be laws of other draws.)
Noise is addressed by position: a position is decided once and never drafted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.core import Draft, DraftContext, Row
from paceline.decode.warp import shape_probs, top


class Refine:
    """Stage ``refine(sweeps=K)``; ``kind`` is ``xpress`` or ``markov``, a head the drafter has.

    With ``samples`` rows of temperature > 0 get drawn tokens and their law, for the rejection rule;
    otherwise every row gets its most probable tokens. ``sweeps`` None: as the drafter's folder says
    (xpress). It stops early once no token changes: more sweeps could change nothing. A Markov head
    takes no sweeps: it walks.

    Raises ValueError for a drafter without that head.
    """

    def __init__(
        self, drafter: Any, kind: str, *, sweeps: int | None = None, samples: bool = False
    ) -> None:
        head = getattr(getattr(drafter, "module", None), f"{kind}_head", None)
        if head is None:
            raise ValueError(
                f"the drafter has no {kind} head; train one with `paceline train smollm2_{kind}`, or "
                f"name a drafter that has it"
            )
        if not head.walks and head.mix_l.shape[-1] < drafter.config.block_size:
            raise ValueError(
                f"the {kind} head mixes blocks of up to {head.mix_l.shape[-1]}, the drafter drafts "
                f"blocks of {drafter.config.block_size}: leave block out, or train the head at that block"
            )
        if head.walks and sweeps is not None:
            raise ValueError(f"{kind} walks through the block: it takes no number of sweeps")
        sweeps = drafter.config.num_jacobi_passes if sweeps is None else sweeps
        if sweeps < 1:
            raise ValueError(f"{kind} needs at least 1 sweep; got {sweeps}")
        self.name, self.law = kind, "samples" if samples else "chooses"
        self.drafter, self.head, self.sweeps, self.samples = drafter, head, sweeps, samples
        self.mixer = None
        if not head.walks:  # its first slots serve a shorter block
            b = drafter.config.block_size
            self.mixer = head.mixer()[:, :b, :b].to(drafter.target.dtype).contiguous()

    @torch.inference_mode()
    def __call__(self, draft: Draft, ctx: DraftContext) -> Draft:
        """The draft with the tokens of every drafted row resolved anew."""
        if "ready" not in draft.hints:
            return draft
        ready: list[int] = draft.hints["ready"]
        rows = [ctx.rows[b] for b in ready]
        base_RNV: Tensor = draft.hints["logits_RNV"]
        pick = _Pick(rows, base_RNV.shape, self.samples, base_RNV.device)
        chosen_RN, logits_RNV = self._resolve(draft.hints["states_RbD"], base_RNV, rows, pick)
        sound = logits_RNV.amax(-1).isfinite().all(-1).tolist()
        tokens_BN, sizes = draft.tokens_BN.clone(), list(draft.sizes_B)
        ids = self.drafter.to_target(chosen_RN).cpu()
        laws = None
        if self.samples:
            laws = torch.zeros(*tokens_BN.shape, self.drafter.config.vocab_size)
        for i, b in enumerate(ready):
            tokens_BN[b] = ids[i]
            if not sound[i]:
                sizes[b] = 0
            elif laws is not None and rows[i].params.temperature == 0:
                laws[b].scatter_(1, ids[i][:, None], 1.0)
            elif laws is not None:
                self.drafter.spread(pick.laws[i], laws[b])
        hints = {**draft.hints, "refined_RNV": logits_RNV}
        return replace(draft, tokens_BN=tokens_BN, sizes_B=sizes, probs_BNV=laws, hints=hints)

    def _resolve(
        self, states_RbD: Tensor, base_RNV: Tensor, rows: list[Row], pick: _Pick
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R, N] as draft vocabulary ids, and the logits [R, N, V'] they were picked from."""
        before = [row.tokens[-2] if len(row.tokens) > 1 else row.tokens[-1] for row in rows]
        known = torch.tensor([[old, row.tokens[-1]] for old, row in zip(before, rows, strict=True)])
        known = known.to(base_RNV.device)
        fixed = self.head.fixed(states_RbD, states_RbD.mean(1))
        if self.head.walks:
            return self._walk(fixed, base_RNV, known, pick)
        tokens, logits_RNV = pick(base_RNV), base_RNV
        moving = torch.arange(len(rows), device=base_RNV.device)
        for sweep in range(self.sweeps):
            prev = torch.cat((known, self.drafter.to_target(tokens[:, :-1])), dim=1)
            latent = self.head.latent(fixed[moving], prev[moving], self.mixer)
            flat = latent[:, 1:].reshape(-1, latent.shape[-1])
            logits = self.head.readout(flat).view(len(moving), *base_RNV.shape[1:])
            logits += base_RNV if sweep == 0 else base_RNV[moving]
            new = pick(logits, rows=moving.tolist())
            moved = (new != tokens[moving]).any(1)
            if sweep == 0:
                tokens, logits_RNV = new, logits
            else:
                tokens[moving], logits_RNV[moving] = new, logits
            moving = moving[moved]
            if not len(moving):
                break
        return tokens, logits_RNV

    def _walk(
        self, fixed: Tensor, base_RNV: Tensor, known: Tensor, pick: _Pick
    ) -> tuple[Tensor, Tensor]:
        """Slot by slot; the head of slot k looks at the token before it only."""
        prev, logits, tokens = known[:, 1], torch.empty_like(base_RNV), []
        for k in range(base_RNV.shape[1]):
            latent = self.head.latent(fixed[:, k + 1 : k + 2], prev[:, None])
            logits[:, k] = base_RNV[:, k] + self.head.readout(latent[:, 0])
            tokens.append(pick(logits[:, k : k + 1], k)[:, 0])
            prev = self.drafter.to_target(tokens[-1])
        return torch.stack(tokens, dim=1), logits


class _Pick:
    """Turns logits into tokens, with the same noise every time: what "frozen for the block" means.

    Afterwards ``laws[i]`` [N, V'] is what the last tokens of sampled row i were drawn from. Drawing is
    an exponential race (the Gumbel trick without logarithms): argmax of probability over noise.
    """

    def __init__(
        self, rows: list[Row], shape: torch.Size, samples: bool, device: torch.device
    ) -> None:
        self.params = [row.params for row in rows]
        self.noise: dict[int, Tensor] = {}
        self.laws: dict[int, Tensor] = {}
        for i, row in enumerate(rows if samples else ()):
            if row.params.temperature > 0:
                lines = [
                    row.noise.exponentials("refine", len(row.tokens) + k, shape[-1])
                    for k in range(shape[1])
                ]
                self.noise[i] = torch.stack([torch.from_numpy(line) for line in lines]).to(device)
                self.laws[i] = torch.zeros(shape[1:], device=device)

    def __call__(
        self, logits_RnV: Tensor, first: int = 0, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Tokens [R, n] of slots ``first`` and following, of these rows; None means of all."""
        tokens = top(logits_RnV)[1]
        part = slice(first, first + logits_RnV.shape[1])
        for place, i in enumerate(range(len(self.params)) if rows is None else rows):
            if i in self.noise:
                law = shape_probs(logits_RnV[place], self.params[i])
                self.laws[i][part] = law
                tokens[place] = top(law / self.noise[i][part])[1]
        return tokens
