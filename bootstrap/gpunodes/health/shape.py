"""The shape of the probe's document (``gpunodes.probe/1``), checked before the document is used."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.shape import Many, Maybe, Named, Optional, wrong

SCHEMA = "gpunodes.probe/1"

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
    "responds": bool,
    "link": Maybe({"speed": str, "width": int, "max_speed": str, "max_width": int}),
    "aer": Maybe({"correctable": int, "nonfatal": int, "fatal": int}),
}
PROBE = {
    "schema": str,
    "time": float,
    "boot_id": Maybe(str),
    "gpus_reset_s": Optional(float),
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
        "still_s": Maybe(float),
        "stack": Optional(Many(str, 1000)),
        "xml": Maybe(str),
        "message": str,
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


def violation(document: object) -> str:
    """What is wrong with the shape of a document, "" if it is correct. Never raises."""
    if isinstance(document, Mapping) and document.get("schema") != SCHEMA:
        return f"its answer does not have the schema {SCHEMA}"
    return wrong(document, PROBE)
