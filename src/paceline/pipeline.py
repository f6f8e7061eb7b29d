"""Binds a target, a drafter and an accept rule, refuses illegal pairs, and generates text.

Knows nothing about commands, files of prompts or measurements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core import (
    Completion,
    Drafter,
    Noise,
    RequestOutput,
    Row,
    SamplingParams,
    Stage,
    Usage,
)
from paceline.decode.accept import match, rejection
from paceline.decode.loop import Session, run
from paceline.decode.text import Detokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
_RULES = {"match": match, "rejection": rejection}


def check_accept(name: str) -> None:
    """ValueError for a name that is no accept rule."""
    if name not in _RULES:
        raise ValueError(f"accept {name!r} is not one of {', '.join(_RULES)}")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A target with or without a drafter, ready to generate. ``drafter`` None is plain decoding.

    ``accept`` is ``match`` (any draft) or ``rejection`` (drafts sampled from a known law).

    Raises:
        ValueError: an illegal pair, with the reason.
    """

    target: Any
    drafter: Drafter | None = None
    accept: str = "match"
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        check_accept(self.accept)
        if self.accept == "rejection":
            self._check_law()
        taps = self.drafter.taps if self.drafter else ()
        if bad := [tap for tap in taps if not 0 <= tap < self.target.num_layers]:
            raise ValueError(f"the drafter taps layers {bad}, which the target does not have")

    def _check_law(self) -> None:
        """ValueError unless what is verified was sampled from a law that is handed over."""
        known = self.drafter is not None and self.drafter.samples
        looks, drawn = None, False
        for stage in self.stages:
            if stage.law == "samples":
                # A second drawing stage has the noise of the first: what looked at that one's tokens
                # has looked at this one's.
                known, looks, drawn = True, looks if drawn else None, True
            elif stage.law == "chooses":
                known, looks = False, stage
        if looks is not None:
            raise ValueError(
                f"accept='rejection' needs the law of every draft, and stage "
                f"{getattr(looks, 'name', looks)!r} looks at tokens that were sampled, which "
                "changes it; leave the stage out, or use accept='match'"
            )
        if not known:
            raise ValueError(
                "accept='rejection' needs a drafter that samples its drafts and gives their "
                "law; make the drafter with samples=True, or use accept='match'"
            )

    @property
    def _mixes(self) -> bool:
        """Whether what is sampled for one row decides what is verified of another."""
        return self.accept == "rejection" and any(stage.law == "mixes" for stage in self.stages)

    def plain(self) -> Pipeline:
        """The same target without a drafter: the baseline."""
        return replace(self, drafter=None, accept="match", stages=())

    def session(self, slots: int) -> Session:
        """A fresh decode session for up to ``slots`` rows at a time."""
        return Session(
            target=self.target,
            drafter=self.drafter,
            accept=_RULES[self.accept],
            stages=self.stages,
            slots=slots,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text or messages go through the chat template, ids stay.

        Text goes in as it is where the tokenizer has no chat template.
        """
        tokenizer = self.target.tokenizer
        if not isinstance(prompt, str):
            prompt = _listed(prompt)
            if all(map(_is_token, prompt)):
                return [operator.index(token) for token in prompt]
            if not all(isinstance(message, Mapping) for message in prompt):
                raise ValueError("the prompt is neither text nor token ids nor messages")
        if not prompt or not (
            isinstance(prompt, str) or any(message.get("content") for message in prompt)
        ):
            raise ValueError("the prompt is empty")
        if tokenizer is None:
            raise ValueError("this target has no tokenizer; give token ids")
        if isinstance(prompt, str):
            if not tokenizer.chat_template:
                return list(tokenizer(prompt)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        return list(
            tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=False
            )
        )

    def check(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> None:
        """ValueError that names the first request which cannot be served; generates nothing."""
        for _ in self._requests(prompts, params):
            pass

    def rows(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Row]:
        """One row per request and sample. ValueError names the request that cannot be served."""
        return [
            self._row(request, sample, ids, chosen)
            for request, (ids, chosen) in enumerate(self._requests(prompts, params))
            for sample in range(chosen.n)
        ]

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[list[int], SamplingParams]]:
        """Every request's checked ids and parameters."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        for request, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            try:
                ids = self.encode(prompt)
                self._check(ids, chosen)
            except ValueError as error:
                raise ValueError(f"request {request}: {error}") from error
            yield ids, chosen

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        limit, vocab = self.target.max_length, self.target.vocab_size
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the model's context is {limit} and one must "
                "be left for the reply"
            )
        for where, tokens in (
            ("the prompt", ids),
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if bad := [token for token in tokens if not 0 <= token < vocab]:
                raise ValueError(f"{where} names token {bad[0]}, which is outside 0..{vocab - 1}")
        if params.stop and self.target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer")

    def _row(self, request: int, sample: int, ids: list[int], params: SamplingParams) -> Row:
        # Sample 0 uses the seed itself, so that it equals the same request with n = 1.
        seed = None if params.seed is None else params.seed + 1_000_003 * sample
        # A config may name EOS ids that the head does not have; no reply can contain them.
        ends = () if params.ignore_eos else self.target.eos_ids
        eos = frozenset(token for token in ends if 0 <= token < self.target.vocab_size)
        tokenizer = self.target.tokenizer
        row = Row(
            slot=-1,
            tokens=list(ids),
            prompt_length=len(ids),
            params=params,
            noise=Noise(seed, request if self._mixes else None),
            stop_ids=eos | frozenset(params.stop_token_ids),
            limit=min(len(ids) + params.max_tokens, self.target.max_length),
            request=request,
            sample=sample,
            text=None if tokenizer is None else Detokenizer(tokenizer, params.stop),
        )
        if params.max_tokens == 0:
            row.finish_reason = "length"
        return row

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = 8,
    ) -> list[RequestOutput]:
        """Generate for all prompts, ``batch_size`` rows at a time; results in prompt order."""
        many: Sequence[Any] = [prompts] if isinstance(prompts, str) else _listed(prompts)
        if many and (isinstance(many[0], Mapping) or _is_token(many[0])):
            many = [many]
        rows = self.rows(many, params or SamplingParams())
        for _ in run(self.session(max(1, min(batch_size, len(rows)))), rows):
            pass
        return outputs_of(rows)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text pieces of one reply as they are certain; never splits a character."""
        rows = self.rows([prompt], params or SamplingParams())
        if len(rows) != 1:
            raise ValueError("stream serves one sample; n must be 1")
        if rows[0].text is None:
            raise ValueError("this target has no tokenizer; use generate")
        for row, _ in run(self.session(1), rows):
            piece = row.text.take() if row.finish_reason is None else row.text.finish()
            if piece:
                yield piece


def _listed(prompt: Any) -> list[Any]:
    """A sequence, numpy array or tensor as a list."""
    return list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)


def _is_token(value: Any) -> bool:
    """Whether it is one id; arrays and tensors of one element are sequences."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def outputs_of(rows: Sequence[Row]) -> list[RequestOutput]:
    """Finished rows gathered into one result per request."""
    requests: dict[int, list[Row]] = {}
    for row in rows:
        requests.setdefault(row.request, []).append(row)
    return [_output(samples) for _, samples in sorted(requests.items())]


def _output(samples: list[Row]) -> RequestOutput:
    completions = []
    for row in samples:
        if row.text is not None:
            row.text.finish()
        completions.append(
            Completion(
                index=row.sample,
                text="" if row.text is None else row.text.text,
                token_ids=row.output,
                finish_reason=row.finish_reason or "length",
                stop_reason=row.stop_reason,
                logprobs=None if row.params.logprobs is None else row.logprobs,
                rounds=row.rounds,
            )
        )
    prompt = samples[0].tokens[: samples[0].prompt_length]
    total = sum(len(completion.token_ids) for completion in completions)
    return RequestOutput(
        prompt_token_ids=prompt,
        outputs=completions,
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=total),
    )
