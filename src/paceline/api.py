"""The front door: load a target with a drafter by name.

Knows names and folders only; everything else is the rooms' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core import Drafter
from paceline.pipeline import Pipeline
from paceline.target import Target, load_target

WEIGHTS = Path(__file__).parent / "weights"
DEFAULT_DRAFTERS = {"smollm2": "smollm2-dflash"}


def packaged_drafters() -> dict[str, Path]:
    """Drafters that ship inside the package, by name."""
    if not WEIGHTS.is_dir():
        return {}
    return {
        path.name: path for path in sorted(WEIGHTS.iterdir()) if (path / "config.json").exists()
    }


def packaged_with(name: str, heads: Sequence[str]) -> str:
    """The packaged drafter that has these heads (``xpress``) in place of ``name``, which lacks them.

    Drafters with a head were trained together with it and are folders of their own. The name itself
    where there is none: who asks for the head then says what is missing.
    """
    with_heads = "-".join([name.removesuffix("-dflash"), *heads])
    return with_heads if heads and with_heads in packaged_drafters() else name


def load_drafter(
    name: str, target: Any, *, samples: bool = False, block_size: int | None = None
) -> Drafter | None:
    """A drafter by name: a packaged one, a DFlash folder, ``ngram``, ``model:NAME`` or ``none``.

    ``block_size`` lets a block drafter draft another block than its folder says.

    Raises ValueError for an unknown name or a drafter of another target.
    """
    if block_size is not None and (name in ("none", "ngram") or name.startswith("model:")):
        raise ValueError(f"{name} drafts no blocks, so it has no block size")
    if name == "none":
        return None
    if name == "ngram":
        from paceline.drafters.ngram import NgramDrafter

        return NgramDrafter()
    if name.startswith("model:"):
        from paceline.drafters.model import ModelDrafter

        smaller = load_target(name.partition(":")[2], dtype=target.dtype, device=target.device)
        return ModelDrafter(smaller, target, samples=samples)
    folder = packaged_drafters().get(name, Path(name))
    if not (folder / "config.json").exists():
        known = ", ".join(["none", "ngram", "model:NAME", *packaged_drafters()])
        raise ValueError(
            f"no drafter {name!r}: neither a folder with config.json nor one of {known}"
        )
    from paceline.drafters.dflash_draft import DFlashDrafter

    return DFlashDrafter.load(folder, target, samples=samples, block_size=block_size)


def resolve_drafter(
    drafter: str | Drafter | None, target: Any, *, samples: bool = False
) -> Drafter | None:
    """What ``load`` and ``custom_generate`` take as a drafter: a name, an object or None.

    ``default`` is the packaged drafter of a target that has one, else n-gram lookup.
    """
    if drafter == "default":
        drafter = DEFAULT_DRAFTERS.get(target.name, "ngram")
    return load_drafter(drafter, target, samples=samples) if isinstance(drafter, str) else drafter


def load(
    target: str | Target,
    drafter: str | Drafter | None = "default",
    *,
    dtype: str = "auto",
    device: str = "cpu",
    accept: str = "match",
    trust_remote_code: bool = False,
) -> Pipeline:
    """Load a target and a drafter into a pipeline.

    ``drafter="default"`` is the packaged drafter of a target that has one, else n-gram lookup;
    None is plain decoding. ``dtype="auto"`` is bf16, or fp32 on a CPU that has no bf16 products.
    """
    if isinstance(target, str):
        target = load_target(
            target, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    chosen = resolve_drafter(drafter, target, samples=accept == "rejection")
    return Pipeline(target=target, drafter=chosen, accept=accept)
