"""The full description of a training run: one frozen, keyword-only dataclass.

Does not know how training works; recipes return it and `fit` reads it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.train.checks import check_names, check_types
from paceline.train.policy_config import Distil, OnPolicy

_AT_LEAST_ONE = (
    "steps",
    "rows_per_step",
    "micro_batches",
    "max_tokens",
    "min_reply",
    "rows_per_shard",
    "eval_every",
    "eval_rows",
)
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda v: v > 0, "above 0"),
    "gamma": (lambda v: v > 0, "above 0"),
    "gamma_step": (lambda v: v >= 0, "at least 0"),
    "clip": (lambda v: v > 0, "above 0"),
    "head_lr": (lambda v: v is None or v > 0, "above 0, or null for lr"),
    "warmup": (lambda v: 0 <= v <= 1, "a share of the steps, 0 to 1"),
    "betas": (lambda v: all(0 <= b < 1 for b in v), "each at least 0 and below 1"),
    "weight_decay": (lambda v: v >= 0, "at least 0"),
    "held_out_share": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "checkpoint_seconds": (lambda v: v >= 0, "at least 0"),
    "seed": (lambda v: v >= 0, "at least 0"),
    "taps": (lambda v: v and len(set(v)) == len(v), "different layers, at least one"),
    "draft_vocab_size": (lambda v: v is None or v > 0, "above 0, or null for all"),
    "cache_gb": (lambda v: v is None or v >= 0, "at least 0 (nothing is cached)"),
}
FRESH_WEIGHT = 3.0  # of a slot that block expansion adds, against 1 for those that were there
_CHOICES = {
    "fusion": ("fc", "layerwise"),
    "compute": ("auto", "bf16", "fp32"),
    "parallel": ("ddp", "fsdp"),
    "loss": ("ce", "kl", "tv", "adaflash", "draft_opd", "draft_opd_code"),
}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the run with one block length: ``share`` of the steps.

    ``words`` trains against the head's rows of that many most frequent words alone, which is cheaper;
    the head is frozen, so a later phase adds the others at no loss. None: the whole draft vocabulary.

    ``widened_from`` marks a phase of block expansion: slots below it weigh 1 and the fresh ones behind it
    `FRESH_WEIGHT`, in place of the run's decay (DBloom, arXiv 2608.30427: with a decay the tail never
    learns). ``lr_share`` multiplies the learning rate, for stages with one of their own.
    """

    share: float
    block_size: int
    anchors_per_row: int
    words: int | None = None
    widened_from: int | None = None
    lr_share: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.widened_from is not None and not 2 <= self.widened_from < self.block_size:
            raise ValueError(
                f"widened_from of a phase is {self.widened_from}: the block before widening to "
                f"{self.block_size}, at least 2 and less than that"
            )
        if self.lr_share <= 0:
            raise ValueError("lr_share of a phase is above 0")
        if self.block_size < 2 or self.anchors_per_row < 1 or self.share <= 0:
            raise ValueError(
                "a phase needs block_size >= 2 (anchor included), anchors_per_row >= 1, share > 0"
            )
        if self.words is not None and self.words < 1:
            raise ValueError("words of a phase must be at least 1, or null for all")


@dataclass(frozen=True, kw_only=True)
class Refiner:
    """A bias head that is trained with the drafter: ``kind`` xpress or markov (drafters/heads.py).

    Its loss is that of three kinds of logits: with the text's own previous tokens (weight 1), with the
    drafter's own, resolved in ``free_sweeps`` sweeps (``consistency``, shared among them), and the base
    logits (``base``), which are the first guess. Each is (1 - tv) cross-entropy + tv total variation.
    ``passes`` is how many sweeps drafting takes unless told otherwise. A Markov head walks: it has no
    sweeps of its own to learn from, so ``free_sweeps`` is 0 for it.
    """

    kind: str
    rank: int = 128
    mlp_ratio: int = 2
    passes: int = 4
    free_sweeps: int = 1
    consistency: float = 0.3
    base: float = 0.6
    tv: float = 0.5

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind not in ("xpress", "markov"):
            raise ValueError(f"refiner kind {self.kind!r} is not xpress or markov")
        if min(self.rank, self.mlp_ratio, self.passes) < 1 or self.free_sweeps < 0:
            raise ValueError("a refiner's rank, mlp_ratio and passes are at least 1, its sweeps 0")
        if not 0 <= self.tv <= 1 or self.consistency < 0 or self.base < 0:
            raise ValueError("a refiner's tv is a share, its consistency and base at least 0")
        if self.kind == "markov" and self.free_sweeps:
            raise ValueError("a markov refiner walks through the block: set free_sweeps to 0")


@dataclass(frozen=True, kw_only=True)
class LengthHead:
    """AdaFlash's length head behind the drafter, trained on what the drafts of a block are worth.

    ``alone`` trains nothing else: the drafter of ``init_from``, its words and a refiner it may have stay
    as they are.
    """

    bottleneck: int = 64
    alone: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.bottleneck < 1:
            raise ValueError("a length head's bottleneck is at least 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the result of a run.

    ``gamma`` is the decay of the position weights exp(-(k - 1) / gamma); it grows by ``gamma_step`` with
    every pass over the rows (DFlare: early slots first, the hard tail later). ``fusion`` is the fusing
    matrix (fc) or DFlare's mixture of the taps for each layer (layerwise, perhaps with ``tap_norm``),
    ``split_kv`` gives the context keys and values of their own. ``init_layers`` are target
    layers whose weights start the draft layers, one each; without them the ``layers`` draft layers
    start at random. ``draft_vocab_size`` None trains the full vocabulary. ``init_from`` is a drafter
    folder to start from instead. ``loss`` is ce, the cross-entropy of the text; or kl or tv,
    distances to the target's distribution (`distance_rule`), for which the target's layers behind the
    last tap run once more; or adaflash, draft_opd or draft_opd_code, with the settings in ``distil``.
    ``on_policy`` takes rows from rollouts of this drafter, of the prompts in ``data``. ``refiner`` and
    ``length_head`` add heads; ``head_lr`` is theirs if it is not ``lr``.

    ``rows_per_step`` rows make one optimiser step, however many processes share them and into
    however many ``micro_batches`` each process divides its own. ``compute`` is what products are
    taken in (masters are always float32); auto is bf16 wherever the machine has instructions for
    it. ``cache_gb`` bounds the features kept on disk (10^9 bytes; None: all of them).
    ``recompute`` keeps no activations inside draft layers for the backward pass. ``parallel``
    matters under torchrun only: whole copies (ddp) or shards (fsdp) of masters and optimiser.

    Raises ValueError naming the field for a value of a wrong type or range.
    """

    target: str
    data: tuple[str, ...]
    run_dir: str
    taps: tuple[int, ...]
    phases: tuple[Phase, ...]
    mask_token_id: int
    steps: int
    init_layers: tuple[int, ...] = ()
    layers: int | None = None  # None: as many as init_layers
    block_size: int = 8
    draft_vocab_size: int | None = None
    init_from: str | None = None
    rows_per_step: int = 4
    micro_batches: int = 1
    compute: str = "auto"
    recompute: bool = False
    parallel: str = "ddp"
    fusion: str = "fc"
    split_kv: bool = False
    tap_norm: bool = False
    refiner: Refiner | None = None
    length_head: LengthHead | None = None
    lr: float = 2.5e-3
    head_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.04
    clip: float = 1.0
    gamma: float = 3.0
    gamma_step: float = 0.0
    loss: str = "ce"
    distil: Distil = Distil()
    on_policy: OnPolicy | None = None
    seed: int = 0
    max_tokens: int = 704
    min_reply: int = 4
    held_out_share: float = 0.02
    rows_per_shard: int = 128
    cache_gb: float | None = None
    features_dir: str | None = None
    eval_every: int = 500
    eval_rows: int = 64
    checkpoint_seconds: float = 180.0

    def __post_init__(self) -> None:
        check_types(self)
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, not one of {', '.join(known)}"
                )
        for name, (fits, wanted) in _RANGES.items():
            if not fits(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")
        if self.tap_norm and self.fusion != "layerwise":
            raise ValueError("tap_norm belongs to fusion=layerwise")
        if self.draft_layers < 1:
            raise ValueError("set layers (a random start) or init_layers (target layers to copy)")
        if self.init_layers and self.draft_layers != len(self.init_layers):
            raise ValueError(
                f"layers is {self.layers}, but init_layers names {len(self.init_layers)}; "
                "set init_layers=[] for a random start"
            )
        if not self.phases or abs(sum(p.share for p in self.phases) - 1) > 1e-6:
            raise ValueError("the shares of the phases must sum to 1")
        if (longest := max(phase.block_size for phase in self.phases)) > self.max_tokens:
            raise ValueError(
                f"blocks of {longest} are longer than a text (max_tokens={self.max_tokens})"
            )
        if self.phases[-1].block_size != self.block_size:
            last = json.dumps(
                asdict(dataclasses.replace(self.phases[-1], block_size=self.block_size))
            )
            raise ValueError(
                f"the last phase has blocks of {self.phases[-1].block_size}, the drafter of "
                f"{self.block_size}; set both, such as block_size={self.phases[-1].block_size} or "
                f"phases=[{last}]"
            )
        if self.refiner is not None and any(p.block_size != self.block_size for p in self.phases):
            raise ValueError("a refiner belongs to one block size: give every phase block_size")
        if self.refiner is not None and self.loss != "ce":
            raise ValueError("a refiner has a loss of its own (its tv): leave loss at ce")
        if self.length_head is not None and self.length_head.alone and self.init_from is None:
            raise ValueError("a length head alone needs a drafter to start from: set init_from")
        self._check_policy()
        if not self.data:
            raise ValueError("name at least one corpus file (--data)")

    def _check_policy(self) -> None:
        policy, judged = self.on_policy, self.loss.startswith("draft_opd")
        if judged and (policy is None or policy.anchors == "drawn"):
            raise ValueError(
                f"loss {self.loss} looks at drafts that the target judged: set on_policy with anchors "
                "recorded (or shuffled, the ablation)"
            )
        if policy is None:
            return
        if policy.source == "rollout" and self.rows_per_step > policy.records_per_shard:
            raise ValueError(
                f"on_policy: records_per_shard is {policy.records_per_shard}, but a step takes "
                f"rows_per_step={self.rows_per_step}"
            )
        if policy.anchors != "drawn" and any(p.block_size != self.block_size for p in self.phases):
            raise ValueError("recorded rounds have one block size: give every phase block_size")

    @property
    def draft_layers(self) -> int:
        """The number of draft layers."""
        return len(self.init_layers) if self.layers is None else self.layers

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss looks at the target's distribution along the text."""
        known = self.loss in ("kl", "tv", "adaflash")
        refined = self.refiner is not None and self.refiner.tv > 0
        return known or (refined and not self.heads_only)

    @property
    def heads_only(self) -> bool:
        """Whether the drafter and its refiner stay as they are."""
        return self.length_head is not None and self.length_head.alone

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with some fields changed; ValueError names an unknown key's nearest field."""
        check_names(changes, TrainConfig, "setting")
        return dataclasses.replace(self, **changes)

    def phase_at(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        done = 0.0
        for phase in self.phases:
            done += phase.share
            if step < round(done * self.steps):
                return phase
        return self.phases[-1]


def parse_settings(pairs: list[str]) -> Mapping[str, Any]:
    """``key=value`` pairs from a command line; values are JSON, or text if they are not.

    ``phases`` is a list of objects with the fields of ``Phase``; ``refiner``, ``length_head``,
    ``distil`` and ``on_policy`` are objects with the fields of those classes.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"setting {pair!r} is not key=value")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if key in found:
            raise ValueError(f"{key} is set twice")
        if key == "phases":
            value = _phases(value)
        if key in _OBJECTS and value is not None:
            value = _object(key, value)
        found[key] = tuple(value) if isinstance(value, list) else value
    return found


_OBJECTS: dict[str, type] = {
    "refiner": Refiner,
    "length_head": LengthHead,
    "distil": Distil,
    "on_policy": OnPolicy,
}


def _object(key: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a JSON object, such as {key}={json.dumps(_EXAMPLE[key])}")
    check_names(value, _OBJECTS[key], f"key of {key}")
    value = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
    try:
        return _OBJECTS[key](**value)
    except TypeError as error:
        raise ValueError(f"{key}: {error}") from None


_EXAMPLE = {
    "refiner": {"kind": "xpress"},
    "length_head": {"bottleneck": 64},
    "distil": {"alpha": 0.8},
    "on_policy": {"source": "rollout"},
}


def _phases(value: Any) -> list[Phase]:
    names = [
        field.name for field in dataclasses.fields(Phase) if field.default is dataclasses.MISSING
    ]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"phases must be a JSON list of objects with {', '.join(names)}")
    for item in value:
        check_names(item, Phase, "key of phases")
        if missing := [name for name in names if name not in item]:
            raise ValueError(f"phases: an object lacks {', '.join(missing)}")
    return [Phase(**item) for item in value]
