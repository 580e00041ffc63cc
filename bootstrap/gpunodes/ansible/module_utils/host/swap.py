"""Swap: turned off for the kubelet, and on again by an undo."""

from __future__ import annotations

import os
import stat

from .. import disk
from ..process import must
from ..report import Difference, of_file
from .changes import Changes

_FSTAB_MARK = "# off for Kubernetes (gpunodes): "


def turn_off(changes: Changes) -> None:
    """Turn swap off now and at every boot."""
    active = active_swaps(disk.read("/proc/swaps") or "")
    fstab = disk.read("/etc/fstab") or ""
    commented = without_swap(fstab)
    if active:
        changes.ledger.note_swaps(active)
        difference = Difference("swap", dict.fromkeys(active, "on"), dict.fromkeys(active, "off"))
        if changes.step(f"turn swap off ({', '.join(active)})", difference):
            for device in active:
                must(["swapoff", device])
    if commented != fstab:
        mode = stat.S_IMODE(os.stat("/etc/fstab").st_mode)
        if changes.step("comment swap out in /etc/fstab", *of_file("/etc/fstab", commented, mode)):
            disk.write("/etc/fstab", commented, mode)
            must(["systemctl", "daemon-reload"])


def active_swaps(listing: str) -> list[str]:
    """The devices and files in /proc/swaps."""
    return [line.split()[0] for line in listing.splitlines()[1:] if line.split()]


def without_swap(fstab: str) -> str:
    """``fstab`` with its swap lines commented out in a form that ``with_swap`` recognises."""
    lines = []
    for line in fstab.splitlines(keepends=True):
        fields = line.split()
        swap = fields[2:3] == ["swap"] and not fields[0].startswith("#")
        lines.append(f"{_FSTAB_MARK}{line}" if swap else line)
    return "".join(lines)


def with_swap(fstab: str) -> str:
    """Undo ``without_swap``."""
    return "".join(
        line[len(_FSTAB_MARK) :] if line.startswith(_FSTAB_MARK) else line for line in fstab.splitlines(keepends=True)
    )
