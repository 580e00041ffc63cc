"""The probe's facts about a live machine (``gpunodes.probe/1``), typed.

They come from an untrusted machine: ``shape.py`` checks their types, and long texts are cut here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT = 4096
_LOG = 3 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A thread in uninterruptible sleep, or a process of one of NVIDIA's tools."""

    pid: int
    name: str
    state: str
    stack: tuple[str, ...]
    age_s: float
    wchan: str
    """The kernel's function in which it waits; empty or 0 if the kernel does not show it."""


@dataclass(frozen=True, slots=True)
class Function:
    """An NVIDIA PCI function."""

    address: str
    pci_class: str
    driver: str
    responds: bool
    width: int | None
    max_width: int | None
    aer_nonfatal: int
    aer_fatal: int

    @property
    def is_gpu(self) -> bool:
        """Class 03: display and 3D controllers."""
        return self.pci_class.startswith("03")

    @property
    def is_switch(self) -> bool:
        """Class 0680, other bridges: NVIDIA's are NVSwitches."""
        return self.pci_class.startswith("0680")


@dataclass(frozen=True, slots=True)
class Repeat:
    """Lines that the probe counted and left out of its log."""

    line: str
    count: int
    last: float


@dataclass(frozen=True, slots=True)
class Smi:
    """How the run of nvidia-smi ended."""

    status: str
    task_state: str
    stack: tuple[str, ...]
    """The kernel stack of the process that does not end, () if it could not be read."""
    xml: str
    message: str
    pid: int | None
    took_s: float
    still_s: float | None
    """For how long it had neither written nor woken when the probe gave up, None if the probe did not come that far."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the probe found."""

    boot_id: str | None
    uptime_s: float
    """Seconds since the boot; 0 if it could not be read."""
    gpus_reset_s: float | None
    """Time of the last GPU reset, in seconds since the boot."""
    log: str
    log_source: str
    repeats: tuple[Repeat, ...]
    tasks: tuple[Task, ...]
    hung_detected: int | None
    smi: Smi
    functions: tuple[Function, ...]
    driver_loaded: bool
    module: str
    library: str
    driver_gpus: int
    services: Mapping[str, str]
    expected: int | None
    errors: tuple[tuple[str, str], ...]
    """What the probe could not read, and why."""

    def lacks(self, *collectors: str) -> bool:
        """Whether one of these collectors of the probe reported that it could not read all."""
        return any(what in collectors for what, _ in self.errors)


def read(found: Mapping[str, Any]) -> Facts:
    """The typed facts from the probe's document, which must have the shape that ``shape.violation`` checks."""
    log, smi, driver = found["log"], found["smi"], found["driver"]
    boot_id = found["boot_id"] or ""
    return Facts(
        boot_id=boot_id if re.fullmatch(r"[0-9a-fA-F-]{32,36}", boot_id) else None,
        uptime_s=found["uptime_s"],
        gpus_reset_s=found.get("gpus_reset_s"),
        log=log["text"][:_LOG],
        log_source=_text(log["source"]),
        repeats=tuple(Repeat(_text(entry["line"]), entry["count"], entry["last"]) for entry in log["repeats"]),
        tasks=tuple(
            Task(
                entry["pid"],
                _text(entry["comm"], 64),
                _text(entry["state"], 2),
                tuple(_text(frame, 200) for frame in entry["stack"]),
                entry["age_s"],
                _text(entry["wchan"], 64),
            )
            for entry in found["tasks"]
        ),
        hung_detected=found["hung_task"]["detect_count"],
        smi=Smi(
            _text(smi["status"]),
            _text(smi["task_state"], 2),
            tuple(_text(frame, 200) for frame in smi.get("stack", ())),
            _text(smi["xml"], _LOG),
            _text(smi["message"]),
            smi["pid"],
            smi["took_s"],
            smi["still_s"],
        ),
        functions=functions(found["pci"]),
        driver_loaded=driver["loaded"],
        module=_text(driver["module"], 40),
        library=_text(driver["library"], 40),
        driver_gpus=len(driver["gpus"]),
        services={name: _text(state, 40) for name, state in found["services"].items()},
        expected=found["expected"]["gpus"],
        errors=tuple((_text(entry["what"], 40), _text(entry["error"], 200)) for entry in found["errors"]),
    )


def functions(pci: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    """NVIDIA's functions among those that the probe lists as ``pci``."""
    return tuple(_function(entry) for entry in pci if entry["vendor"] == "10de")


def _function(entry: Mapping[str, Any]) -> Function:
    link, aer = entry["link"] or {}, entry["aer"] or {}
    return Function(
        _address(entry["address"]),
        _text(entry["class"], 6),
        _text(entry["driver"], 40),
        entry["responds"],
        link.get("width"),
        link.get("max_width"),
        aer.get("nonfatal", 0),
        aer.get("fatal", 0),
    )


def _address(text: str) -> str:
    address = text.lower()
    return address if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address) else ""


def _text(value: str | None, limit: int = _TEXT) -> str:
    return (value or "")[:limit]
