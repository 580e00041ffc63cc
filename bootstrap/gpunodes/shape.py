"""The shape that a document from outside must have before anything reads it. Pure, standard library only.

A type stands for itself; numbers are finite and of bearable size, and `float` takes whole ones too. A mapping stands
for one that has at least these names: a newer sender may tell more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class Many:
    """A list of values of one shape, no longer than ``most``."""

    each: Any
    most: int


@dataclass(frozen=True, slots=True)
class Named:
    """A mapping from names, of the form ``name`` where it matters, to values of one shape."""

    each: Any
    most: int
    name: Form | None = None


@dataclass(frozen=True, slots=True)
class Maybe:
    """A value of a shape, or null."""

    value: Any


@dataclass(frozen=True, slots=True)
class Optional:
    """In a mapping: a name that need not be there."""

    value: Any


@dataclass(frozen=True, slots=True)
class Form:
    """A text that a regular expression matches as a whole; ``title`` is what to call it."""

    title: str
    pattern: str


def one_of(*words: str) -> Form:
    """One of a few words."""
    return Form(f"one of {', '.join(words)}", "|".join(map(re.escape, words)))


def wrong(value: object, shape: Any, where: str = "") -> str:  # noqa: PLR0911 - one for each kind of shape
    """What is wrong with the shape of a value, "" when nothing is; ``where`` is its place. Never raises."""
    if isinstance(shape, Maybe | Optional):
        return "" if value is None and isinstance(shape, Maybe) else wrong(value, shape.value, where)
    if isinstance(shape, Many):
        if not isinstance(value, list) or len(value) > shape.most:
            return f"its answer has no list of at most {shape.most} in {where or 'itself'}"
        return next((found for item in value if (found := wrong(item, shape.each, where))), "")
    if isinstance(shape, Named):
        if not isinstance(value, dict) or len(value) > shape.most:
            return f"its answer has no mapping of at most {shape.most} in {where or 'itself'}"
        parts = [*((name, shape.name or str) for name in value), *((item, shape.each) for item in value.values())]
        return next((found for part, each in parts if (found := wrong(part, each, where))), "")
    if isinstance(shape, Form):
        if isinstance(value, str) and re.fullmatch(shape.pattern, value):
            return ""
        return f"its answer has no {shape.title} in {where or 'itself'}, but {_shown(value)}"
    if isinstance(shape, Mapping):
        return _in_mapping(value, shape, where)
    return "" if _is(value, shape) else f"its answer has no {shape.__name__} in {where or 'itself'}"


def _in_mapping(value: object, shape: Mapping[str, Any], where: str) -> str:
    if not isinstance(value, dict):
        return f"its answer has no mapping in {where or 'itself'}"
    for name, inner in shape.items():
        inside = f"{where}.{name}" if where else name
        if name in value:
            if found := wrong(value[name], inner, inside):
                return found
        elif not isinstance(inner, Optional):
            return f"its answer has no {inside}"
    return ""


def _shown(value: object) -> str:
    return repr(value[:60]) if isinstance(value, str) else f"a {type(value).__name__}"


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63 and isfinite(value)
        )
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, kind)
