"""Which target, tokenizer and chat template a row file was written for, in FILE.meta.json beside it.

Knows nothing about rows. Weights are told apart by their files, not by the loaded model, so that
dtype, device and prepacking do not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Digits, spaces, code, several scripts: tokenizers of one vocabulary differ in how they split.
_PROBE = "Hello  world! 12345 + 6.78\n\n\tdef f(x): return x\u00e9 — привет 你好 \U0001f600<|im_end|></s>"
_SAMPLE = 256  # bytes read at the start and in the middle of each tensor


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Short hashes. ``weights`` None: the text is not known to come from this target's weights."""

    weights: str | None
    tokenizer: str | None
    template: str | None

    def without_weights(self) -> Fingerprint:
        """For text that the target only reads, such as the replies of a data set."""
        return replace(self, weights=None)


def fingerprint_of(source: str, tokenizer: Any) -> Fingerprint:
    """The fingerprint of a target by its name (folder, hub id, GGUF file or ``smollm2``).

    Reads file headers and a few bytes of each tensor; loads no model.
    """
    return Fingerprint(
        weights=_weights(source),
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer),
        template=None if tokenizer is None else _template(tokenizer),
    )


def meta_path(path: str | Path) -> Path:
    """Where the fingerprint of a row file stands; rows that were gzipped later keep theirs."""
    return Path(f"{str(path).removesuffix('.gz')}.meta.json")


def write_meta(path: str | Path, fingerprint: Fingerprint, facts: Mapping[str, Any]) -> None:
    """Write the sidecar of ``path``; it appears whole or not at all."""
    work = Path(f"{meta_path(path)}.tmp")
    meta = {"format": 1, "fingerprint": asdict(fingerprint), **facts}
    work.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    os.replace(work, meta_path(path))


def read_meta(path: str | Path) -> dict[str, Any] | None:
    """The sidecar of ``path``: fingerprint and facts; None where there is none.

    Raises ValueError for a sidecar that cannot be read.
    """
    place = meta_path(path)
    try:
        meta: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        Fingerprint(**meta["fingerprint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not a fingerprint ({error!r}); write the rows anew") from None
    return meta


def check_fingerprint(path: str | Path, now: Fingerprint) -> bool:
    """Whether ``path`` says what it was written for; False for a file without a sidecar.

    A part that either side does not know is not compared.

    Raises:
        ValueError: it was written for other weights, another tokenizer or another chat template.
    """
    meta = read_meta(path)
    if meta is None:
        return False
    was = meta["fingerprint"]
    stale = [
        f"{part} (then {was[part]}, now {value})"
        for part, value in asdict(now).items()
        if value is not None and was[part] is not None and was[part] != value
    ]
    if stale:
        raise ValueError(
            f"{path} is stale: written for another target, whose {', '.join(stale)} differ; use the "
            f"target it was written for ({meta.get('target', '?')!r} then), or write the rows anew "
            "to another file"
        )
    return True


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])


def _tokenizer(tokenizer: Any) -> str:
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number} {token}\0".encode("utf-8", "surrogatepass"))
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    digest.update(repr((list(ids), sorted(tokenizer.all_special_ids))).encode())
    return _short(digest)


def _template(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    return _short(hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()))


def _weights(source: str) -> str | None:
    folder = target_folder(source)
    if folder is None:
        return None
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for file in files:
        if file.suffix == ".bin":
            digest.update(f"{file.stat().st_size}".encode())
            digest.update(_bytes(file, 0, 65536))
        else:
            _add_safetensors(digest, file)
    return _short(digest) if files else None


def target_folder(source: str) -> Path | None:
    """The local folder of a target; None for a hub id that was never downloaded.

    Raises ValueError for a GGUF file that cannot be read.
    """
    from paceline.gguf import convert_gguf, smollm2_gguf

    if source == "smollm2":
        return convert_gguf(smollm2_gguf())
    if source.endswith(".gguf"):
        return convert_gguf(Path(source))
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _add_safetensors(digest: Any, file: Path) -> None:
    """Names, dtypes, shapes and some bytes of each tensor: fine-tunes differ in some of them."""
    (size,) = struct.unpack("<Q", _bytes(file, 0, 8))
    header = json.loads(_bytes(file, 8, size))
    header.pop("__metadata__", None)
    with file.open("rb") as stream:
        for name, tensor in sorted(header.items()):
            first, last = tensor["data_offsets"]
            digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
            for at in (first, (first + last) // 2):
                stream.seek(8 + size + at)
                digest.update(stream.read(min(_SAMPLE, last - at)))


def _bytes(file: Path, at: int, count: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(at)
        return stream.read(count)
