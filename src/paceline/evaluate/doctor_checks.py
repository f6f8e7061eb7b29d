"""What can be wrong between a drafter's config and its target: small functions from facts to findings.

Does not read tensors' values and loads no model. Every finding has a fix.

Sources of the conventions: the engines' own readers (vLLM, SGLang, speculators), as docs/doctor.md says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.drafters.dflash import vocabulary_fingerprint
from paceline.evaluate.doctor_facts import (
    DrafterFacts,
    Finding,
    TargetFacts,
    error,
    rope_bases,
    warning,
)

Findings = Iterator[Finding]
CONFIG = "config.json"


def check_kinds(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Values of another kind than their key's; all other checks go on without them."""
    for place, value, wanted in drafter.malformed:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:39]}…"
        yield error("config-malformed", place, f"is {shown}", f"write {wanted}, as trained")


def check_conflicts(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Keys written at two levels with different values: readers take different ones."""
    for place, nested, top in drafter.conflicts:
        yield error(
            "key-conflict",
            place,
            f"is {nested!r}, but {top!r} at the top",
            "write one value at both",
        )


def check_widths(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Hidden width, and heads that divide."""
    width = drafter.hidden_size
    given = drafter.number("target_hidden_size")
    if drafter.family != "pard" and (given or width) != target.hidden_size:
        yield error(
            "width-differs",
            "target_hidden_size" if given else "hidden_size",
            f"is {given or width}, the target's width is {target.hidden_size}",
            "this drafter was made for another target: take the one for this target, or train one",
        )
    heads, keys = (drafter.layer.get(k) for k in ("num_attention_heads", "num_key_value_heads"))
    if type(heads) is int and type(keys) is int and (keys < 1 or heads % keys):
        yield error(
            "heads-do-not-divide",
            "num_key_value_heads",
            f"{heads} heads are no multiple of {keys} key/value heads",
            "copy both from the config the drafter was trained with",
        )


def check_depth(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """The number of target layers that the drafter was made for."""
    layers = drafter.number("num_target_layers")
    if layers is not None and layers != target.layers:
        yield error(
            "depth-differs",
            "num_target_layers",
            f"is {layers}, the target has {target.layers} layers",
            "this drafter was made for another target",
        )


def check_taps(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Range, count, order and convention: plain ids are i, speculators' and eagle's are i + 1."""
    if drafter.family == "pard":
        return
    plain, shifted = (
        drafter.get("target_layer_ids"),
        drafter.get("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    )
    if plain is None and shifted is None:
        if drafter.family == "dflash":
            yield error(
                "taps-missing",
                "target_layer_ids",
                "no layers are named; engines guess different ones",
                "write the layers the drafter was trained on",
            )
        return
    for key, ids, shift in (
        ("target_layer_ids", plain, 0),
        ("aux_hidden_state_layer_ids", shifted, 1),
    ):
        if ids is not None:
            yield from _taps(drafter, target, key, ids, shift)
    both = isinstance(plain, list) and isinstance(shifted, list) and _numbers(plain + shifted)
    if both and plain and shifted and [i + 1 for i in plain] != shifted:
        yield error(
            "taps-off-by-one",
            "aux_hidden_state_layer_ids",
            f"{shifted} mean other layers than target_layer_ids {plain}; vLLM takes the former",
            f"write {[i + 1 for i in plain]} or leave it out",
        )


def _numbers(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _taps(drafter: DrafterFacts, target: TargetFacts, key: str, ids: Any, shift: int) -> Findings:
    if not isinstance(ids, list) or not ids or not _numbers(ids):
        yield error("taps-malformed", key, f"is {ids!r}", "write a list of layer numbers")
        return
    layers = [i - shift for i in ids]
    # EAGLE-3 may tap the embedding's output (layer -1); the last layer comes after the final norm.
    lowest = -1 if drafter.family == "eagle3" else 0
    if bad := [i + shift for i in layers if not lowest <= i < target.layers - 1]:
        last = target.layers - 1
        hint = f"; {last + shift} is the last layer, whose output comes behind the final norm"
        yield error(
            "taps-out-of-range",
            key,
            f"{bad} are not {lowest + shift}..{last - 1 + shift}{hint * (last + shift in bad)}",
            "numbers are 0-based outputs of layers"
            + (", plus 1 in this format: were they written for the plain one?" * shift),
        )
    if len(set(layers)) < len(layers):
        yield error("taps-repeated", key, f"{ids} names a layer twice", "name each layer once")
    elif sorted(layers) != layers:
        yield warning(
            "taps-unsorted",
            key,
            f"{ids} is not ascending; some engines sort, the fusing matrix does not",
            "train and write them in ascending order",
        )
    fuse = drafter.tensors.get("fc.weight")
    width = drafter.number("target_hidden_size") or drafter.hidden_size
    if fuse is not None and width and len(fuse.shape) == 2 and fuse.shape[1] != len(ids) * width:
        yield error(
            "taps-count",
            key,
            f"names {len(ids)} layers, fc.weight has {fuse.shape[1] / width:g} of width {width}",
            "name exactly the layers the fusing matrix was trained for (no last layer besides)",
        )


def check_mask(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """The mask id: there, a row of the target's embedding, and no token of text."""
    if drafter.family == "eagle3" and drafter.kind != "peagle":
        return
    mask = drafter.mask_id
    if mask is None:
        whole = " (this is a whole model: a PARD drafter, or a target?)" * (
            drafter.family == "pard"
        )
        yield error(
            "mask-missing",
            "mask_token_id",
            f"no mask id is named{whole}",
            "write the id the drafter was trained with (mask_token_id, for PARD pard_token)",
        )
        return
    if not 0 <= mask < target.vocab_size:
        yield error(
            "mask-out-of-range",
            "mask_token_id",
            f"{mask} is no row of the target's embedding (0..{target.vocab_size - 1})",
            "a row added in training is absent in the served target: train with an unused row",
        )
        return
    if mask in target.eos_ids:
        yield error(
            "mask-is-eos",
            "mask_token_id",
            f"{mask} ends replies",
            "train with an unused token: reserved ones, or a row behind the tokenizer's ids",
        )
    elif target.template and target.tokenizer is not None:
        text = target.tokenizer.convert_ids_to_tokens(mask)
        if text and text in target.template:
            yield warning(
                "mask-in-template",
                "mask_token_id",
                f"{mask} is {text!r}, which the chat template writes",
                "train with a token that no prompt has",
            )


def check_vocabulary(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Sizes, padding and the tokenizer's fingerprint."""
    mine, theirs = drafter.vocab_size, target.vocab_size
    known = len(target.vocabulary) if target.vocabulary is not None else theirs
    if mine is not None and mine != theirs:
        # Padded rows are no tokens: the same tokenizer with another padding can be paired.
        padded = target.vocabulary is not None and mine > max(target.vocabulary.values())
        make = warning if padded else error
        yield make(
            "vocab-padding" if padded else "vocab-differs",
            "vocab_size",
            f"is {mine}, the target's embedding has {theirs} rows and its tokenizer {known} tokens",
            "pad both to the same size" if padded else "take a drafter for this tokenizer",
        )
    reduced = drafter.number("draft_vocab_size")
    if reduced is not None and mine is not None and reduced > mine:
        yield error(
            "draft-vocab-too-large", "draft_vocab_size", f"{reduced} exceeds {mine}", "correct it"
        )
    wanted = drafter.get("vocabulary_fingerprint")
    if wanted is not None and target.tokenizer is not None:
        if (found := vocabulary_fingerprint(target.tokenizer)) != wanted:
            yield error(
                "tokenizer-differs",
                "vocabulary_fingerprint",
                f"is {wanted}, the target's tokenizer is {found}",
                "same size is not same tokens: take a drafter for this tokenizer",
            )
    yield from _own_tokenizer(drafter, target)


def _own_tokenizer(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Token by token, where the drafter's folder has a tokenizer."""
    from paceline.evaluate.doctor_facts import read_tokenizer

    own = read_tokenizer(drafter.folder)
    if own is None or target.vocabulary is None:
        return
    mine, theirs = own.get_vocab(), target.vocabulary
    if other := sorted(text for text in mine.keys() & theirs.keys() if mine[text] != theirs[text]):
        what = f"{len(other)} tokens have other ids, such as {other[0]!r}"
    elif len(mine.keys() & theirs.keys()) < 0.99 * min(len(mine), len(theirs)):
        what = f"{len(mine.keys() - theirs.keys())} tokens are not the target's"
    else:
        return
    yield error("tokenizer-differs", "tokenizer.json", what, "take a drafter for this tokenizer")


def check_rope(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """The rotary base, in both generations of configs, against itself and the target's."""
    mine, theirs = rope_bases(drafter.layer), rope_bases(target.config)
    if len(set(mine.values())) > 1:
        yield error(
            "rope-conflict",
            ", ".join(mine),
            f"say {sorted(set(mine.values()))}; readers of each generation take another",
            "write the trained base at both places",
        )
    elif not mine and theirs:
        yield error(
            "rope-missing",
            "rope_theta",
            f"no rotary base: readers take 10000, the target has {next(iter(theirs.values())):g}",
            "write rope_theta as trained",
        )
    elif mine and theirs and not set(mine.values()) & set(theirs.values()):
        ratio = next(iter(mine.values())) / next(iter(theirs.values()))
        yield warning(
            "rope-differs",
            next(iter(mine)),
            f"is {next(iter(mine.values())):g}, {ratio:g} times the target's",
            "right only if it was trained so: a reader of another config generation writes its default",
        )
    scaling = drafter.layer.get("rope_scaling") or drafter.layer.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if drafter.family == "dflash" and kind not in (None, "default"):
        yield warning(
            "rope-scaling",
            "rope_scaling",
            f"is {kind}",
            "Paceline does not draft with scaled positions",
        )


def check_positions(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Whether the drafter has positions for all contexts of the target."""
    mine = drafter.layer.get("max_position_embeddings")
    theirs = target.config.get("max_position_embeddings")
    if type(mine) is int and type(theirs) is int and mine < theirs:
        yield warning(
            "positions-short",
            "max_position_embeddings",
            f"is {mine}, the target's {theirs}: longer contexts are not drafted; engines crashed on it",
            "limit the served context to it, or raise it if the drafter was trained on longer text",
        )


def check_block(drafter: DrafterFacts, target: TargetFacts) -> Findings:
    """Block sizes: of B tokens one is the anchor, unless drafts start at it."""
    block = drafter.number("block_size")
    if drafter.family == "dflash" and drafter.format != "speculators":
        if block is None or block < 2:
            yield error(
                "block-size",
                "block_size",
                f"is {block!r}",
                "write the block as trained, anchor included",
            )
    proposed = (drafter.raw.get("speculators_config") or {}).get("proposal_methods")
    for method in proposed if isinstance(proposed, list) else ():
        if not isinstance(method, dict):
            continue
        tokens = method.get("speculative_tokens")
        wanted = None if block is None else block - (not drafter.get("sample_from_anchor"))
        if drafter.family == "dflash" and wanted is not None and tokens != wanted:
            yield error(
                "block-convention",
                "speculative_tokens",
                f"is {tokens}, a block of {block} drafts {wanted}",
                f"write {wanted}: the anchor is no draft"
                if wanted < block  # type: ignore[operator]
                else f"write {wanted}: drafts start at the anchor here",
            )
    if drafter.kind == "dflash" and drafter.get("sample_from_anchor"):
        yield error(
            "samples-from-anchor",
            "sample_from_anchor",
            "drafts would start at the anchor; DFlash's start behind it, and vLLM refuses it",
            "set it to false",
        )


CHECKS = (
    check_kinds,
    check_conflicts,
    check_widths,
    check_depth,
    check_taps,
    check_mask,
    check_vocabulary,
    check_rope,
    check_positions,
    check_block,
)
