"""The probe's facts about a live machine (``gpunodes.probe/1``), typed.

They come from an untrusted machine: everything is checked and bounded here, and values of the wrong type are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_LIST = 512
_TEXT = 4096
_LOG = 3 << 20
_LARGE = 1 << 53


@dataclass(frozen=True, slots=True)
class Task:
    """A thread in uninterruptible sleep, or a process of one of NVIDIA's tools."""

    pid: int
    name: str
    state: str
    stack: tuple[str, ...]
    age_s: float


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
    last: float | None


@dataclass(frozen=True, slots=True)
class Smi:
    """How the run of nvidia-smi ended."""

    status: str = ""
    task_state: str = ""
    xml: str = ""
    message: str = ""
    pid: int | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the probe found."""

    boot_id: str | None = None
    gpus_reset_s: float | None = None
    """Time of the last GPU reset, in seconds since the boot."""
    log: str = ""
    log_source: str = ""
    repeats: tuple[Repeat, ...] = ()
    tasks: tuple[Task, ...] = ()
    hung_detected: int | None = None
    smi: Smi = Smi()
    functions: tuple[Function, ...] = ()
    driver_loaded: bool | None = None
    module: str = ""
    library: str = ""
    driver_gpus: int | None = None
    services: Mapping[str, str] | None = None
    expected: int | None = None


def read(found: Mapping[str, object]) -> Facts:
    """The typed facts from the probe's document."""
    log, smi, driver = (_mapping(found, name) for name in ("log", "smi", "driver"))
    boot_id = _text(found, "boot_id")
    return Facts(
        boot_id=boot_id if re.fullmatch(r"[0-9a-fA-F-]{32,36}", boot_id) else None,
        gpus_reset_s=_number(found, "gpus_reset_s"),
        log=_text(log, "text", _LOG),
        log_source=_text(log, "source"),
        repeats=tuple(
            Repeat(_text(entry, "line"), _whole(entry, "count") or 0, _number(entry, "last"))
            for entry in _entries(log, "repeats")
        ),
        tasks=tuple(
            Task(
                _whole(entry, "pid") or 0,
                _text(entry, "comm", 64),
                _text(entry, "state", 2),
                tuple(frame[:200] for frame in _strings(entry, "stack")),
                _number(entry, "age_s") or 0.0,
            )
            for entry in _entries(found, "tasks")
        ),
        hung_detected=_whole(_mapping(found, "hung_task"), "detect_count"),
        smi=Smi(
            _text(smi, "status"),
            _text(smi, "task_state", 2),
            _text(smi, "xml", _LOG),
            _text(smi, "message"),
            _whole(smi, "pid"),
            _number(smi, "took_s") or 0.0,
        ),
        functions=tuple(_function(entry) for entry in _entries(found, "pci") if _text(entry, "vendor") == "10de"),
        driver_loaded=loaded if isinstance(loaded := driver.get("loaded"), bool) else None,
        module=_text(driver, "module", 40),
        library=_text(driver, "library", 40),
        driver_gpus=len(list(_entries(driver, "gpus"))) if isinstance(driver.get("gpus"), list) else None,
        services={name: str(state)[:40] for name, state in _mapping(found, "services").items()},
        expected=_whole(_mapping(found, "expected"), "gpus"),
    )


def _function(entry: Mapping[str, object]) -> Function:
    link, aer = _mapping(entry, "link"), _mapping(entry, "aer")
    return Function(
        _address(entry),
        _text(entry, "class", 6),
        _text(entry, "driver", 40),
        entry.get("responds") is not False,
        _whole(link, "width"),
        _whole(link, "max_width"),
        _whole(aer, "nonfatal") or 0,
        _whole(aer, "fatal") or 0,
    )


def _address(entry: Mapping[str, object]) -> str:
    address = _text(entry, "address", 20).lower()
    return address if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address) else ""


def _mapping(found: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def _list(found: Mapping[str, object], name: str) -> Sequence[object]:
    value = found.get(name)
    return value[:_LIST] if isinstance(value, list) else ()


def _entries(found: Mapping[str, object], name: str) -> Iterator[Mapping[str, object]]:
    yield from (entry for entry in _list(found, name) if isinstance(entry, dict))


def _strings(found: Mapping[str, object], name: str) -> Iterator[str]:
    yield from (entry for entry in _list(found, name) if isinstance(entry, str))


def _text(found: Mapping[str, object], name: str, limit: int = _TEXT) -> str:
    value = found.get(name)
    return value[:limit] if isinstance(value, str) else ""


def _whole(found: Mapping[str, object], name: str) -> int | None:
    value = found.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGE else None


def _number(found: Mapping[str, object], name: str) -> float | None:
    value = found.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGE else None
