"""AdaFlash's verify length: one number a block, from the drafter's own final states.

Does not know accept rules, costs or how the head is trained.

Source: AdaFlash, arXiv 2607.19223 (section on the adaptive length head; the rate of 1.3 is its code's).
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.core import Draft, DraftContext


class AdaLength:
    """A length rule: the anchor and the drafts of a window of round(share * b * rate) tokens.

    The share comes from hidden states, which depend on nothing that was sampled: the law is kept. A
    window of one token, the anchor alone, is plain decoding.

    Raises ValueError for a drafter without the head, and a rate that is not above 0.
    """

    name, law = "length", "keeps"

    def __init__(self, drafter: Any, rate: float = 1.3) -> None:
        head = getattr(getattr(drafter, "module", None), "thresh_head_two_model", None)
        if head is None:
            raise ValueError(
                "the drafter has no length head; train one with `paceline train "
                "smollm2_length_head --set init_from=FOLDER`, or use +cost or +first:N"
            )
        if not rate > 0:
            raise ValueError(f"length:{rate:g}: the rate must be above 0")
        self.head, self.rate = head, rate

    @torch.inference_mode()
    def __call__(self, draft: Draft, ctx: DraftContext) -> list[int]:
        """Sizes [B]; rows that were not drafted stay so."""
        sizes = list(draft.sizes_B)
        if "ready" not in draft.hints:
            return sizes
        states = draft.hints["states_RbD"]
        windows = (
            (self.head(states) * states.shape[1] * self.rate).round().clamp(1, states.shape[1])
        )
        for b, window in zip(draft.hints["ready"], windows.tolist(), strict=True):
            if sizes[b] > 0:  # a row whose states are NaN is decoded plainly already
                sizes[b] = min(sizes[b], int(window) - 1)
        return sizes
