"""Parity and speed against transformers' own DFlash decoding, with the same checkpoint, batch 1.

fp32: the same ids and the same accepted count in every round. bf16: paired times, alternating.

    .venv/bin/python benchmarks/transformers_dflash.py --prompts questions.jsonl --json parity.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation import utils as generation

import paceline
from paceline.api import packaged_drafters
from paceline.data.prompts import read_prompts
from paceline.drafters.dflash import DFlashModule, load_dflash
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.export.plain import without_heads
from paceline.gguf import convert_gguf, smollm2_gguf
from paceline.pipeline import Pipeline

LENGTHS: list[int] = []


class Recording(generation.DFlashTokenCandidateGenerator):  # type: ignore[misc]
    """Their generator, noting how long the text is at every draft."""

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        LENGTHS.append(input_ids.shape[1])
        return super().get_candidates(input_ids, *args, **kwargs)


def full_vocabulary(folder: Path, dtype: torch.dtype) -> tuple[Any, DFlashModule]:
    """The drafter's weights without heads, with the target's whole vocabulary (d2t left out)."""
    config, module, _ = load_dflash(folder, dtype)
    config, module = without_heads(config, module)
    return type(config).from_dict({**config.to_dict(), "draft_vocab_size": None}), module


def their_drafter(folder: Path, dtype: torch.dtype) -> Any:
    """The same weights in transformers' DFlash module."""
    config, module = full_vocabulary(folder, dtype)
    theirs = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            layer_types=list(config.layer_types),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=list(config.target_layer_ids),
        )
    ).to(dtype)
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    state = {}
    for name, weight in module.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new) if name.startswith(old) else name
        state[name] = weight
    theirs.load_state_dict(state)
    return theirs.eval()


def run_theirs(
    model: Any, drafter: Any, ids: list[int], new: int
) -> tuple[list[int], list[int], float]:
    LENGTHS.clear()
    began = time.perf_counter()
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        assistant_model=drafter,
        speculation_type="dflash",
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=2,
    )
    seconds = time.perf_counter() - began
    marks = [*LENGTHS, out.shape[1]]
    committed = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    return out[0, len(ids) :].tolist(), committed, seconds


def run_ours(pipeline: Pipeline, ids: list[int], new: int) -> tuple[list[int], list[int], float]:
    began = time.perf_counter()
    reply = pipeline.generate([ids], paceline.SamplingParams(max_tokens=new))[0].outputs[0]
    seconds = time.perf_counter() - began
    return reply.token_ids, [r.committed for r in reply.rounds], seconds


def compare(dtype: str, folder: Path, prompts: list[Any], new: int, repeats: int) -> dict[str, Any]:
    """Both decoders over the prompts; medians of the time ratio over repeats and prompts."""
    pipeline = paceline.load("smollm2", None, dtype=dtype)
    kind = pipeline.target.dtype
    config, module = full_vocabulary(folder, kind)
    if dtype == "bf16":
        from paceline.prepack import can_prepack, prepack

        if can_prepack(kind, torch.device("cpu")):
            prepack(module)
    ours = Pipeline(
        target=pipeline.target, drafter=DFlashDrafter(config, module, None, pipeline.target)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        convert_gguf(smollm2_gguf()), dtype=kind
    ).eval()
    theirs = their_drafter(folder, kind)
    same_ids = same_rounds = 0
    ratios, ours_rate, theirs_rate = [], [], []
    for prompt in prompts:
        ids = pipeline.encode(prompt)
        for _ in range(repeats):
            a, rounds_a, seconds_a = run_ours(ours, ids, new)
            b, rounds_b, seconds_b = run_theirs(model, theirs, ids, new)
            ratios.append((len(a) / seconds_a) / (len(b) / seconds_b))
            ours_rate.append(len(a) / seconds_a)
            theirs_rate.append(len(b) / seconds_b)
        same_ids += a == b
        same_rounds += rounds_a == rounds_b
    return {
        "dtype": dtype,
        "prompts": len(prompts),
        "same_ids": same_ids,
        "same_committed_every_round": same_rounds,
        "median_speed_ratio": statistics.median(ratios),
        "ours_tokens_per_second": statistics.median(ours_rate),
        "theirs_tokens_per_second": statistics.median(theirs_rate),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--drafter", type=Path, default=packaged_drafters()["smollm2-dflash"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generation.DFlashTokenCandidateGenerator = Recording  # type: ignore[misc]
    prompts = read_prompts(options.prompts, options.limit)
    results = [
        compare("fp32", options.drafter, prompts, options.max_new_tokens, 1),
        compare("bf16", options.drafter, prompts, options.max_new_tokens, 3),
    ]
    for result in results:
        print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
