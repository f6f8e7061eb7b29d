"""A recipe for any target: what a DFlash drafter needs to know is read from the target's own files.

Does not know how training works; the target's weights are not loaded.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.drafters.dflash import default_target_layers
from paceline.train.capture import load_tokenizer, target_folder
from paceline.train.config import Phase, TrainConfig
from paceline.train.corpus import read_corpus

_EPOCHS, _ROWS_PER_STEP, _MAX_TOKENS = 6, 8, 3072


def dflash(
    data: tuple[str, ...],
    run_dir: str = "runs/dflash",
    *,
    target: str,
    taps: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
) -> TrainConfig:
    """A DFlash drafter for any target (--target): the paper's shape and learning rate, six epochs.

    Taps by the paper's rule and `unused_token`'s mask id, if they are not given. Five layers, blocks
    of 16, the whole vocabulary. Raises ValueError when the text or the target's files cannot be
    read.
    """
    text = _text_config(target)
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise ValueError(f"{target} has no tokenizer files; a drafter needs its vocabulary")
    longest = min(_MAX_TOKENS, text.max_position_embeddings)
    rows = read_corpus(data, max_tokens=longest, min_reply=4, held_out_share=0.02)
    mask = mask_token_id
    if mask is None:
        mask = unused_token(tokenizer, text.vocab_size, _stop_ids(text))
    trained = sum(not row.held_out for row in rows)
    return TrainConfig(
        target=target,
        data=data,
        run_dir=run_dir,
        taps=taps or _default_taps(text.num_hidden_layers),
        layers=5,
        block_size=16,
        phases=(Phase(share=1.0, block_size=16, anchors_per_row=256),),
        mask_token_id=mask,
        gamma=7.0,
        max_tokens=longest,
        lr=6e-4,
        rows_per_step=_ROWS_PER_STEP,
        rows_per_shard=16,
        steps=max(1, _EPOCHS * trained // _ROWS_PER_STEP),
    )


def unused_token(tokenizer: Any, vocab_size: int, stop_ids: set[int]) -> int:
    """An embedding row that no text uses: the first behind the tokenizer's ids, else the last special
    token that is neither a stop token nor in the chat template.

    It has to be a row that the served target has, so none is ever added. Raises ValueError when
    there is none.
    """
    behind = max(tokenizer.get_vocab().values()) + 1
    if behind < vocab_size:
        return behind
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} | stop_ids
    spare = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        and token_id not in used
        and token.content not in template
        and not re.search("unk|pad", token.content, re.IGNORECASE)
    ]
    if not spare:
        raise ValueError(
            "the tokenizer has no unused token for the mask; name one: --set mask_token_id=ID"
        )
    return int(max(spare))


def _default_taps(layers: int) -> tuple[int, ...]:
    """Of a target with few layers fewer than five."""
    if layers < 4:
        raise ValueError(f"the target has {layers} layers; name those to tap: --set taps=[0]")
    return tuple(dict.fromkeys(default_target_layers(layers, 5)))


def _stop_ids(text: Any) -> set[int]:
    ids = text.eos_token_id
    return set(ids) if isinstance(ids, list) else {ids}


def _text_config(target: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(target_folder(target)).get_text_config()
    except OSError as error:
        raise ValueError(f"cannot read the target {target!r}: {error}") from None
