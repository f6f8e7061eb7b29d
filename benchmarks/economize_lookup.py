"""Run by ngram_peers.py inside economize's own environment: prompt lookup, ids in, results out.

PYTHON economize_lookup.py MODEL_DIR DTYPE IN.json OUT.json
"""

from __future__ import annotations

import json
import sys
import time

import economize
import torch
from economize.techniques.lookup import LookupConfig
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, dtype, source, out = sys.argv[1:]
    job = json.load(open(source))
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval().requires_grad_(False)
    model = economize.apply(base, LookupConfig(max_ngram=2, min_ngram=1, match="earliest"))
    config = economize.DecodeConfig(cycle_length=job["drafts"] + 1)
    prompts = [torch.tensor(ids) for ids in job["prompts"]]
    results = []
    for at in range(0, len(prompts), job["batch"]):
        part = prompts[at : at + job["batch"]]
        began = time.perf_counter()
        found = model.decode_batch(part, job["new"], decoding=config, stop=job["stop"])
        seconds = time.perf_counter() - began
        results.append(
            {
                "seconds": seconds,
                "ids": [row.tokens.tolist() for row in found],
                "acceptance": [row.acceptance for row in found],
            }
        )
    json.dump(results, open(out, "w"))


if __name__ == "__main__":
    main()
