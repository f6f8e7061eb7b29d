"""What a bench ran on: versions, device, number format; what a resumed or pooled bench must share.

Knows nothing about what is measured. Neither the machine's name nor any path is in it.
"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from paceline.provenance import source_commit

CPU_FEATURES = frozenset(
    ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16")
    + ("amx_int8", "asimd", "sve", "sve2", "bf16", "i8mm")
)


def environment(target: Any) -> dict[str, Any]:
    """Versions and the kind of machine that ``target`` is on."""
    versions = {name: importlib.metadata.version(name) for name in ("paceline", "transformers")}
    return {
        **versions,
        "commit": source_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": target.device.type,
        "device_name": device_name(target.device),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(target.dtype, "fp32"),
        "cpu_features": _cpu_features(),
    }


def device_name(device: torch.device) -> str:
    """The model of the processor or accelerator; its architecture where the system hides it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _cpu_line("model name") or platform.processor() or platform.machine()


def check_device(device: str) -> None:
    """Raise ValueError unless something can be computed on ``device``."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used ({why}); give cpu or cuda") from None


def _cpu_features() -> list[str]:
    """Those that matter for matrix products."""
    return sorted(CPU_FEATURES.intersection(_cpu_line("flags", "Features").split()))


def _cpu_line(*names: str) -> str:
    """What Linux says of the first processor under one of these names; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
