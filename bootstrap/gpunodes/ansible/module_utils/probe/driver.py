"""NVIDIA's driver: its versions, its GPUs, its services."""

import glob
import os
import re
from typing import Any, Dict, List, Optional

from . import readers
from .options import Emit, ProbeOptions

SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager")


def driver(options: ProbeOptions, emit: Emit) -> None:
    """Versions of module and library; its own list of GPUs last: reading it takes its locks."""
    emit("driver", {"loaded": os.path.isdir(options.path("sys/module/nvidia")), "library": _library(options)})
    module = readers.text(options.path("sys/module/nvidia/version")).strip()
    banner = readers.text(options.path("proc/driver/nvidia/version"))
    in_banner = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", banner)
    emit(
        "driver",
        {
            "module": module or (in_banner.group(1) if in_banner else None),
            "open": "Open Kernel Module" in banner if banner else None,
        },
    )
    base = options.path("proc/driver/nvidia/gpus")
    gpus: List[Dict[str, Any]] = []
    for address in readers.names(base):
        lines = readers.text("{}/{}/information".format(base, address)).splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = readers.number(fields.get("Device Minor", ""))
        gpus.append({"address": address, "minor": -1 if minor is None else minor, "model": fields.get("Model", "")})
        emit("driver", {"gpus": gpus})


def _library(options: ProbeOptions) -> Optional[str]:
    """The version of the NVML library that programs load: the end of its file's name."""
    folders = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/nvidia/lib64", "lib/*-linux-gnu")
    for folder in folders:
        for path in sorted(glob.glob(options.path(folder + "/libnvidia-ml.so.1"))):
            found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(path))
            if found:
                return found.group(1)
    return None


def services(options: ProbeOptions, emit: Emit) -> None:
    """The states of the driver's services, in one call of systemctl."""
    program = readers.program(options, "systemctl")
    if program is None or not os.path.isdir(options.path("run/systemd/system")):
        return
    units = [name + ".service" for name in SERVICES]
    argv = [program, "show", "--property=Id,LoadState,ActiveState", *units]
    states: Dict[str, Dict[str, str]] = {}
    unit: Dict[str, str] = {}
    try:
        for line in [*readers.output(argv, options.deadline_s / 2), ""]:
            key, _, value = line.partition("=")
            if value:
                unit[key] = value
            elif unit:
                states[unit.get("Id", "").rpartition(".")[0]] = unit
                unit = {}
    except (OSError, readers.SlowError) as error:
        emit("errors", {"what": "services", "error": str(error)})
    for name, state in states.items():
        if name in SERVICES:
            loaded = state.get("LoadState") == "loaded"
            emit("services", {name: state.get("ActiveState", "unknown") if loaded else "absent"})
