"""The drafter in training: float32 masters, what computes with them, its optimiser, its frozen ends.

Does not know steps, files or logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.drafters.dflash import (
    HEADS,
    DFlashConfig,
    DFlashModule,
    offsets_of,
    vocabulary_fingerprint,
)
from paceline.target import Target
from paceline.train.blocks import Blocks, block_states
from paceline.train.capture import LastStates
from paceline.train.config import TrainConfig
from paceline.train.corpus import count_tokens, draft_vocabulary
from paceline.train.features import FeatureRow, stack_features
from paceline.train.ranks import Ranks
from paceline.train.start import (
    check_head,
    drafter_shape,
    embedding_table,
    feature_scales,
    kept_vocabulary,
    start_module,
)

Finish = Callable[[Tensor, DFlashModule], Tensor]
"""`finish(states [n, b, D], drafter)`: what a forward returns, with the drafter's heads at hand."""


class DraftStates(nn.Module):
    """Blocks in, what ``finish`` makes of their states out, computed in ``dtype`` from float32 masters.

    The masters are this module's parameters, so that DDP and FSDP see, reduce and shard float32.
    """

    def __init__(
        self, drafter: DFlashModule, embedding_VD: Tensor, dtype: torch.dtype, recompute: bool
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.embedding_VD = embedding_VD  # frozen: neither parameter nor buffer
        self.recompute = recompute
        # FSDP casts by itself; see `spread`.
        self.cast_to = None if dtype == torch.float32 else dtype

    def forward(self, blocks: Blocks, features_RSF: Tensor, finish: Finish) -> Tensor:
        """What ``finish`` returns; n = R * A blocks."""
        if self.cast_to is not None:
            use_copies(self.drafter, self.cast_to)
        states = block_states(
            self.drafter, blocks, features_RSF, self.embedding_VD, recompute=self.recompute
        )
        return finish(states.view(-1, blocks.block_size, states.shape[-1]), self.drafter)


def use_copies(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute with copies of its parameters; gradients reach the parameters.

    A copy is an attribute of the parameter's name, which Python finds before the parameter. Unlike
    `torch.func.functional_call` it is still there when checkpointing runs a layer again; unlike
    autocast it is made once a step, and activations keep their dtype.
    """
    for part in module.modules():
        for name, master in part.named_parameters(recurse=False):
            part.__dict__[name] = master.to(dtype)


@dataclass(frozen=True)
class Head:
    """Rows of the target's frozen head: of the draft vocabulary, or of its most frequent words."""

    rows_VD: Tensor
    to_draft: Tensor  # [V] row of a target id, -100 for one that has none
    ids_V: Tensor  # [V'] target ids of the rows
    places_V: Tensor | None = (
        None  # [V'] where the rows stand in the draft vocabulary; None: in order
    )

    def labels(self, blocks: Blocks) -> Tensor:
        """Labels as rows [R, A, k]; -100 where a draft could never be right."""
        known = blocks.labels_RAk.clamp_min(0)
        return torch.where(blocks.labels_RAk >= 0, self.to_draft[known], -100)

    def readout(self, refiner: Any) -> Tensor:
        """A refiner's last matrix [V', r] for these rows."""
        weight: Tensor = refiner.readout.weight
        return weight if self.places_V is None else weight[self.places_V]


@dataclass(kw_only=True)
class Trainee:
    """A drafter in training. ``model`` is ``states`` itself, or what DDP or FSDP made of it.

    Features are divided by ``rms_F``, the root mean square of each tapped dimension, before the
    drafter sees them: a few dimensions would drown the others. `fused` undoes it in the weights. A
    drafter that mixes taps (layerwise fusion) has no weight to undo it in: there it is 1.
    """

    shape: DFlashConfig
    states: DraftStates
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rms_F: Tensor
    head: Head
    vocabulary: Tensor | None  # target ids [V'] of the draft vocabulary
    counts: npt.NDArray[np.int64]  # [V] how often the training replies have each target id
    ranks: Ranks
    rows: int = 0  # training rows: so many make a pass over the text
    totals: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("blocks", "positions", "seconds"), 0.0)
    )
    last: LastStates | None = None  # the target behind its last tap, if a distribution is taught
    frozen: Target | None = None  # the target, if it judges drafts again
    _short: Head | None = field(default=None, init=False, repr=False)
    _words: int = field(default=0, init=False, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """What products are taken in."""
        return self.head.rows_VD.dtype

    def head_of(self, words: int | None) -> Head:
        """The head for the most frequent ``words`` of the draft vocabulary; None: all of it."""
        if words is None or words >= len(self.head.rows_VD):
            return self.head
        if self._short is None or self._words != words:
            ids = torch.from_numpy(draft_vocabulary(self.counts, words))
            device = self.head.rows_VD.device
            rows = self.head.to_draft[ids].to(device)
            # Words of the whole text that an earlier drafter's vocabulary lacks are no rows.
            rows, ids = rows[rows >= 0], ids[(rows >= 0).cpu()]
            self._short = Head(
                rows_VD=self.head.rows_VD[rows].contiguous(),
                to_draft=row_of(ids, len(self.counts)),
                ids_V=ids.to(device),
                places_V=rows,
            )
            self._words = words
        return self._short

    def inputs(
        self, rows: Sequence[FeatureRow], blocks: Blocks, teach: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled features [R, S, F] of what the blocks see of each row, on the device.

        With ``teach`` also the states [R * A * k, D] that the target's head saw for each draft.
        """
        device, width = self.ranks.device, blocks.width
        found = stack_features(rows, width + blocks.block_size * teach).to(device)
        # In float32: `fused` divides the weights by these very numbers.
        scaled = (found[:, :width].float() / self.rms_F).to(self.dtype)
        if not teach:
            return scaled, None
        assert self.last is not None
        D = self.shape.hidden_size
        at = self.shape.target_layer_ids.index(self.last.after) * D
        states = self.last.run(found[..., at : at + D].to(self.dtype))
        each_row = torch.arange(len(rows), device=device)[:, None, None]
        return scaled, states[each_row, blocks.sources_RAk.to(device)].flatten(0, 2)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: processes exchange gradients at a step's ``last`` only."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            with nullcontext() if last else self.model.no_sync():
                yield
            return
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        yield

    @property
    def d2t(self) -> Tensor | None:
        """The draft vocabulary as a drafter folder stores it."""
        return None if self.vocabulary is None else offsets_of(self.vocabulary)


def row_of(ids_V: Tensor, vocab_size: int) -> Tensor:
    """Where each target id stands in ``ids_V``; -100 if nowhere. [V]"""
    rows = torch.full((vocab_size,), -100)
    rows[ids_V] = torch.arange(len(ids_V))
    return rows


def fused(masters: dict[str, Tensor], rms_F: Tensor) -> dict[str, Tensor]:
    """The weights of a drafter that sees raw features, from full masters of `DraftStates`."""
    plain = {name.removeprefix("drafter."): weight for name, weight in masters.items()}
    if "fc.weight" not in plain:  # a mixture of taps cannot undo it: it saw raw features
        return plain
    return plain | {"fc.weight": plain["fc.weight"] / rms_F.cpu()}


def make_trainee(
    config: TrainConfig,
    target: Any,
    rows: Sequence[FeatureRow],
    dtype: torch.dtype,
    *,
    ranks: Ranks | None = None,
    tokenizer: Any = None,
) -> Trainee:
    """Build the drafter, its masters and its optimiser at step 0, the same on every process."""
    ranks = ranks or Ranks()
    named = None if tokenizer is None else vocabulary_fingerprint(tokenizer)
    shape = replace(drafter_shape(config, target.config), vocabulary_fingerprint=named)
    judges = config.loss == "draft_opd"
    if config.needs_teacher or judges:
        check_head(target, torch.from_numpy(rows[0].row.tokens))
    last = LastStates(target, max(config.taps)) if config.needs_teacher else None
    # Rows of an on-policy run are captured for this alone.
    rms = feature_scales(rows[: 256 if config.on_policy is None else 32])
    if not rms.isfinite().all():
        raise ValueError("the target's tapped states hold NaN or infinity; try compute=fp32")
    drafter = start_module(config, shape, target, rows, rms).float()
    rms = _scaled(drafter, rms)
    head = target.get_output_embeddings().weight.detach().to(dtype)
    counts = count_tokens([item.row for item in rows], shape.vocab_size)
    vocabulary, to_draft = None, torch.arange(shape.vocab_size)
    if shape.draft_vocab_size is not None:
        vocabulary = kept_vocabulary(config, shape)
        if vocabulary is None:
            vocabulary = torch.from_numpy(draft_vocabulary(counts, shape.draft_vocab_size))
        head = head[vocabulary.to(head.device)]
        to_draft = row_of(vocabulary, shape.vocab_size)
    embedding = embedding_table(target, dtype).to(ranks.device)
    if config.heads_only:
        drafter.requires_grad_(False)
        drafter.get_submodule("thresh_head_two_model").requires_grad_(True)
    states = DraftStates(drafter.to(ranks.device), embedding, dtype, config.recompute)
    model = spread(states, config.parallel, ranks, dtype)
    how: Any = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    optimizer = torch.optim.AdamW(_groups(config, model), fused=True, **how)
    return Trainee(
        shape=shape,
        states=states,
        model=model,
        optimizer=optimizer,
        rms_F=rms.to(ranks.device),
        head=Head(
            rows_VD=head.to(ranks.device).contiguous(),
            to_draft=to_draft,
            ids_V=(torch.arange(len(head)) if vocabulary is None else vocabulary).to(ranks.device),
        ),
        last=last,
        frozen=Target(target) if judges else None,
        vocabulary=vocabulary,
        counts=counts,
        ranks=ranks,
        rows=len(rows),
    )


@torch.no_grad()
def _scaled(drafter: DFlashModule, rms_F: Tensor) -> Tensor:
    """What features are divided by [F], with the drafter's weights made for it."""
    if drafter.config.layerwise_fusion:
        return torch.ones_like(rms_F)
    drafter.fc.weight.mul_(rms_F)
    return rms_F


def _groups(config: TrainConfig, model: nn.Module) -> list[dict[str, Any]]:
    """What is trained: the drafter, and its heads, whose learning rate may be another."""
    heads = {True: list[Any](), False: list[Any]()}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            heads[any(f"{head}." in name for head in HEADS)].append(weight)
    share = 1.0 if config.head_lr is None else config.head_lr / config.lr
    if share == 1.0:
        return [{"params": heads[False] + heads[True], "share": 1.0}]
    every = ({"params": heads[False], "share": 1.0}, {"params": heads[True], "share": share})
    return [group for group in every if group["params"]]


def spread(states: DraftStates, how: str, ranks: Ranks, dtype: torch.dtype) -> nn.Module:
    """The module for several processes: copies (ddp), or shards of masters and optimiser (fsdp).

    FSDP shards the module as a whole: its layers are not called as modules, but by their parts.
    """
    if ranks.world == 1:
        return states
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(states)
    states.cast_to = None
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    fully_shard(states, mesh=mesh, mp_policy=policy)
    return states
