"""Paceline inside transformers: `model.generate(..., custom_generate=custom_generate(drafter))`.

Knows nothing about commands or training; it translates between generate's arguments and a pipeline.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.api import resolve_drafter
from paceline.core import Drafter, SamplingParams
from paceline.decode.loop import run
from paceline.pipeline import Pipeline
from paceline.target import Target

_KNOWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
# Arguments of the forward that generate itself adds, or that only say how it should run.
_KNOWN_ARGUMENTS = {
    "attention_mask",
    "cache",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
_MORE_OUTPUTS = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
# Processors that remember earlier calls: at a draft node they would remember rejected tokens.
_STATEFUL = ("ClassifierFreeGuidance", "SynthID", "WhisperNoSpeech", "DiaEOSDelay")
# Processors of transformers that keep something for each row of the batch.
_PER_ROW = ("RepetitionPenalty", "EncoderRepetitionPenalty", "EncoderNoRepeatNGram")

Processor = Callable[[Tensor, Tensor], Tensor]


def custom_generate(drafter: str | Drafter | None = "default") -> Callable[..., Tensor]:
    """A decoding function for ``generate``; works for batches, padded on either side.

    ``drafter`` is what ``paceline.load`` takes. Logits processors of ``generate`` run at every
    draft node and must be pure functions; EOS, ``max_new_tokens``, ``do_sample`` and, for one row,
    ``streamer`` act as usual. Returns ids ``[B, S + new]``, padded on the right.

    Raises:
        ValueError: beams, stopping criteria other than length and EOS, processors with a state of
            their own, outputs other than the ids, or model inputs other than ids and their mask.
    """

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        caller = sys._getframe(1)
        if streamer is None and caller.f_code.co_name == "generate":
            # transformers hands a callable everything but generate's own streamer; without it a
            # reader of a TextIteratorStreamer would wait for ever.
            streamer = caller.f_locals.get("streamer")
        _refuse(generation_config, logits_processor, stopping_criteria, kwargs)
        if streamer is not None and len(input_ids) > 1:
            raise ValueError("streamer serves one row; pass one prompt")
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        prompts = [ids[m.bool()].tolist() for ids, m in zip(input_ids, mask, strict=True)]
        with _eval(model):
            pipeline = _pipeline(model, drafter)
            vocab = pipeline.target.vocab_size
            stop = [token for token in _stop_ids(stopping_criteria) if 0 <= token < vocab]
            room = _max_length(stopping_criteria) - input_ids.shape[1]
            params = [
                SamplingParams(
                    # The warpers are among the processors.
                    temperature=1.0 if generation_config.do_sample else 0.0,
                    max_tokens=room,
                    stop_token_ids=tuple(stop),
                    ignore_eos=True,
                    seed=int(torch.randint(0, 2**62, ())),  # follows torch's global seed
                    logits_processors=_of_row(logits_processor, input_ids, row, len(prompt)),
                )
                for row, prompt in enumerate(prompts)
            ]
            rows = pipeline.rows(prompts, params)
            for _, new in run(pipeline.session(len(rows)), rows):
                for token in new if streamer is not None else ():
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        pad = generation_config.pad_token_id
        pad = (stop or [0])[0] if pad is None else int(pad)
        return _padded(input_ids, [row.output for row in rows], pad)

    return decode


def _refuse(config: Any, processors: Any, criteria: Any, kwargs: dict[str, Any]) -> None:
    """ValueError for what this decoding function would otherwise silently ignore."""
    if (config.num_beams or 1) > 1:
        raise ValueError("num_beams > 1 is not speculative decoding; use num_beams=1")
    for name in _MORE_OUTPUTS:
        if getattr(config, name, None):
            raise ValueError(f"{name} is not supported; the result is the ids alone")
    for criterion in criteria:
        if type(criterion).__name__ not in _KNOWN_CRITERIA:
            raise ValueError(f"stopping criterion {type(criterion).__name__} is not supported")
    for processor in processors:
        name = type(processor).__name__
        if any(part in name for part in _STATEFUL):
            raise ValueError(f"logits processor {name} keeps a state; it is not supported")
    for name, value in kwargs.items():
        if value is not None and name not in _KNOWN_ARGUMENTS:
            raise ValueError(f"{name} is not supported; pass input_ids and attention_mask only")


@contextmanager
def _eval(model: Any) -> Iterator[None]:
    """The model without dropout; what was in train mode is so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _pipeline(model: Any, drafter: str | Drafter | None) -> Pipeline:
    """The model's pipeline for this drafter, made once.

    It refers to the model, so it is kept on the model itself and is freed together with it. A head
    of another size, dtype or device makes a new one.
    """
    head = model.get_output_embeddings().weight
    name = drafter if isinstance(drafter, str | None) else id(drafter)
    key = (name, head.shape, head.dtype, head.device)
    kept: dict[Any, Pipeline] = vars(model).setdefault("_paceline", {})
    if key not in kept:
        target = Target(model)
        kept[key] = Pipeline(target=target, drafter=resolve_drafter(drafter, target))
    return kept[key]


def _max_length(criteria: Any) -> int:
    """Prompt with padding, and reply."""
    return min(c.max_length for c in criteria if hasattr(c, "max_length"))


def _stop_ids(criteria: Any) -> list[int]:
    ends = [c.eos_token_id for c in criteria if hasattr(c, "eos_token_id")]
    return [token for ids in ends for token in ids.flatten().tolist()]


def _of_row(processors: Any, input_ids_BS: Tensor, row: int, length: int) -> tuple[Processor, ...]:
    return tuple(_bind(processor, input_ids_BS, row, length) for processor in processors)


def _bind(processor: Any, input_ids_BS: Tensor, row: int, length: int) -> Processor:
    """The processor for one row of the batch: with the row's padding, and at its place.

    Ours are called with the row's ``length`` prompt ids and its new ids; generate's were made for
    the padded width and may keep something for each row. Those, and unknown ones, are given a
    batch in which every row is this one.
    """
    name, module = type(processor).__name__, type(processor).__module__
    alone = module == "transformers.generation.logits_process" and not any(
        name.startswith(part) for part in _PER_ROW
    )
    if hasattr(processor, "_prefix_allowed_tokens_fn"):  # it must be asked about this row only
        allowed, request = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        processor, alone = copy.copy(processor), True
        processor._prefix_allowed_tokens_fn = lambda _, ids: allowed(request, ids)
        processor._num_beams = 1
    copies, place = (1, 0) if alone else (len(input_ids_BS), row)

    def process(ids_1S: Tensor, scores_1V: Tensor) -> Tensor:
        padded = torch.cat((input_ids_BS[row].to(ids_1S.device), ids_1S[0, length:]))
        scores: Tensor = processor(padded.repeat(copies, 1), scores_1V.repeat(copies, 1))
        return scores[place : place + 1]

    return process


def _padded(input_ids: Tensor, replies: list[list[int]], pad: int) -> Tensor:
    new = torch.full((len(replies), max(map(len, replies))), pad, dtype=input_ids.dtype)
    for reply, into in zip(replies, new, strict=True):
        into[: len(reply)] = torch.tensor(reply)
    return torch.cat((input_ids, new.to(input_ids.device)), dim=1)
