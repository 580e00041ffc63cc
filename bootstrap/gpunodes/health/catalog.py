"""What NVIDIA's catalogs say of a code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunodes.health import tables
from gpunodes.health.model import Action

FALLEN_OFF_BUS = 79
RECOVERY_CHANGED = 154
CLEANUP = 45
"""The removal of an application's channels, which mostly follows another Xid."""
APP_FAULTS = (13, 31)
NVLINK5 = range(144, 151)


@dataclass(frozen=True, slots=True)
class Advice:
    """What a code means and asks for."""

    title: str
    action: Action
    watch: bool
    """The machine is not well though nothing is to be done at once."""
    advice: str
    source: str


@dataclass(frozen=True, slots=True)
class _Word:
    action: Action
    watch: bool
    advice: str


def _word(name: str) -> _Word:
    """What one of NVIDIA's words for an action means here."""
    for row in tables.read("actions"):
        if row["word"] == name:
            return _Word(Action(row["action"]), row["watch"] == "yes", row["advice"])
    return _Word(Action.NONE, True, "The catalog names no action: collect nvidia-bug-report and ask NVIDIA's support.")


def xid(code: int) -> Advice | None:
    """What the catalog says of an Xid, None for one that is not in it."""
    for row in tables.read("xid"):
        if row["code"] == str(code):
            word = _word(row["immediate"])
            return Advice(row["mnemonic"], word.action, word.watch, word.advice, tables.source("xid"))
    return None


def recovery(number: int) -> Advice | None:
    """What the number of an Xid 154 asks for, None for one that is not known."""
    for row in tables.read("recovery"):
        if row["number"] == str(number):
            action = Action(row["action"])
            return Advice(row["name"], action, False, f"The driver asks for: {row['name']}.", tables.source("recovery"))
    return None


def nvlink5(code: int, info: int, status: int) -> Advice | None:
    """What the registers of an Xid 144 to 150 say, None where the table has no such row.

    The driver's version, which decides about the layout, is not in the line: the layout of R575 is tried first, and of
    several rows that fit the strongest holds.
    """
    rows = [row for row in tables.read("nvlink5") if row["code"] == str(code)]
    for layout, then in (("from_r575", "then_from"), ("before_r575", "then_before")):
        fitting = [(row, row["action"]) for row in rows if _fits(row[layout], info)]
        fitting += [(row, row["then"]) for row in rows if row[then] and _fits(row[then], info)]
        exact = [(row, word) for row, word in fitting if not row["status"] or status in _statuses(row)]
        found = exact or [(row, word) for row, word in fitting if any(bit & status for bit in _statuses(row))]
        if found:
            word = max((_word(word) for _, word in found), key=lambda word: word.action.rank)
            title = f"{' or '.join(sorted({row['unit'] for row, _ in found}))} ({found[0][0]['severity']})"
            return Advice(title, word.action, word.watch, word.advice, tables.source("nvlink5"))
    return None


def sxid(code: int) -> Advice | None:
    """What the catalog says of an SXid whose line names no severity, None for one that is not in it."""
    for row in tables.read("sxid"):
        if row["code"] == str(code):
            action, advice = _SXID[row["class"]]
            return Advice(row["name"], action, row["class"] == "notable", advice, tables.source("sxid"))
    return None


_SXID = {
    "non-fatal": (Action.NONE, "The NVSwitch goes on; nothing is to be done."),
    "fatal": (Action.RESET_GPU, "Reset the GPUs and the NVSwitches of that link (or reboot, which does it too)."),
    "always-fatal": (Action.REBOOT, "The whole fabric is down: reboot the machine."),
    "notable": (Action.NONE, "Watch the NVSwitch: look for what its lines say beside it, and at the cooling."),
}


def _fits(pattern: str, value: int) -> bool:
    """Whether 32 bits fit a pattern such as ``--01``, the highest bit first."""
    bits = f"{value & 0xFFFFFFFF:032b}"
    return all(wanted in ("-", bit) for wanted, bit in zip(pattern, bits, strict=True))


def _statuses(row: dict[str, str]) -> list[int]:
    """The error statuses that a row names; each is a bit, or a number of its own."""
    return [int(value, 16) for value in re.findall(r"0x[0-9A-Fa-f]+", row["status"])]
