"""Recipes: functions that return the full frozen config of a training run.

Knows nothing about how training works.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from paceline.recipes.generic import dflash
from paceline.recipes.papers import (
    TARGETS,
    llama31_8b_dflash,
    qwen3_4b_dflare,
    qwen3_4b_dflash,
    qwen3_8b_dflare,
    qwen3_8b_dflash,
)
from paceline.recipes.smollm2 import (
    smollm2_adaflash,
    smollm2_bloom,
    smollm2_bloom_continued,
    smollm2_continued,
    smollm2_dflare,
    smollm2_dflash,
    smollm2_dflash_longer,
    smollm2_draft_opd,
    smollm2_length_head,
    smollm2_markov,
    smollm2_xpress,
)
from paceline.train.config import TrainConfig

Recipe = Callable[..., TrainConfig]
"""`recipe(data, run_dir=...)`: the corpus files and the folder of the run; `target=...` for some."""

RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (
        dflash,
        smollm2_dflash,
        smollm2_dflash_longer,
        smollm2_continued,
        smollm2_xpress,
        smollm2_markov,
        smollm2_length_head,
        smollm2_adaflash,
        smollm2_draft_opd,
        smollm2_dflare,
        smollm2_bloom,
        smollm2_bloom_continued,
        qwen3_4b_dflash,
        qwen3_8b_dflash,
        qwen3_4b_dflare,
        qwen3_8b_dflare,
        llama31_8b_dflash,
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ValueError names the nearest one, or all."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(RECIPES)}"
        raise ValueError(f"no recipe {name!r}; {hint}")
    return RECIPES[name]


def takes(recipe: Recipe) -> set[str]:
    """What a recipe can be told before it looks at the target: `target`, for one for any target."""
    return set(inspect.signature(recipe).parameters) - {"data", "run_dir"}


def list_recipes() -> list[dict[str, str]]:
    """Name, target and first docstring line (`purpose`) of every recipe."""
    return [
        {
            "name": name,
            "target": "any" if "target" in takes(recipe) else recipe(("FILE",)).target,
            "purpose": (inspect.getdoc(recipe) or "").partition("\n")[0],
        }
        for name, recipe in RECIPES.items()
    ]


def target_config(target: str) -> Any:
    """The Hugging Face config of a target: from `TARGETS` if it is there, else from its folder.

    Raises OSError or ValueError when neither has it (a hub id without network).
    """
    from transformers import AutoConfig

    from paceline.train.features import target_folder

    if target in TARGETS:
        return AutoConfig.for_model(**TARGETS[target])
    return AutoConfig.from_pretrained(target_folder(target))
