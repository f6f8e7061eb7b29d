"""Recipes: functions that return the full frozen config of a training run.

Knows nothing about how training works.
"""

from paceline.recipes.smollm2 import smollm2_dflash, smollm2_dflash_longer

RECIPES = {
    "smollm2_dflash": smollm2_dflash,
    "smollm2_dflash_longer": smollm2_dflash_longer,
}
