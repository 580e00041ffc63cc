"""The whole document, from all collectors."""

import contextlib
import json
import os
import signal
import sys
import time
import zlib
from typing import Any, Dict, Iterable, Tuple

from . import driver, identity, log, pci, smi, threads
from .collectors import Collect, add_error, collect
from .options import ProbeOptions
from .readers import number, text

SCHEMA = "gpunodes.probe/1"
GPUS_RESET = "run/gpunodes-gpu-reset"
"""Time of the last GPU reset by a repair in this boot, in seconds since the boot (``escalate.py`` writes it)."""


def read(options: ProbeOptions) -> Dict[str, Any]:
    """Collect all facts; returns within the deadline, whatever hangs."""
    started = time.monotonic()
    facts: Dict[str, Any] = _empty(options)
    uptime = text(options.path("proc/uptime")).split()
    facts["uptime_s"] = float(uptime[0]) if uptime else 0.0
    facts["boot_id"] = text(options.path("proc/sys/kernel/random/boot_id")).strip() or None
    with contextlib.suppress(ValueError):
        facts["gpus_reset_s"] = float(text(options.path(GPUS_RESET)))
    facts["kernel"] = text(options.path("proc/sys/kernel/osrelease")).strip()
    for key, name in (("detect_count", "detect_count"), ("timeout_s", "timeout_secs"), ("warnings", "warnings")):
        facts["hung_task"][key] = number(text(options.path("proc/sys/kernel/hung_task_" + name)))
    if os.geteuid() != 0:
        add_error(facts, "privilege", "not running as root: stacks, and possibly the kernel log, cannot be read")
    collect(facts, options, COLLECTORS, started)
    _complete(facts, options)
    facts["took_s"] = round(time.monotonic() - started, 3)
    return facts


def _empty(options: ProbeOptions) -> Dict[str, Any]:
    """The document before any collector has reported."""
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "boot_id": None,
        "uptime_s": 0.0,
        "took_s": 0.0,
        "kernel": "",
        "errors": [],
        "log": {"source": None, "cut": False, "text": "", "repeats": []},
        "tasks": [],
        "hung_task": {"detect_count": None, "timeout_s": None, "warnings": None},
        "smi": {
            "status": "failed",
            "pid": None,
            "rc": None,
            "took_s": 0.0,
            "task_state": None,
            "still_s": None,
            "stack": [],
            "xml": None,
            "message": "",
        },
        "pci": [],
        "driver": {"loaded": False, "module": None, "library": None, "open": None, "gpus": []},
        "services": {},
        "hostname": None,
        "machine_id": None,
        "product_uuid": None,
        "product_serial": None,
        "macs": [],
        "expected": {"gpus": options.expected_gpus, "from": None if options.expected_gpus is None else "setting"},
    }


def _complete(facts: Dict[str, Any], options: ProbeOptions) -> None:
    """Combine facts of several collectors: add stacks and ages to their threads, and the GPU count of the boot log."""
    stacks, ages = facts.pop("stacks", {}), facts.pop("ages", {})
    for task in facts["tasks"]:
        task["stack"] = stacks.get(str(task["pid"]), [])
        task["age_s"] = max(task["age_s"], ages.get(str(task["pid"]), 0.0))
    enumerated = facts.pop("enumerated", None)
    if options.expected_gpus is None and enumerated:
        facts["expected"] = {"gpus": enumerated, "from": "boot log"}


COLLECTORS: Iterable[Tuple[str, Collect]] = (
    ("log", log.log),
    ("tasks", threads.tasks),
    ("smi", smi.smi),
    ("pci", pci.pci),
    ("driver", driver.driver),
    ("services", driver.services),
    ("identity", identity.identity),
)


def main(settings: Dict[str, Any]) -> None:
    """Print the facts, compressed, after their length in a line; ``settings`` are the arguments of ProbeOptions."""
    options = ProbeOptions(**settings)
    # The last resort if this process itself hangs.
    signal.alarm(int(options.deadline_s) + 5)
    packed = zlib.compress(json.dumps(read(options)).encode("ascii"), 6)
    sys.stdout.buffer.write(str(len(packed)).encode("ascii") + b"\n" + packed)
    sys.stdout.buffer.flush()
