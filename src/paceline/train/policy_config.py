"""Settings of on-policy training: where rollouts come from and what is learnt from them.

Does not know how either works.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.train.checks import check_types

_SOURCES = ("rollout", "replay")
_ANCHORS = ("drawn", "recorded", "shuffled")
_CLIPS = ("none", "repo", "vocab_entry")
_DIRECTIONS = ("forward", "reverse")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Distil:
    """Settings of the losses adaflash, draft_opd and draft_opd_code.

    adaflash: ``alpha`` weighs cross-entropy with the target's most probable token, the rest reverse KL
    at ``temperature``, cut at ``clip`` as ``clip_mode`` says (`policy_losses.adaflash_rule`).

    draft_opd: accepted drafts weigh ``accepted`` and rejected ones ``rejected``, which decay by
    ``decay`` a slot; ``directions`` of their KL divergences, accepted first. forward is KL(target ||
    drafter). draft_opd_code takes the weights and the decay.
    """

    alpha: float = 0.8
    temperature: float = 1.0
    clip: float = 0.01
    clip_mode: str = "repo"
    accepted: float = 1.0
    rejected: float = 1.0
    decay: float = 0.8
    directions: tuple[str, str] = ("forward", "reverse")

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.alpha <= 1 or not 0 < self.decay <= 1:
            raise ValueError("distil: alpha is 0 to 1, decay above 0 and at most 1 (none)")
        if self.temperature <= 0 or self.clip <= 0:
            raise ValueError("distil: temperature and clip are above 0")
        if min(self.accepted, self.rejected) < 0 or self.accepted + self.rejected == 0:
            raise ValueError("distil: accepted and rejected are at least 0, and not both 0")
        _one_of("distil: clip_mode", self.clip_mode, _CLIPS)
        for direction in self.directions:
            _one_of("distil: a direction", direction, _DIRECTIONS)


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Rows are replies of the target, decoded with the drafter in training.

    ``source`` rollout decodes the prompts of the training rows again and again; replay takes the records
    of an earlier rollout, the folder ``replay_from``. Blocks stand at anchors ``drawn`` anew, or where
    the rounds were (``recorded``; ``shuffled`` is the ablation: the same runs at other places).

    Rollouts write ``records_per_shard`` replies of up to ``reply_tokens`` at ``temperature``, ``slots``
    at a time. Weights are published every ``publish_every`` steps. Without ``asynchronous`` a step that
    lacks rows rolls them out; with it another process does (`rollout.roll_out_forever`), at most
    ``max_ahead`` replies ahead. Replies drafted by weights more than ``max_stale`` versions old are left
    out and counted; None: all are taken. What was trained is deleted, unless ``keep_records``, for a
    later replay.
    """

    source: str = "rollout"
    replay_from: str | None = None
    anchors: str = "drawn"
    temperature: float = 0.0
    reply_tokens: int = 256
    slots: int = 8
    records_per_shard: int = 16
    publish_every: int = 50
    asynchronous: bool = False
    max_ahead: int = 64
    max_stale: int | None = 4
    keep_records: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        _one_of("on_policy: source", self.source, _SOURCES)
        _one_of("on_policy: anchors", self.anchors, _ANCHORS)
        for name in ("reply_tokens", "slots", "records_per_shard", "publish_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"on_policy: {name} must be at least 1")
        if (self.source == "replay") != (self.replay_from is not None):
            raise ValueError(
                "on_policy: replay_from names the records of source=replay, only there"
            )
        if self.temperature != 0 and self.temperature < 1e-5:
            raise ValueError("on_policy: temperature is 0 (greedy) or at least 1e-5")
        if self.max_ahead < 2 * self.records_per_shard:
            raise ValueError("on_policy: max_ahead must be at least two shards (records_per_shard)")
        if self.max_stale is not None and self.max_stale < 0:
            raise ValueError("on_policy: max_stale is at least 0, or null for any age")
