"""Checks of frozen settings: the type of every field, and names that do not exist.

Does not know what any setting means.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any


def check_names(given: Mapping[str, Any], kind: type, what: str) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown {what} {key!r}; {hint}")


def check_types(config: Any) -> None:
    """ValueError naming the first field whose value is not of the declared type."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, kind):
            wanted = type(config).__dataclass_fields__[name].type
            hint = f"; write {name}=[1,8]" if "tuple[int" in str(wanted) else ""
            raise ValueError(f"{name} is {value!r}, which is not {wanted}{hint}")


def _fits(value: Any, kind: Any) -> bool:
    parts: tuple[Any, ...] = typing.get_args(kind)
    if typing.get_origin(kind) is types.UnionType:
        return any(_fits(value, part) for part in parts)
    if typing.get_origin(kind) is tuple:
        if type(value) is not tuple:
            return False
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return len(parts) == len(value) and all(map(_fits, value, parts))
    if kind is float:  # whole numbers are fine; NaN and infinity are not; True is no number
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind
