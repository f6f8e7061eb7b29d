"""Opens what a target's text is written with, by name: tokenizer, template, end ids, widths.

Knows nothing about weights; no model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.data.fingerprint import Fingerprint, fingerprint_of, target_folder
from paceline.data.template import Template


def open_template(source: str, arguments: Mapping[str, Any]) -> tuple[Template, Fingerprint]:
    """The chat template and the fingerprint of a target: folder, hub id, GGUF file or ``smollm2``.

    Raises:
        ValueError: no tokenizer there, or no chat template.
    """
    from transformers import GenerationConfig

    place = _place(source)
    tokenizer = _tokenizer(source)
    try:
        end: Any = GenerationConfig.from_pretrained(place).eos_token_id
    except (OSError, ValueError):
        end = None
    ends = frozenset(end if isinstance(end, list) else [] if end is None else [end])
    size = text_config(source).vocab_size
    template = Template(
        tokenizer=tokenizer, arguments=arguments, end_ids=ends, vocab_size=int(size)
    )
    return template, fingerprint_of(source, tokenizer)


def fingerprint_now(source: str) -> Fingerprint:
    """The fingerprint of a target as it is now; a folder without tokenizer files has none of one.

    Raises ValueError if the tokenizer is there and cannot be loaded.
    """
    place = _place(source)
    bare = os.path.isdir(place) and not any(Path(place).glob("tokenizer*"))
    return fingerprint_of(source, None if bare else _tokenizer(source))


def hidden_size(source: str) -> int:
    """The hidden width D of a target. Raises ValueError if its config cannot be read."""
    return int(text_config(source).hidden_size)


def text_config(source: str) -> Any:
    """The Hugging Face config of a target's text model. Raises ValueError if it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(_place(source)).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(f"target {source!r}: cannot read its config ({error})") from error


def _tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(_place(source))
    except (OSError, ValueError) as error:
        raise ValueError(f"target {source!r}: cannot load its tokenizer ({error})") from error


def _place(source: str) -> str | Path:
    found = target_folder(source)
    return source if found is None else found
