"""One DFlash training step, ours and the PyPI package speculators': positions per second, memory.

Does not know real text or targets: both sides train on random features of SmolLM2's width. Every
side is a process of its own that lives through the whole run; the parent lets them take one step
each in turn, so all see the same machine. The peer lives in its own environment:

    python3 -m venv spec && spec/bin/pip install torch==2.13.0 -c constraints.txt
    spec/bin/pip install "speculators==0.9.0" "torch==2.13.0"
    spec/bin/pip uninstall torchvision torchaudio  # where they were built for another torch
    .venv/bin/python benchmarks/train_step_speculators.py --speculators spec/bin/python

Their Trainer needs an accelerator; this file repeats the body of its step on their model with their
optimiser, on the CPU. docs/train-speed.md says what the two steps do and what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

WIDTH, INNER, HEADS, GROUPS, HEAD_WIDTH, VOCABULARY = 576, 1536, 9, 3, 64, 49152
TAPS, LAYERS, BLOCK, GAMMA, MASK, LR = (1, 8, 14, 20, 27), 2, 8, 4.0, 16, 1e-3
ANCHORS, TOKENS, PROMPT, POOL = 24, 384, 32, 16  # per row, row lengths, rows in all

Step = Callable[[], dict[str, float]]


def random_rows(vocabulary: int) -> tuple[Any, Any]:
    """The same rows for every side: ids [POOL, TOKENS], features [POOL, TOKENS, taps * WIDTH].

    All ids lie in the reduced vocabulary, so that both sides supervise every reply position.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, (POOL, TOKENS), dtype=np.int32)
    features = rng.standard_normal((POOL, TOKENS, len(TAPS) * WIDTH), dtype=np.float32)
    return ids, torch.from_numpy(features).bfloat16()


def our_step(vocabulary: int, row_count: int) -> Step:
    """paceline's `train_step`: batch from cached features, loss, backward, AdamW, published copy."""
    import transformers

    from paceline.train.config import Phase, TrainConfig
    from paceline.train.corpus import Row
    from paceline.train.features import FeatureRow
    from paceline.train.fit import make_trainee, train_step
    from paceline.train.order import Order

    target = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=HEAD_WIDTH,
            vocab_size=VOCABULARY,
            num_hidden_layers=1,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    )
    target.config.num_hidden_layers = 30  # only embedding and head are used
    ids, features = random_rows(vocabulary)
    rows = []
    for i in range(POOL):
        row = Row(tokens=ids[i], start=PROMPT, source="", temperature=0.0, held_out=False)
        rows.append(FeatureRow(row, features[i].view(torch.uint16).numpy()))
    config = TrainConfig(
        target="",
        data=("",),
        run_dir="",
        taps=TAPS,
        layers=LAYERS,
        phases=(Phase(share=1.0, block_size=BLOCK, anchors_per_row=ANCHORS),),
        block_size=BLOCK,
        mask_token_id=MASK,
        draft_vocab_size=None if vocabulary == VOCABULARY else vocabulary,
        gamma=GAMMA,
        lr=LR,
        rows_per_step=row_count,
        steps=10_000,
    )
    trainee = make_trainee(config, target, rows, torch.bfloat16)
    done, order = iter(range(config.steps)), Order(rows, row_count, config.seed)
    return lambda: {"positions": train_step(config, trainee, order, next(done))["positions"]}


def their_model(vocabulary: int, attention: str) -> Any:
    """speculators' DFlashDraftModel of the same shape, with random frozen embedding and heads."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    layer = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_WIDTH,
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        max_position_embeddings=8192,
    )
    layer._attn_implementation = attention
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=vocabulary,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=list(TAPS),
            mask_token_id=MASK,
        )
    )
    with torch.no_grad():
        for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            module.weight.normal_(std=0.02)
            module.weight.requires_grad_(False)
    return model.train()


def their_step(vocabulary: int, row_count: int, attention: str, loss: str) -> Step:
    """The body of their Trainer's step: bf16 autocast over fp32 weights, clip, AdamW, metrics."""
    from types import SimpleNamespace

    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers

    model = their_model(vocabulary, attention)
    settings = SimpleNamespace(optimizer="adamw", lr=LR, weight_decay=0.0)
    (optimizer,) = build_optimizers(model, settings)
    losses = resolve_loss_config(loss, "eager")
    ids, features = random_rows(vocabulary)
    supervised = (torch.arange(TOKENS) >= PROMPT).repeat(row_count)[None]
    shared = {
        "loss_mask": supervised,
        "document_ids": torch.arange(row_count).repeat_interleave(TOKENS)[None],
        "position_ids": torch.arange(TOKENS).repeat(row_count)[None],
        "verifier_last_hidden_states": torch.randn(1, row_count * TOKENS, WIDTH).bfloat16(),
    }
    rng = np.random.default_rng(1)
    marks = [0.0, 0.0]
    model.verifier_norm.register_forward_pre_hook(lambda *_: _mark(marks, 0))
    model.verifier_lm_head.register_forward_hook(lambda *_: _mark(marks, 1))

    def step() -> dict[str, float]:
        chosen = rng.choice(POOL, row_count, replace=False)
        batch = shared | {
            "input_ids": torch.from_numpy(ids[chosen]).long().view(1, -1),
            "hidden_states": features[torch.from_numpy(chosen)].view(1, row_count * TOKENS, -1),
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, value, metrics = model(
                **batch, loss_config=losses, gamma=GAMMA, max_anchors=row_count * ANCHORS
            )
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        figures = {name: float(figure) for name, figure in metrics.items()}
        return {"positions": figures["full_acc_total"], "teacher_head": marks[1] - marks[0]}

    return step


def _mark(marks: list[float], at: int) -> None:
    marks[at] = time.perf_counter()


def memory_mib(field: str) -> float:
    """`VmRSS` or `VmHWM` of this process in MiB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(f"this system does not report {field}; run on Linux")


def serve(side: str, vocabulary: int, row_count: int, warm_up: int) -> None:
    """A child: warm up, then one step per line read; the last line gets the memory figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, *options = side.split(":")
    begin = memory_mib("VmRSS")
    make = our_step if name == "paceline" else their_step
    step = make(vocabulary, row_count, *options)
    built = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(warm_up):
        step()
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        began = time.perf_counter()
        figures = step()
        figures["seconds"] = time.perf_counter() - began
        print(json.dumps(figures), flush=True)
    peak = memory_mib("VmHWM")
    print(json.dumps({"begin": begin, "built": built, "peak": peak}), flush=True)


class Child:
    """A side in its own process."""

    def __init__(self, python: Path, side: str, options: argparse.Namespace) -> None:
        command = [str(python), __file__, "--side", side]
        command += ["--vocabulary", str(options.vocabulary), "--warm-up", str(options.warm_up)]
        command += ["--rows", str(options.rows)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.side = side
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._read()
        self.steps: list[dict[str, float]] = []

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.side} ended; its message is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, word: str) -> dict[str, Any]:
        """Send one line, wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._read()

    def figures(self) -> dict[str, Any]:
        """Medians over the steps, and memory in MiB."""
        memory = self.ask("end")
        self.process.wait()
        seconds = statistics.median(step["seconds"] for step in self.steps)
        positions = statistics.median(step["positions"] for step in self.steps)
        out = {
            "side": self.side,
            "steps": len(self.steps),
            "seconds_per_step": seconds,
            "positions_per_step": positions,
            "positions_per_second": positions / seconds,
            "peak_mib_above_model": memory["peak"] - memory["built"],
            "peak_mib": memory["peak"],
        }
        if teacher := [step["teacher_head"] for step in self.steps if "teacher_head" in step]:
            spent = statistics.median(teacher)
            out["teacher_head_seconds"] = spent
            out["positions_per_second_without_teacher_head"] = positions / (seconds - spent)
        return out | self.about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculators", type=Path, help="python of the peer's environment")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=16384, help="draft vocabulary")
    parser.add_argument("--rows", type=int, default=4, help=f"rows a step, up to {POOL}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, options.vocabulary, options.rows, options.warm_up)
        return
    if options.speculators is None:
        parser.error("--speculators PYTHON is needed; the head of this file builds one")
    ours = Child(Path(sys.executable), "paceline", options)
    sides = ("speculators:sdpa:ce", "speculators:eager:ce", "speculators:sdpa:kl_div")
    children = [ours, *(Child(options.speculators, side, options) for side in sides)]
    for _ in range(options.steps):
        for child in children:
            child.steps.append(child.ask("go"))
    results = [child.figures() for child in children]
    for result in results:
        result["ours_over_this"] = (
            results[0]["positions_per_second"] / result["positions_per_second"]
        )
        print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
