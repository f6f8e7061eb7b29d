"""Training recipes with the settings of published drafters, for the targets of those papers.

Does not know how training works. Nobody has run them here: they need GPUs, the targets' weights and
about 800 000 conversations answered by the target. `paceline train NAME --dry-run` shows one.

Source: DFlash, arXiv 2602.06036, section 5 and appendix A.1. The paper does not give the batch size,
AdamW's betas or the mask id of Llama; each place says what is used instead.
"""

from __future__ import annotations

from typing import Any

from paceline.drafters.dflash import default_target_layers
from paceline.train.config import Phase, TrainConfig

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 40960,
}
TARGETS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728},
    "Qwen/Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288},
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
    },
}
"""What decides a drafter's shape in each target's public config.json, to show it without the hub."""

_ROWS, _EPOCHS, _BATCH = 800_000, 6, 32
_QWEN3_MASK = 151669  # the first embedding row that no token of the tokenizer uses
# <|reserved_special_token_0|>. It must be a row of the embedding as published, for a row added later
# is absent in the served target; it must not occur in text; and it must not be a stop token.
_LLAMA31_MASK = 128002


def _dflash(
    target: str,
    data: tuple[str, ...],
    run_dir: str,
    *,
    mask_token_id: int,
    block_size: int,
    gamma: float,
) -> TrainConfig:
    return TrainConfig(
        target=target,
        data=data,
        run_dir=run_dir,
        taps=tuple(default_target_layers(TARGETS[target]["num_hidden_layers"], 5)),
        layers=5,
        block_size=block_size,
        phases=(Phase(share=1.0, block_size=block_size, anchors_per_row=512),),
        mask_token_id=mask_token_id,
        gamma=gamma,
        max_tokens=3072,
        # A shard of 8 rows is up to 1 GB: features are 40 KB a token.
        rows_per_shard=8,
        lr=6e-4,
        warmup=0.04,
        clip=1.0,
        # Not in the paper. 32 rows are SpecForge's 4 on each of 8 GPUs; betas are torch's default.
        rows_per_step=_BATCH,
        steps=_EPOCHS * _ROWS // _BATCH,
        betas=(0.9, 0.999),
        # 800 rows to watch the run with; 2 % would be 16 000.
        held_out_share=0.001,
        eval_every=2000,
    )


def qwen3_4b_dflash(data: tuple[str, ...], run_dir: str = "runs/qwen3-4b-dflash") -> TrainConfig:
    """DFlash for Qwen3-4B as published: 5 layers, blocks of 16, six epochs of 800 000 rows."""
    return _dflash(
        "Qwen/Qwen3-4B", data, run_dir, mask_token_id=_QWEN3_MASK, block_size=16, gamma=7.0
    )


def qwen3_8b_dflash(data: tuple[str, ...], run_dir: str = "runs/qwen3-8b-dflash") -> TrainConfig:
    """DFlash for Qwen3-8B as published: 5 layers, blocks of 16, six epochs of 800 000 rows."""
    return _dflash(
        "Qwen/Qwen3-8B", data, run_dir, mask_token_id=_QWEN3_MASK, block_size=16, gamma=7.0
    )


def _dflare(target: str, data: tuple[str, ...], run_dir: str) -> TrainConfig:
    """Source: DFlare, arXiv 2606.02091: 7 layers, 9 taps, 2.4 million rows, gamma rises by the epoch."""
    base = _dflash(target, data, run_dir, mask_token_id=_QWEN3_MASK, block_size=16, gamma=4.5)
    return base.replace(
        taps=(1, 5, 9, 13, 17, 21, 25, 29, 33),
        layers=7,
        fusion="layerwise",
        split_kv=True,
        gamma_step=0.5,
        steps=_EPOCHS * 3 * _ROWS // _BATCH,
        rows_per_shard=4,
    )


def qwen3_4b_dflare(data: tuple[str, ...], run_dir: str = "runs/qwen3-4b-dflare") -> TrainConfig:
    """DFlare for Qwen3-4B as published: 7 layers, 9 taps, blocks of 16, 2.4 million rows."""
    return _dflare("Qwen/Qwen3-4B", data, run_dir)


def qwen3_8b_dflare(data: tuple[str, ...], run_dir: str = "runs/qwen3-8b-dflare") -> TrainConfig:
    """DFlare for Qwen3-8B as published: 7 layers, 9 taps, blocks of 16, 2.4 million rows."""
    return _dflare("Qwen/Qwen3-8B", data, run_dir)


def llama31_8b_dflash(
    data: tuple[str, ...], run_dir: str = "runs/llama31-8b-dflash"
) -> TrainConfig:
    """DFlash for Llama-3.1-8B-Instruct as published: 5 layers, blocks of 10, six epochs."""
    return _dflash(
        "meta-llama/Llama-3.1-8B-Instruct",
        data,
        run_dir,
        mask_token_id=_LLAMA31_MASK,
        block_size=10,
        gamma=5.0,
    )
