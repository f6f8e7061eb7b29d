"""The nouns that cross rooms: drafts, verdicts, rows, sampling parameters, results.

Knows nothing about any model, tokenizer or drafter.

Shape suffixes, used in the whole code base: B rows (sequences), S sequence length, N draft nodes,
M = N + 1 scored nodes (index 0 = root), T packed nodes of all rows, K draft depth, A training
anchors, L layers, F tapped feature width, D hidden width, V vocabulary, C context tokens.
"""

from __future__ import annotations

import hashlib
import math
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _whole(name: str, value: Any) -> int:
    """An int, numpy's included; True is no number of tokens."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number; got {value!r}") from None


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {value!r}")
    return float(value)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} must be a sequence; got {value!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request turns logits into tokens and when it stops.

    Temperature 0 (the default) is greedy decoding: a one-hot target distribution. Penalties follow
    the usual meanings: ``repetition_penalty`` divides (or multiplies, if negative) the logits of
    every token seen in prompt or output; ``presence_penalty`` and ``frequency_penalty`` are
    subtracted for tokens seen in the output only.

    A request whose target logits turn out NaN or infinite ends its whole batch with a ValueError
    that names the request.

    Args:
        temperature: 0 for greedy, else at least 1e-5.
        logprobs: None for none; k >= 0 for the log-probability of each emitted token under the
            model's *unmodified* logits plus the k most probable alternatives.
        stop: strings that end the reply; the text is cut before the string, the token ids
            include the token that completed it. Special tokens are no part of the text, so a stop
            string never matches one; name them in ``stop_token_ids``.
        seed: same seed, same ids, alone or in any batch (a stage of law ``mixes`` under rejection:
            in the same batch). None draws a fresh one.
        logits_processors: callables ``(input_ids [1, S], scores [1, V]) -> scores [1, V]`` as in
            transformers; applied at every draft node along that node's own path. They must be
            pure functions of their arguments.

    Raises:
        ValueError: a value of the wrong type or outside its range; the message says which.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    logits_processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _items("stop", stop))
        object.__setattr__(
            self, "logits_processors", _items("logits_processors", self.logits_processors)
        )
        ids = _items("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", tuple(_whole("stop_token_ids", i) for i in ids))
        for name in ("top_k", "min_tokens", "max_tokens", "logprobs", "seed", "n"):
            value = getattr(self, name)
            if value is not None or name not in ("logprobs", "seed"):
                object.__setattr__(self, name, _whole(name, value))
        for name in _FLOATS:
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        if self.logit_bias is not None:
            bias = dict(self.logit_bias).items()
            whole = {_whole("logit_bias", k): _finite("logit_bias", v) for k, v in bias}
            object.__setattr__(self, "logit_bias", whole)
        self._check_ranges()

    def _check_ranges(self) -> None:
        checks: list[tuple[bool, str]] = [
            (self.temperature >= 0.0, "temperature must be >= 0 (0 is greedy)"),
            (
                self.temperature == 0.0 or self.temperature >= 1e-5,
                "temperature above 0 must be at least 1e-5; use 0 for greedy",
            ),
            (self.top_k >= 0, "top_k must be >= 0 (0 keeps every token)"),
            (0.0 < self.top_p <= 1.0, "top_p must be in (0, 1]"),
            (0.0 <= self.min_p <= 1.0, "min_p must be in [0, 1]"),
            (0.0 < self.repetition_penalty, "repetition_penalty must be > 0"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty must be in [-2, 2]"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty must be in [-2, 2]"),
            (self.max_tokens >= 0, "max_tokens must be >= 0"),
            (self.min_tokens >= 0, "min_tokens must be >= 0"),
            (self.min_tokens <= self.max_tokens, "min_tokens must not exceed max_tokens"),
            (all(isinstance(s, str) and s for s in self.stop), "stop strings must not be empty"),
            (self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs must be in [0, 100]"),
            (self.n >= 1, "n must be >= 1"),
        ]
        for holds, message in checks:
            if not holds:
                raise ValueError(f"{message}; got {getattr(self, message.split()[0])!r}")

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on which tokens came before, beyond the model."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Noise:
    """Uniform numbers of one request, addressed by (stream, position).

    The number for a position does not depend on how many tokens were drafted or who else is in
    the batch. So a sampled reply under the ``match`` rule is token for token the reply of plain
    decoding with the same seed, and a row alone equals the row in any batch. With ``request`` rows
    of one seed have numbers of their own: where what others sampled decides what is verified of a
    row, it must tell nothing of the row's own numbers.
    """

    _CHUNK = 256

    def __init__(self, seed: int | None, request: int | None = None) -> None:
        seed = secrets.randbits(63) if seed is None else seed
        self.seed = f"{seed}" if request is None else f"{seed}/{request}"
        self._streams: dict[str, tuple[np.random.Generator, list[float]]] = {}

    def exponentials(self, stream: str, position: int, count: int) -> np.ndarray[Any, Any]:
        """Standard exponential numbers [count], fp32, above 0; the same for the same address."""
        key = hashlib.blake2b(f"{self.seed}/{stream}/{position}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        numbers = generator.standard_exponential(count, dtype=np.float32)
        return np.maximum(numbers, np.finfo(np.float32).tiny)

    def uniform(self, stream: str, position: int) -> float:
        """A number in [0, 1); the same for the same (seed, stream, position)."""
        if stream not in self._streams:
            # Every bit of the seed counts: it is hashed into the generator's 128-bit key.
            key = hashlib.blake2b(f"{self.seed}/{stream}".encode(), digest_size=16).digest()
            philox = np.random.Philox(key=int.from_bytes(key, "little"))
            self._streams[stream] = (np.random.Generator(philox), [])
        generator, numbers = self._streams[stream]
        while position >= len(numbers):
            numbers += generator.random(self._CHUNK).tolist()
        return numbers[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One verify round of one row, after trimming at EOS, stop and length limits."""

    drafted: int  # draft nodes the target scored
    accepted: int  # accepted draft tokens that were committed
    committed: int  # tokens committed: accepted plus the bonus token, unless trimmed


@dataclass(slots=True, kw_only=True)
class Row:
    """A live sequence. The loop owns ``tokens`` and ``features``; commit owns the rest."""

    slot: int  # its place in every cache
    tokens: list[int]  # prompt and committed output; the last one has no K/V yet
    prompt_length: int
    params: SamplingParams
    noise: Noise
    stop_ids: frozenset[int]  # EOS ids and stop_token_ids that end this row
    limit: int  # tokens may not grow longer than this (max_tokens and the context)
    request: int = 0  # index of the request, and of the sample within it
    sample: int = 0
    features: list[Tensor] = field(default_factory=list)  # [c, F] each, not yet given to drafter
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length"; None while live
    stop_reason: int | str | None = None  # the stop id or string that ended it
    text: Any = None  # incremental detokenizer (decode/text.py), None without a tokenizer

    @property
    def output(self) -> list[int]:
        """The committed reply ids."""
        return self.tokens[self.prompt_length :]

    @property
    def budget(self) -> int:
        """How many draft tokens could be committed this round, besides the bonus token."""
        return max(0, self.limit - len(self.tokens) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposed tokens for B rows; a chain is a tree with one child per node.

    The root (last committed token) is not listed; parent -1 means child of the root. Parents come
    before their children. Entries at or beyond ``sizes_B`` are padding.
    """

    tokens_BN: Tensor  # int64, cpu
    parents_BN: Tensor  # int64, cpu
    sizes_B: list[int]
    probs_BNV: Tensor | None = None  # law each token was *sampled* from; None: chosen freely
    hints: Mapping[str, Any] = field(default_factory=dict)  # for stages; accept rules never read

    @staticmethod
    def chain(
        tokens_BN: Tensor, sizes_B: Sequence[int], probs_BNV: Tensor | None = None, **hints: Any
    ) -> Draft:
        """A draft in which every token continues the one before it."""
        B, N = tokens_BN.shape
        parents = torch.arange(-1, N - 1).expand(B, N)
        return Draft(
            tokens_BN=tokens_BN,
            parents_BN=parents,
            sizes_B=list(sizes_B),
            probs_BNV=probs_BNV,
            hints=hints,
        )

    @staticmethod
    def empty(B: int) -> Draft:
        """No drafts at all: a round of plain decoding."""
        return Draft.chain(torch.zeros(B, 0, dtype=torch.int64), [0] * B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an accept rule decided, per row.

    ``tokens[b]`` are the accepted draft tokens and then the bonus token; ``paths[b]`` the accepted
    draft nodes in order (indices into ``Draft.tokens_BN[b]``), one fewer than the tokens.
    """

    tokens: list[list[int]]
    paths: list[list[int]]

    @property
    def accepted_B(self) -> list[int]:
        """Number of accepted draft tokens per row."""
        return [len(path) for path in self.paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """What a drafter and the stages may look at for a batch of live rows.

    ``state`` is the drafter's own (made by ``Drafter.new_state``), one per decode session, so that
    nothing leaks from one request to the next.
    """

    rows: list[Row]
    state: Any


class Law(Protocol):
    """Target distributions of T packed nodes; accept rules see nothing else."""

    def sample(self, uniforms: Sequence[float]) -> list[int]:
        """One token per node by inverse CDF of the given numbers in [0, 1)."""

    def probs(self, node: int) -> Tensor:
        """The dense distribution [V] of one packed node, fp32 on the logits' device."""


class Drafter(Protocol):
    """Anything that proposes tokens. One object may serve many sessions; state is separate."""

    name: str
    taps: tuple[int, ...]  # target layers whose outputs it wants, in the order of concatenation
    samples: bool  # whether it fills Draft.probs_BNV at temperature > 0

    def new_state(self, slots: int) -> Any:
        """Fresh per-session state for rows in slots 0 .. slots-1."""

    def propose(self, ctx: DraftContext) -> Draft:
        """Draft for every live row; consumes the new ``row.features`` of all of them."""

    def release(self, state: Any, slot: int) -> None:
        """Forget the row in this slot; another request may take it."""


class Stage(Protocol):
    """Changes a draft before it is verified.

    ``law`` says what that does to ``Draft.probs_BNV``: ``keeps`` (no token is changed, and what is cut
    depends on nothing that was sampled this round), ``mixes`` (the same, but it depends on other rows:
    they need noise of their own), ``samples`` (every token is drawn anew, with its law) or ``chooses``
    (tokens are changed or looked at: the result has no law).
    """

    law: str

    def __call__(self, draft: Draft, ctx: DraftContext) -> Draft:
        """The changed draft; rows as in the one given."""


AcceptRule = Callable[[Draft, Law, Sequence[Row]], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural log, unmodified logits) at one emitted token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), most probable first


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished reply. ``token_ids`` include the EOS or stop token that ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    rounds: list[Round]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts that agree with the ids."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All ``n`` samples of one request."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    usage: Usage
