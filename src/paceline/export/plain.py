"""The plain DFlash folder that z-lab's code, vLLM and SGLang read.

Knows nothing about decoding or training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.dflash import (
    DFlashConfig,
    DFlashModule,
    draft_to_target,
    load_dflash,
    save_dflash,
)

_NO_HEADS: dict[str, Any] = {
    "markov_rank": None,
    "xpress_rank": None,
    "thresh_head_bottleneck_dim": None,
}


def export_plain(source: Path, out: Path, head_VD: torch.Tensor | None = None) -> Path:
    """Copy a drafter into a plain folder; a reduced vocabulary needs the target's head [V, D].

    vLLM reads ``d2t`` only together with the matching rows of the head, so they are written too. Heads
    behind the drafter are left out: the plain format has none, and engines refuse unknown tensors.
    Raises ValueError if ``out`` exists, for a DFlare drafter, and without the target's head.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is no empty folder; name another one")
    config, module, d2t = load_dflash(source)
    if config.is_dflare:
        raise ValueError(
            f"{source} is a DFlare drafter: the plain format has no mixtures of taps and no context "
            "projections, and engines that read it would draft nonsense"
        )
    wanted = (config.vocab_size, config.hidden_size)
    if head_VD is not None and tuple(head_VD.shape) != wanted:
        raise ValueError(f"the target's head is {tuple(head_VD.shape)}, the drafter needs {wanted}")
    rows = None
    if d2t is not None:
        if head_VD is None:
            raise ValueError("a reduced draft vocabulary needs the target's head")
        rows = head_VD[draft_to_target(d2t)]
    plain, bare = without_heads(config, module)
    return save_dflash(out, plain, bare, d2t, lm_head=rows)


def without_heads(config: DFlashConfig, module: DFlashModule) -> tuple[DFlashConfig, DFlashModule]:
    """The drafter alone, in the same dtype: what other loaders know."""
    plain = replace(config, **_NO_HEADS)
    bare = DFlashModule(plain).to(module.norm.weight.dtype)
    state = module.state_dict()
    bare.load_state_dict({name: state[name] for name in bare.state_dict()})
    return plain, bare
