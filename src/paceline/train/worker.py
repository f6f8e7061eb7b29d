"""The second process of an asynchronous run: loads the target and rolls out what training asks for.

Does not know losses or what is done with the records.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.prepack import can_prepack, prepack
from paceline.target import Target, parse_dtype
from paceline.train.capture import load_frozen, load_tokenizer, target_fingerprint
from paceline.train.config import TrainConfig
from paceline.train.fit import read_rows
from paceline.train.on_policy import serve_rollouts
from paceline.train.ranks import join_processes


def roll_out_for(
    config: TrainConfig,
    *,
    say: Callable[[str], None] = print,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Roll out for the run that `fit` trains with the same config, until that run is done.

    May be started before or behind it, killed and started again; never twice at a time. Waits for the
    run's first weights.

    Raises ValueError as `serve_rollouts`, and for text of another target.
    """
    with join_processes() as ranks:
        model = load_frozen(config.target, parse_dtype(config.compute, ranks.device))
        model = model.to(ranks.device)
        fingerprint = target_fingerprint(model)
        if can_prepack(model.dtype, model.device):
            prepack(model)
        target = Target(model, load_tokenizer(config.target))
        rows = [row for corpus in read_rows(config) for row in corpus.rows]
        serve_rollouts(config, target, fingerprint, rows, say=say, stopped=stopped)
