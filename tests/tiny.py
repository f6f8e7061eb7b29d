"""Tiny random models of real architectures, in fp32, behind the packed forward.

Does not know any weights; everything is random and small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from paceline.core import Noise, Row, SamplingParams
from paceline.target import Target

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "gpt-oss"]


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model with weights large enough that its next-token law is not nearly uniform."""
    tiny = TINY | changes
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config: Any = {
        "llama": lambda: transformers.LlamaConfig(**tiny),
        "qwen2": lambda: transformers.Qwen2Config(**tiny),
        "qwen3": lambda: transformers.Qwen3Config(**tiny, head_dim=8),
        "mistral": lambda: transformers.MistralConfig(**tiny, sliding_window=8),
        "gemma2": lambda: transformers.Gemma2Config(**tiny, head_dim=8, sliding_window=8),
        "gemma3": lambda: transformers.Gemma3TextConfig(**tiny, head_dim=8, sliding_window=8),
        "mixtral": lambda: transformers.MixtralConfig(**tiny, num_local_experts=4),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **tiny, head_dim=8, sliding_window=8, num_local_experts=4, rope_parameters=rope
        ),
    }[kind]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model.requires_grad_(False)


def tiny_target(kind: str = "llama", seed: int = 0, **changes: Any) -> Target:
    """The model behind the packed forward; loading it runs the probe."""
    return Target(tiny_model(kind, seed, **changes))


def plain_row(slot: int, tokens: Sequence[int]) -> Row:
    """A greedy row without limits."""
    return Row(
        slot=slot,
        tokens=list(tokens),
        prompt_length=len(tokens),
        params=SamplingParams(),
        noise=Noise(0),
        stop_ids=frozenset(),
        limit=10**6,
    )
