"""Validates the shape of documents from other machines before they are used. Pure, standard library only.

A shape is a type, one of the classes below, or a mapping. Numbers must be finite and of limited size; `float` accepts
integers too. A mapping requires at least its names: a newer sender may add more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class Many:
    """A list of values of one shape, with at most ``most`` items."""

    each: Any
    most: int


@dataclass(frozen=True, slots=True)
class Named:
    """A mapping from names, which match the pattern ``name`` if it is set, to values of one shape."""

    each: Any
    most: int
    name: Pattern | None = None


@dataclass(frozen=True, slots=True)
class Maybe:
    """A value of a shape, or null."""

    value: Any


@dataclass(frozen=True, slots=True)
class Optional:
    """In a mapping: the value of a name that may be missing."""

    value: Any


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text that fully matches a regular expression; ``title`` names it in messages."""

    title: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in seconds since 1970 that a calendar has."""


LATEST = 253402300800.0
"""The year 10000, in seconds since 1970: the datetime module supports no later date."""


def one_of(*values: str) -> Pattern:
    """One of these values."""
    return Pattern(f"one of {', '.join(values)}", "|".join(map(re.escape, values)))


def wrong(value: object, shape: Any, where: str = "") -> str:  # noqa: PLR0911 - one for each kind of shape
    """What is wrong with the shape of a value, "" if it is correct; ``where`` is its path. Never raises."""
    if isinstance(shape, Maybe | Optional):
        return "" if value is None and isinstance(shape, Maybe) else wrong(value, shape.value, where)
    if isinstance(shape, Many):
        if not isinstance(value, list) or len(value) > shape.most:
            return _expected(f"a list of at most {shape.most} items", where)
        return next((found for item in value if (found := wrong(item, shape.each, where))), "")
    if isinstance(shape, Named):
        if not isinstance(value, dict) or len(value) > shape.most:
            return _expected(f"a mapping of at most {shape.most} entries", where)
        parts = [*((name, shape.name or str) for name in value), *((item, shape.each) for item in value.values())]
        return next((found for part, each in parts if (found := wrong(part, each, where))), "")
    if isinstance(shape, Pattern):
        if isinstance(value, str) and re.fullmatch(shape.pattern, value):
            return ""
        return f"{_expected(shape.title, where)}, found {_shown(value)}"
    if isinstance(shape, Mapping):
        return _in_mapping(value, shape, where)
    if isinstance(shape, Moment):
        known = isinstance(value, int | float) and _is(value, float) and 0 <= value < LATEST
        return "" if known else _expected("a time", where)
    return "" if _is(value, shape) else _expected(shape.__name__, where)


def _in_mapping(value: object, shape: Mapping[str, Any], where: str) -> str:
    if not isinstance(value, dict):
        return _expected("a mapping", where)
    for name, inner in shape.items():
        inside = f"{where}.{name}" if where else name
        if name in value:
            if found := wrong(value[name], inner, inside):
                return found
        elif not isinstance(inner, Optional):
            return f"its answer is invalid: {inside} is missing"
    return ""


def _expected(what: str, where: str) -> str:
    return f"its answer is invalid: expected {what}{f' in {where}' if where else ''}"


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
