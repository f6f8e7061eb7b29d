"""What engines make of a folder: causal flags, number formats, the chat template, registered names.

Does not read tensors' values and loads no model.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.data.fingerprint import fingerprint_of
from paceline.evaluate.doctor_facts import (
    DrafterFacts,
    Finding,
    TargetFacts,
    error,
    note,
    warning,
)

Findings = Iterator[Finding]


def check_causal(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Causal flags that override a block's attention."""
    says = {
        name: drafter.get(name) for name in ("is_causal", "causal") if drafter.get(name) is not None
    }
    if len(set(says.values())) > 1:
        yield error("causal-conflict", ", ".join(says), f"say {says}", "write one value")
    kinds = drafter.layer.get("layer_types") or ()
    if drafter.get("sliding_window_non_causal") is False and "full_attention" in kinds:
        yield error(
            "causal-override",
            "sliding_window_non_causal",
            "is false: vLLM then makes every layer causal, the full ones too",
            "leave it out or write true for a drafter whose blocks look both ways",
        )
    layers = drafter.layer.get("num_hidden_layers")
    if kinds and type(layers) is int and len(kinds) != layers:
        yield error(
            "layer-types",
            "layer_types",
            f"names {len(kinds)} layers of {layers}",
            "name every layer",
        )


def check_dtype(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """fp16 and quantised weights: known to accept nothing."""
    named = str(drafter.layer.get("dtype") or drafter.layer.get("torch_dtype") or "")
    stored = {t.dtype for t in drafter.tensors.values()}
    if "float16" == named.removeprefix("torch.") or "F16" in stored:
        yield warning(
            "dtype-fp16",
            "dtype",
            "float16: drafters trained in bf16 overflow there",
            "serve and store it in bfloat16",
        )
    quantised = drafter.raw.get("quantization_config") or drafter.layer.get("quantization_config")
    packed = sorted(
        n for n, t in drafter.tensors.items() if n.endswith("weight") and t.dtype[0] in "IU"
    )
    if quantised or packed or {"F8_E4M3", "F8_E5M2"} & stored:
        yield error(
            "quantised",
            "quantization_config" if quantised else (packed or ["dtype"])[0],
            "a quantised drafter accepts next to nothing (often inherited from the target's config)",
            "remove quantization_config and store bf16 weights",
        )


def check_template(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """The chat template that the training text was written with, where it is recorded."""
    made = drafter.provenance.get("fingerprint") or {}
    wanted = made.get("template") if isinstance(made, dict) else None
    if wanted is None or target.tokenizer is None:
        return
    found = fingerprint_of(str(target.folder), target.tokenizer).template
    if found != wanted:
        yield warning(
            "template-differs",
            "provenance.json",
            "the chat template is not the one of the training text",
            "serve with that template, or train on text of this one",
        )


def check_architecture(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Names that engines do not register."""
    names = drafter.raw.get("architectures") or []
    if drafter.format != "speculators" and "Domino" in " ".join(map(str, names)):
        yield note("architecture", "architectures", f"{names}", "SGLang wants DFlashDraftModel")


SERVING_CHECKS = (check_causal, check_dtype, check_template, check_architecture)
