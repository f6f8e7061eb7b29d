"""Paceline: exact speculative decoding with trained drafters, for any Hugging Face causal LM.

Knows nothing itself; this is the list of public names.
"""

from paceline.api import load
from paceline.core import SamplingParams
from paceline.hf import custom_generate
from paceline.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["Pipeline", "SamplingParams", "__version__", "custom_generate", "load"]
