"""The planning case of one machine: its facts by the tables, and the collected conflicts, warnings and reasons."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import systems, tables
from gpunodes.planner.gpu_model import SOURCES, Facts, Gpu, Reason, RequestedSoftware

Row = Mapping[str, Any]

_DISPLAY = "03"
"""The PCI base class of display controllers; GPUs without a display belong to it too (3D controller, 0302)."""


class Case:
    """A machine, its facts and its requested software; collects conflicts, warnings and reasons."""

    def __init__(self, machine: str, facts: Facts, requested: RequestedSoftware) -> None:
        self.machine = machine
        self.facts = facts
        self.gpu: Row = facts.get("gpu") or {}
        self.requested = requested
        self.conflicts: list[Problem] = []
        self.warnings: list[str] = []
        self.reasons: list[Reason] = []
        os = facts.get("os") or {}
        self.id = str(os.get("id") or "")
        self.system = _system_of(os)
        self.gpus = gpus_of(facts)
        self.generations = [row for row in tables.read("drivers")["generation"] if self.has(row["name"])]

    def explain(self, choice: str, why: str, source: str = "") -> None:
        """Add the reason for a choice."""
        self.reasons.append(Reason(choice, why, source))

    def refuse(self, fact: str, limit: str, remedy: str) -> None:
        """Add a conflict."""
        self.conflicts.append(Problem(fact, limit, remedy))

    def products(self, row: Row) -> str:
        """The machine's GPUs of a generation, by name."""
        return ", ".join(dict.fromkeys(gpu.product for gpu in self.gpus if gpu.generation == row["name"]))

    def named(self, modules: str) -> str:
        """The generations that support only these modules, with their GPUs, for a message."""
        rows = [row for row in self.generations if row["modules"] == [modules]]
        return " and ".join(f"{row['title']} GPUs ({self.products(row)})" for row in rows)

    def for_system(self) -> str:
        """``for Debian 13``, or with a requested source ``for Debian 13 from the distribution``."""
        source = SOURCES.get(self.requested.source)
        return f"for {title_of(self.system)}" + (f" from {source}" if source else "")

    def has(self, generation: str) -> bool:
        """Whether a GPU is of this generation."""
        return any(gpu.generation == generation for gpu in self.gpus)

    def switched(self) -> bool:
        """Whether the GPUs are connected to NVSwitches."""
        return bool(self.gpu.get("nvswitches")) or any(product(gpu).get("switched") for gpu in self.gpus)

    def kernel(self) -> str:
        """The running kernel's release, empty if it is unknown."""
        return str(self.facts.get("kernel") or "")

    def month(self) -> str:
        """The current month by the machine's clock, ``2026-11``."""
        return time.strftime("%Y-%m", time.gmtime(float(self.facts.get("time") or 0)))


def gpus_of(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs of a machine, without those that it passes through to virtual machines.

    A machine without GPUs has those that are expected in the machines that will boot a copy of its disk, if any.
    """
    if ids := expected_gpus(facts):
        return tuple(_gpu({"address": "", "device": device}) for device in ids)
    functions = (facts.get("gpu") or {}).get("functions") or ()
    return tuple(_gpu(function) for function in functions if is_gpu(function) and function.get("driver") != "vfio-pci")


def expected_gpus(facts: Facts) -> tuple[str, ...]:
    """PCI device ids of GPUs that this machine has not, and that copies of its disk will find."""
    return tuple((facts.get("gpu") or {}).get("expected") or ())


def _system_of(system: Row) -> str | None:
    """The name of a system in the tables (``debian 13``; ``rhel 9`` for 9.4), None for an unknown one."""
    row = systems.known(system)
    return f"{row['id']} {row['version']}" if row else None


def title_of(system: str | None) -> str:
    """The name of a system in messages: ``Debian 13`` for ``debian 13``."""
    rows = tables.read("systems")["system"]
    return next((str(row["title"]) for row in rows if system == f"{row['id']} {row['version']}"), "this system")


def is_gpu(function: Row) -> bool:
    """Whether a PCI function is an NVIDIA GPU."""
    return function["vendor"] == "10de" and str(function["class"]).startswith(_DISPLAY)


def _gpu(function: Row) -> Gpu:
    device = str(function["device"]).lower()
    row = _by_id(int(device, 16))
    generation = _generation(int(device, 16))
    return Gpu(str(function["address"]), device, str(row.get("name") or f"NVIDIA GPU {device}"), generation)


def _by_id(device: int) -> Row:
    return next((row for row in tables.read("gpus")["product"] if row["device"] == device), {})


def product(gpu: Gpu) -> Row:
    """The GPU's row in the table of products, empty if it has none."""
    return _by_id(int(gpu.device, 16))


def _generation(device: int) -> str:
    generation = _by_id(device).get("generation")
    if generation:
        return str(generation)
    for row in tables.read("gpus")["range"]:
        if row["first"] <= device <= row["last"]:
            return str(row["generation"])
    return "newer"


def fill(text: str, branch: str, facts: Facts) -> str:
    """A name of the tables with its placeholders in braces filled in."""
    kernel = str(facts.get("kernel") or "")
    values = {"{branch}": branch, "{kernel}": kernel, "{kernel_flavour}": kernel.rpartition("-")[2]}
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def number(branch: str) -> int:
    """A driver branch or a major version as a number, for comparison."""
    return int(branch)


def installed_driver(driver: Row) -> str:
    """The version of the installed driver, even if its module is not built yet; empty without a driver."""
    versions = [driver.get("module"), *(driver.get("packages") or {}).values()]
    found = (re.search(r"\b\d{3}\.\d+(\.\d+)?", str(version or "")) for version in versions)
    return next((match[0] for match in found if match), "")


@functools.lru_cache(maxsize=256)  # a plan compares few versions, each many times
def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def exceeds(version: str, limit: str) -> bool:
    """Whether a version, or a major version, is newer than a limit; a limit of a major version has all its minors."""
    last = version_of(limit)
    return version_of(version)[: len(last)] > last


def cite(table: str, row: Row) -> str:
    """The source of a table's row."""
    return str(tables.read(table)["sources"][row["source"]])


def branches() -> list[str]:
    """All driver branches of the table, oldest first."""
    return [row["name"] for row in tables.read("drivers")["branch"]]
