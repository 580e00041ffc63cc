"""NVIDIA's catalogs: the advice for an Xid, an SXid, a recovery action or NVLink registers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunodes.health import tables
from gpunodes.health.model import Action

FALLEN_OFF_BUS = 79
RECOVERY_CHANGED = 154
CLEANUP = 45
"""The removal of an application's channels, usually a consequence of another Xid."""
APP_FAULTS = (13, 31)
NVLINK5 = range(144, 151)


@dataclass(frozen=True, slots=True)
class Advice:
    """The meaning of a code and the action for it."""

    title: str
    action: Action
    watch: bool
    """The machine is degraded although no immediate action is needed."""
    advice: str
    source: str


@dataclass(frozen=True, slots=True)
class _Resolution:
    action: Action
    watch: bool
    advice: str


def _resolution(name: str) -> _Resolution:
    """The action and advice for one of NVIDIA's resolution buckets."""
    for row in tables.read("actions"):
        if row["bucket"] == name:
            return _Resolution(Action(row["action"]), row["watch"] == "yes", row["advice"])
    advice = "The catalog names no action: run nvidia-bug-report.sh and contact NVIDIA support."
    return _Resolution(Action.NONE, True, advice)


def xid(code: int) -> Advice | None:
    """The catalog's advice for an Xid, None if the Xid is not in the catalog."""
    for row in tables.read("xid"):
        if row["code"] == str(code):
            resolution = _resolution(row["immediate"])
            return Advice(row["mnemonic"], resolution.action, resolution.watch, resolution.advice, tables.source("xid"))
    return None


def recovery(number: int) -> Advice | None:
    """The recovery action that the number in an Xid 154 requests, None for an unknown number."""
    for row in tables.read("recovery"):
        if row["number"] == str(number):
            action = Action(row["action"])
            advice = f"The driver requests the recovery action: {row['name']}."
            return Advice(row["name"], action, False, advice, tables.source("recovery"))
    return None


def nvlink5(code: int, info: int, status: int) -> Advice | None:
    """The advice for the registers of an Xid 144 to 150, None if the table has no row for them.

    The register layout depends on the driver version, which is not in the line: the layout from R575 is tried first.
    If several rows match, the strongest action counts.
    """
    rows = [row for row in tables.read("nvlink5") if row["code"] == str(code)]
    for layout, then in (("from_r575", "then_from"), ("before_r575", "then_before")):
        matching = [(row, row["action"]) for row in rows if _matches(row[layout], info)]
        matching += [(row, row["then"]) for row in rows if row[then] and _matches(row[then], info)]
        exact = [(row, bucket) for row, bucket in matching if not row["status"] or status in _statuses(row)]
        found = exact or [(row, bucket) for row, bucket in matching if any(bit & status for bit in _statuses(row))]
        if found:
            strongest = max((_resolution(bucket) for _, bucket in found), key=lambda each: each.action.rank)
            title = f"{' or '.join(sorted({row['unit'] for row, _ in found}))} ({found[0][0]['severity']})"
            return Advice(title, strongest.action, strongest.watch, strongest.advice, tables.source("nvlink5"))
    return None


def sxid(code: int) -> Advice | None:
    """The guide's advice for an SXid whose line names no severity, None if the SXid is not in the guide."""
    for row in tables.read("sxid"):
        if row["code"] == str(code):
            action, advice = _SXID[row["class"]]
            return Advice(row["name"], action, row["class"] == "notable", advice, tables.source("sxid"))
    return None


_SXID = {
    "non-fatal": (Action.NONE, "The NVSwitch continues to work; no action is needed."),
    "fatal": (Action.RESET_GPU, "Reset the GPUs and the NVSwitches of that link; a reboot does this too."),
    "always-fatal": (Action.REBOOT, "The whole fabric is down: reboot the machine."),
    "notable": (Action.NONE, "Watch the NVSwitch: check its other log lines and the cooling."),
}


def _matches(pattern: str, value: int) -> bool:
    """Whether 32 bits match a pattern such as ``--01``, the highest bit first."""
    bits = f"{value & 0xFFFFFFFF:032b}"
    return all(expected in ("-", bit) for expected, bit in zip(pattern, bits, strict=True))


def _statuses(row: dict[str, str]) -> list[int]:
    """The error statuses of a row; each is a bit or a whole number."""
    return [int(value, 16) for value in re.findall(r"0x[0-9A-Fa-f]+", row["status"])]
