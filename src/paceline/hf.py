"""Paceline inside transformers: `model.generate(..., custom_generate=custom_generate(drafter))`.

Knows nothing about commands or training; it translates between generate's arguments and a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.api import load_drafter
from paceline.core import SamplingParams
from paceline.decode.loop import run
from paceline.pipeline import Pipeline
from paceline.target import Target

_KNOWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


def custom_generate(drafter: str) -> Callable[..., Tensor]:
    """A decoding function for ``generate``; works for batches, padded on either side.

    ``drafter`` is what ``paceline.load`` takes. Logits processors of ``generate`` run at every
    draft node; EOS, ``max_new_tokens`` and ``do_sample`` act as usual. Returns ids
    ``[B, S + new]``, padded on the right.

    Raises:
        ValueError: beams, or stopping criteria other than length and EOS.
    """
    targets: dict[int, tuple[Any, Pipeline]] = {}

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        config = generation_config
        if (config.num_beams or 1) > 1:
            raise ValueError("num_beams > 1 is not speculative decoding; use num_beams=1")
        for criterion in stopping_criteria or ():
            if type(criterion).__name__ not in _KNOWN_CRITERIA:
                raise ValueError(f"stopping criterion {type(criterion).__name__} is not supported")
        if id(model) not in targets:
            target = Target(model)
            targets[id(model)] = (
                model,
                Pipeline(target=target, drafter=load_drafter(drafter, target)),
            )
        pipeline = targets[id(model)][1]
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        prompts = [ids[m.bool()].tolist() for ids, m in zip(input_ids, mask, strict=True)]
        params = _params(config, logits_processor, input_ids.shape[1], len(prompts))
        rows = pipeline.rows(prompts, params)
        for _ in run(pipeline.session(len(rows)), rows):
            pass
        width = max(len(row.output) for row in rows)
        pad = config.pad_token_id
        pad = next(iter(pipeline.target.eos_ids), 0) if pad is None else int(pad)
        new = torch.full((len(rows), width), pad, dtype=input_ids.dtype)
        for row, into in zip(rows, new, strict=True):
            into[: len(row.output)] = torch.tensor(row.output)
        return torch.cat((input_ids, new.to(input_ids.device)), dim=1)

    return decode


def _params(config: Any, processors: Any, length: int, count: int) -> list[SamplingParams]:
    """One set per row; the seeds come from torch's global generator, as in transformers."""
    eos = config.eos_token_id
    stop = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
    longest = config.max_length if config.max_length is not None else length + 20
    maximum = config.max_new_tokens if config.max_new_tokens is not None else longest - length
    return [
        SamplingParams(
            temperature=1.0 if config.do_sample else 0.0,  # the warpers are among the processors
            max_tokens=maximum,
            stop_token_ids=tuple(stop),
            ignore_eos=True,
            seed=int(torch.randint(0, 2**62, ())),
            logits_processors=tuple(processors or ()),
        )
        for _ in range(count)
    ]
