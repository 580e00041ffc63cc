"""One machine that is planned for: what it has, by the tables, and what was found to say on the way."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from gpunodes.planner import tables
from gpunodes.planner.gates import Conflict
from gpunodes.planner.gpu_model import SOURCES, Facts, Gpu, Reason, RequestedSoftware

Row = Mapping[str, Any]

_DISPLAY = "03"
"""The PCI base class of display controllers, which GPUs without a display are too (3D controller, 0302)."""


class Case:
    """A machine, its facts and what is wished of it; collects conflicts, warnings and reasons."""

    def __init__(self, machine: str, facts: Facts, requested: RequestedSoftware) -> None:
        self.machine = machine
        self.facts = facts
        self.gpu: Row = facts.get("gpu") or {}
        self.requested = requested
        self.conflicts: list[Conflict] = []
        self.warnings: list[str] = []
        self.reasons: list[Reason] = []
        os = facts.get("os") or {}
        self.id = str(os.get("id") or "")
        self.system = system_of(self.id, str(os.get("version") or ""))
        self.gpus = gpus_of(facts)
        self.generations = [row for row in tables.read("drivers")["generation"] if self.has(row["name"])]

    def say(self, choice: str, why: str, source: str = "") -> None:
        """Note why something is chosen."""
        self.reasons.append(Reason(choice, why, source))

    def refuse(self, fact: str, limit: str, remedy: str) -> None:
        """Note what cannot be."""
        self.conflicts.append(Conflict(fact, limit, remedy))

    def products(self, row: Row) -> str:
        """The machine's GPUs of a generation, by name."""
        return ", ".join(dict.fromkeys(gpu.product for gpu in self.gpus if gpu.generation == row["name"]))

    def named(self, modules: str) -> str:
        """The generations that take these modules only, with their GPUs."""
        rows = [row for row in self.generations if row["modules"] == [modules]]
        return " and ".join(f"{row['title']} GPUs ({self.products(row)})" for row in rows)

    def where(self) -> str:
        """The source that is wished, in words."""
        return SOURCES.get(self.requested.source, "any source that is known")

    def has(self, generation: str) -> bool:
        """Whether a GPU is of this generation."""
        return any(gpu.generation == generation for gpu in self.gpus)

    def switched(self) -> bool:
        """Whether the GPUs hang on NVSwitches."""
        return bool(self.gpu.get("nvswitches")) or any(product(gpu).get("switched") for gpu in self.gpus)

    def kernel(self) -> str:
        """The running kernel's release, empty where it is not known."""
        return str(self.facts.get("kernel") or "")

    def month(self) -> str:
        """The month that the machine's clock shows, ``2026-11``."""
        return time.strftime("%Y-%m", time.gmtime(float(self.facts.get("time") or 0)))


def gpus_of(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs of a machine that are its own: not those that it hands to virtual machines."""
    functions = (facts.get("gpu") or {}).get("functions") or ()
    return tuple(_gpu(function) for function in functions if is_gpu(function) and function.get("driver") != "vfio-pci")


def system_of(id_: str, version: str) -> str | None:
    """The name under which the tables know a system (``debian 13``, ``rhel 9`` of 9.4), None for an unknown one."""
    for row in tables.read("systems")["system"]:
        if id_ == row["id"] and (version == row["version"] or version.startswith(row["version"] + ".")):
            return f"{row['id']} {row['version']}"
    return None


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
    """Its row among the products, empty for one that has none."""
    return _by_id(int(gpu.device, 16))


def _generation(device: int) -> str:
    named = _by_id(device).get("generation")
    if named:
        return str(named)
    for row in tables.read("gpus")["range"]:
        if row["first"] <= device <= row["last"]:
            return str(row["generation"])
    return "newer"


def fill(text: str, branch: str, facts: Facts) -> str:
    """A name of the tables with what stands for its words in braces."""
    kernel = str(facts.get("kernel") or "")
    words = {"{branch}": branch, "{kernel}": kernel, "{kernel_flavour}": kernel.rpartition("-")[2]}
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def number(branch: str) -> int:
    """A driver branch, or a major version, to be compared."""
    return int(branch)


def installed_driver(driver: Row) -> str:
    """The version of the driver that is installed, built or not yet; empty where there is none."""
    versions = [driver.get("module"), *(driver.get("packages") or {}).values()]
    found = (re.search(r"\b\d{3}\.\d+(\.\d+)?", str(version or "")) for version in versions)
    return next((match[0] for match in found if match), "")


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version, to be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def cite(table: str, row: Row) -> str:
    """Who says what a row of a table says."""
    return str(tables.read(table)["sources"][row["source"]])


def branches() -> list[str]:
    """The driver branches that are known, oldest first."""
    return [row["name"] for row in tables.read("drivers")["branch"]]
