"""The shape of the probe's document (``gpunodes.probe/1``): what a machine sends must have it before it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

SCHEMA = "gpunodes.probe/1"


@dataclass(frozen=True, slots=True)
class Many:
    """A list of values of one shape, no longer than ``most``."""

    each: Any
    most: int


@dataclass(frozen=True, slots=True)
class Named:
    """A mapping from any names to values of one shape."""

    each: Any
    most: int


@dataclass(frozen=True, slots=True)
class Maybe:
    """A value of a shape, or null."""

    value: Any


# A type stands for itself; numbers are finite, and `float` takes whole ones too. A mapping stands for one that has at
# least these names: a newer probe may tell more.
_ERROR = {"what": str, "error": str}
_REPEAT = {"line": str, "count": int, "first": float, "last": float}
_TASK = {
    "pid": int,
    "comm": str,
    "state": str,
    "kthread": bool,
    "wchan": str,
    "stack": Many(str, 1000),
    "age_s": float,
}
_FUNCTION = {
    "address": str,
    "vendor": str,
    "device": str,
    "class": str,
    "driver": Maybe(str),
    "answers": bool,
    "link": Maybe({"speed": str, "width": int, "max_speed": str, "max_width": int}),
    "aer": Maybe({"correctable": int, "nonfatal": int, "fatal": int}),
}
PROBE = {
    "schema": str,
    "time": float,
    "boot_id": Maybe(str),
    "uptime_s": float,
    "took_s": float,
    "kernel": str,
    "errors": Many(_ERROR, 1000),
    "log": {"source": Maybe(str), "cut": bool, "text": str, "repeats": Many(_REPEAT, 1000)},
    "tasks": Many(_TASK, 1000),
    "hung_task": {"detect_count": Maybe(int), "timeout_s": Maybe(int), "warnings": Maybe(int)},
    "smi": {
        "status": str,
        "pid": Maybe(int),
        "rc": Maybe(int),
        "took_s": float,
        "task_state": Maybe(str),
        "xml": Maybe(str),
        "said": str,
    },
    "pci": Many(_FUNCTION, 1000),
    "driver": {
        "loaded": bool,
        "module": Maybe(str),
        "library": Maybe(str),
        "open": Maybe(bool),
        "gpus": Many({"address": str, "minor": int, "model": str}, 1000),
    },
    "services": Named(str, 100),
    "expected": {"gpus": Maybe(int), "from": Maybe(str)},
}


def complaint(document: object) -> str:
    """What is wrong with the shape of a document, "" when nothing is. Never raises."""
    if isinstance(document, Mapping) and document.get("schema") != SCHEMA:
        return f"its answer is not of the schema {SCHEMA}"
    return _wrong(document, PROBE, "")


def _wrong(value: object, shape: Any, where: str) -> str:  # noqa: PLR0911 - one line for each kind of shape
    if isinstance(shape, Maybe):
        return "" if value is None else _wrong(value, shape.value, where)
    if isinstance(shape, Many):
        if not isinstance(value, list) or len(value) > shape.most:
            return f"its answer has no list of at most {shape.most} in {where}"
        return next((said for item in value if (said := _wrong(item, shape.each, where))), "")
    if isinstance(shape, Named):
        if not isinstance(value, dict) or len(value) > shape.most:
            return f"its answer has no mapping of at most {shape.most} in {where}"
        return next((said for item in value.values() if (said := _wrong(item, shape.each, where))), "")
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return f"its answer has no mapping in {where or 'itself'}"
        for name, inner in shape.items():
            inside = f"{where}.{name}" if where else name
            if said := _wrong(value[name], inner, inside) if name in value else f"its answer has no {inside}":
                return said
        return ""
    return "" if _is(value, shape) else f"its answer has no {shape.__name__} in {where}"


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63 and isfinite(value)
        )
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, kind)
