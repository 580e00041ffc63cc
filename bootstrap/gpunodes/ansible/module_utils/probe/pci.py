"""NVIDIA's functions on the PCI bus."""

import contextlib
import os
import re
from typing import Any, Dict, Optional

from . import readers
from .options import Emit, ProbeOptions

NVIDIA = "0x10de"


def pci(options: ProbeOptions, emit: Emit) -> None:
    """Every NVIDIA function on the bus: whether it responds, its link, its error counters (Linux, sysfs-bus-pci)."""
    base = options.path("sys/bus/pci/devices")
    for address in readers.names(base):
        device = base + "/" + address + "/"
        if readers.text(device + "vendor").strip() != NVIDIA:
            continue
        driver: Optional[str] = None
        with contextlib.suppress(OSError):
            driver = os.path.basename(os.readlink(device + "driver"))
        emit(
            "pci",
            {
                "address": address,
                "vendor": NVIDIA[2:],
                "device": readers.text(device + "device").strip()[2:],
                "class": readers.text(device + "class").strip()[2:],
                "driver": driver,
                "responds": _responds(device),
                "link": _link(device),
                "aer": _aer(device),
            },
        )


def _responds(device: str) -> bool:
    """Whether its configuration space is readable: a lost device reads as all ones. Suspended devices are not woken."""
    if readers.text(device + "power/runtime_status").strip() == "suspended":
        return True
    try:
        with open(device + "config", "rb") as file:
            data = file.read(64)
    except OSError:
        return False
    return data.strip(b"\xff") != b""


def _link(device: str) -> Optional[Dict[str, Any]]:
    width, max_width = (
        readers.number(readers.text(device + name)) for name in ("current_link_width", "max_link_width")
    )
    speed, max_speed = (readers.text(device + name).strip() for name in ("current_link_speed", "max_link_speed"))
    if width is None or max_width is None or not speed:
        return None
    return {"speed": speed, "width": width, "max_speed": max_speed, "max_width": max_width}


def _aer(device: str) -> Optional[Dict[str, int]]:
    found: Dict[str, int] = {}
    for name, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
        number = re.search(r"TOTAL_ERR_" + total + r" (\d+)", readers.text(device + "aer_dev_" + name))
        if number is None:
            return None
        found[name] = int(number.group(1))
    return found
