"""What a drafter folder and a target say about themselves, in one form for five folder formats.

Knows nothing about what is right or wrong with it. Reads configs, tensor headers and single rows; no
model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.evaluate.doctor_config import Malformed, sound

_SPECULATORS = {"dflash": "dflash", "dspark": "dflash", "eagle3": "eagle3", "peagle": "eagle3"}
_OURS = {"vocabulary_fingerprint", "layerwise_fusion", "split_kv", "tap_norm"}
_PLAIN_NESTED = {"mask_token_id", "target_layer_ids", "causal"} | _OURS
_NESTS = ("dflash_config", "eagle_config")
_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embeddings.weight")
_CHUNK = 1 << 22  # values held at a time


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is worth saying, and what to do about it."""

    code: str  # short and stable
    level: str  # error: it hurts; warning: it may; note: good to know
    where: str  # file, key or tensor
    what: str
    fix: str


def error(code: str, where: str, what: str, fix: str) -> Finding:
    """Something that costs acceptance, or that a reader refuses."""
    return Finding(code=code, level="error", where=where, what=what, fix=fix)


def warning(code: str, where: str, what: str, fix: str) -> Finding:
    """Something that may cost acceptance."""
    return Finding(code=code, level="warning", where=where, what=what, fix=fix)


def note(code: str, where: str, what: str, fix: str) -> Finding:
    """Something good to know."""
    return Finding(code=code, level="note", where=where, what=what, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor by its file's header."""

    file: Path
    name: str  # as stored; the key it is found under may differ by a prefix
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: BF16, F32, I64, BOOL ...


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of a folder, read one at a time and in part."""

    tensors: Mapping[str, Stored]

    def value(self, name: str) -> Tensor:
        """One whole tensor, as stored."""
        from safetensors import safe_open

        at = self.tensors[name]
        with safe_open(str(at.file), "pt") as opened:
            found: Tensor = opened.get_tensor(at.name)
        return found

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix [n, D], fp32; only they are read."""
        from safetensors import safe_open

        at = self.tensors[name]
        with safe_open(str(at.file), "pt") as opened:
            part = opened.get_slice(at.name)
            return torch.cat([part[row : row + 1] for row in rows]).float()

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor in pieces along its first dimension, fp32."""
        from safetensors import safe_open

        at = self.tensors[name]
        if not at.shape:
            yield self.value(name).float()
            return
        width = 1
        for size in at.shape[1:]:
            width *= size
        step = max(1, _CHUNK // max(1, width))
        with safe_open(str(at.file), "pt") as opened:
            part = opened.get_slice(at.name)
            for start in range(0, at.shape[0], step):
                yield part[start : start + step].float()


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    """A drafter folder, whatever its format.

    ``family`` is how it drafts: dflash (a block; DSpark is one, too), eagle3 or pard. ``layer`` is the
    config that describes its decoder layers, ``flat`` every other key, nested ones included; a key
    that is there twice with different values is in ``conflicts``.
    """

    folder: Path
    format: str  # dflash, specforge, speculators, eagle3 or pard
    family: str
    kind: str  # as the config names it: dflash, dspark, eagle3, peagle, pard
    raw: Mapping[str, Any]
    flat: Mapping[str, Any]
    layer: Mapping[str, Any]
    conflicts: Sequence[tuple[str, Any, Any]]
    weights: Weights
    provenance: Mapping[str, Any] = field(default_factory=dict)
    malformed: Malformed = field(
        default_factory=list
    )  # values of another kind; taken out of all parts

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Tensors by name, without the prefix ``model.`` unless it is a whole model."""
        return self.weights.tensors

    def get(self, *names: str) -> Any:
        """The first of these keys that is set: in the algorithm's part, then in the layers'."""
        for part in (self.flat, self.layer):
            for name in names:
                if part.get(name) is not None:
                    return part[name]
        return None

    def number(self, *names: str) -> int | None:
        """As ``get``, if it is a whole number."""
        value = self.get(*names)
        return value if type(value) is int else None

    @property
    def mask_id(self) -> int | None:
        """The id that stands for a token to be drafted, under any of its names."""
        return self.number("mask_token_id", "pard_token", "ptd_token_id", "mask_token")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the vocabulary it reads."""
        return _whole(self.layer.get("vocab_size")) or self.number("vocab_size")

    @property
    def draft_vocab_size(self) -> int | None:
        """Rows of the vocabulary it proposes from."""
        return self.number("draft_vocab_size") or self.vocab_size

    @property
    def hidden_size(self) -> int | None:
        """Its own width."""
        return _whole(self.layer.get("hidden_size"))


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """A target folder: its text config, tokenizer, and rows of its embedding and head."""

    name: str
    folder: Path
    raw: Mapping[str, Any]
    config: Mapping[str, Any]  # of the language model, where the whole has several parts
    generation: Mapping[str, Any]
    weights: Weights
    tokenizer: Any = None

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width."""
        return int(self.config["hidden_size"])

    @cached_property
    def embedding(self) -> str | None:
        """The name of the embedding's tensor; None where it has none that is known."""
        for name, tensor in self.weights.tensors.items():
            if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2:
                return name
        return None

    @property
    def head(self) -> str | None:
        """The name of the head's tensor: the embedding's where they are tied."""
        own = [name for name in self.weights.tensors if name.endswith("lm_head.weight")]
        return own[0] if own else self.embedding

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        if self.embedding is not None:
            return self.weights.tensors[self.embedding].shape[0]
        return int(self.config["vocab_size"])

    @cached_property
    def vocabulary(self) -> dict[str, int] | None:
        """Tokens and their ids."""
        return None if self.tokenizer is None else self.tokenizer.get_vocab()

    @property
    def template(self) -> str | None:
        """The chat template."""
        return None if self.tokenizer is None else self.tokenizer.chat_template

    @property
    def eos_ids(self) -> set[int]:
        """Every id that generation config, config or tokenizer call end of sequence."""
        found: set[int] = set()
        own = {"eos_token_id": getattr(self.tokenizer, "eos_token_id", None)}
        for part in (self.generation, self.config, self.raw, own):
            value = part.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        return found


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def rope_bases(config: Mapping[str, Any]) -> dict[str, float]:
    """The rotary base by the place it is written at: the older config has it at the top."""
    found: dict[str, float] = {}
    if isinstance(config.get("rope_theta"), (int, float)):
        found["rope_theta"] = float(config["rope_theta"])
    for place in ("rope_parameters", "rope_scaling"):
        rope = config.get(place)
        if not isinstance(rope, Mapping):
            continue
        for part, name in ((rope, place), (rope.get("full_attention"), f"{place}.full_attention")):
            if isinstance(part, Mapping) and isinstance(part.get("rope_theta"), (int, float)):
                found[f"{name}.rope_theta"] = float(part["rope_theta"])
    return found


def read_drafter(folder: Path) -> DrafterFacts:
    """Read a drafter folder.

    Raises:
        ValueError: it is no folder, has no readable config.json or no readable safetensors file, or
            is in none of the formats.
    """
    malformed: Malformed = []
    raw = sound(read_json(folder / "config.json"), malformed)
    format, family, kind = _recognise(folder, raw)
    layer = raw.get("transformer_layer_config", raw) if format == "speculators" else raw
    conflicts: list[tuple[str, Any, Any]] = []
    flat = {k: v for k, v in raw.items() if k not in (*_NESTS, "transformer_layer_config")}
    for nest in _NESTS:
        for key, value in (raw.get(nest) or {}).items():
            if value is not None and flat.get(key) not in (None, value):
                conflicts.append((f"{nest}.{key}", value, flat[key]))
            elif flat.get(key) is None:
                flat[key] = value
    provenance = folder / "provenance.json"
    return DrafterFacts(
        folder=folder,
        format=format,
        family=family,
        kind=kind,
        raw=raw,
        flat=flat,
        layer=layer,
        conflicts=conflicts,
        weights=Weights(tensors=_headers(folder, plain=family != "pard")),
        provenance=read_json(provenance) if provenance.is_file() else {},
        malformed=malformed,
    )


def _recognise(folder: Path, raw: Mapping[str, Any]) -> tuple[str, str, str]:
    """Format, family and kind of a drafter's config."""
    kind = raw.get("speculators_model_type")
    if kind is not None or "transformer_layer_config" in raw:
        if kind not in _SPECULATORS:
            known = ", ".join(_SPECULATORS)
            raise ValueError(f"{folder}: speculators_model_type {kind!r} is none of {known}")
        return "speculators", _SPECULATORS[kind], str(kind)
    names = " ".join(map(str, raw.get("architectures") or ()))
    nested = raw.get("dflash_config")
    if isinstance(nested, Mapping) or "DFlash" in names or "DSpark" in names:
        extra = set(nested or ()) - _PLAIN_NESTED
        kind = "dspark" if "DSpark" in names else "dflash"
        return "specforge" if extra else "dflash", "dflash", kind
    if "Eagle3" in names:
        return "eagle3", "eagle3", "eagle3"
    if "pard_token" in raw or names.endswith("ForCausalLM"):
        return "pard", "pard", "pard"
    raise ValueError(
        f"{folder}: architectures {raw.get('architectures')!r} is no drafter that is known: plain "
        "DFlash, speculators, SpecForge, EAGLE-3 or PARD"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError names the file when it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path}: cannot be read ({problem})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: is no JSON object")
    return found


def _headers(folder: Path, *, plain: bool) -> dict[str, Stored]:
    """Every tensor of every shard; with ``plain``, prefixes and aliases of a drafter are taken off."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: no .safetensors file; convert other weights with safetensors first"
        )
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(str(file), "pt") as opened:
                for stored in opened.keys():
                    part, name = opened.get_slice(stored), stored
                    if plain:
                        name = name.removeprefix("model.")
                        for alias, own in _ALIASES.items():
                            name = (
                                own + name.removeprefix(alias) if name.startswith(alias) else name
                            )
                    if plain and name in found and found[name].file != file:
                        raise ValueError(
                            f"{folder}: {stored} is in {found[name].file.name} and in {file.name}; "
                            "remove one of the files"
                        )
                    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                    found[name] = Stored(file=file, name=stored, shape=shape, dtype=dtype)
        except (SafetensorError, OSError) as problem:
            raise ValueError(f"{file}: cannot be read ({problem}); copy it again") from None
    return found


def read_target(name: str) -> TargetFacts:
    """Read a target by its name: a folder, a hub id that was downloaded, a GGUF file or ``smollm2``.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from paceline.data.fingerprint import target_folder

    folder = target_folder(name)
    if folder is None:
        raise ValueError(f"no target {name!r}: neither a folder nor a model that was downloaded")
    raw = read_json(folder / "config.json")
    if "DFlash" in str(raw.get("architectures")) or "speculators_model_type" in raw:
        raise ValueError(f"{folder} is a drafter: name the target first, then the drafter")
    text = raw.get("text_config")
    config = text if isinstance(text, Mapping) else raw
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if type(config.get(key)) is not int:
            raise ValueError(f"{folder / 'config.json'}: has no {key}; is it a language model?")
    generation = folder / "generation_config.json"
    return TargetFacts(
        name=name,
        folder=folder,
        raw=raw,
        config=config,
        generation=read_json(generation) if generation.is_file() else {},
        weights=Weights(tensors=_headers(folder, plain=False)),
        tokenizer=read_tokenizer(folder),
    )


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; None where it has none. ValueError when it cannot be read."""
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # of any kind: tokenizers has its own, transformers any
        raise ValueError(
            f"{folder}: the tokenizer cannot be read ({type(problem).__name__}: {problem})"
        ) from None
