"""Matches machines and BMCs."""

from __future__ import annotations

from dataclasses import dataclass

from .model import BmcIdentity, MachineIdentity
from .values import macs, same_serial, same_uuid


@dataclass(frozen=True)
class BmcMatch:
    """Whether a BMC belongs to the machine: True, False, or None where that is unknown; ``why`` is the reason."""

    same: bool | None
    why: str


def match_bmc(machine: MachineIdentity, bmc: BmcIdentity) -> BmcMatch:
    """Whether a BMC belongs to ``machine``; the first row that applies decides.

    ===  ================================================  =====================================================
     1   the UUIDs differ, in every byte order             no
     2   both have a common MAC address                    yes
     3   the serial numbers differ                         no
     4   both have MAC addresses, but none in common       no; unknown if the UUIDs or the serial numbers are equal
     5   the UUIDs or the serial numbers are equal         yes
     6   none of these                                     unknown
    ===  ================================================  =====================================================

    An equal UUID or serial number decides only where nothing contradicts it: clones share a UUID, boards of one vendor
    may have the same, and machines of one chassis may share a serial number. Placeholders and locally administered MAC
    addresses do not count. ``why`` names both sides.
    """
    machine_macs, bmc_macs = macs(machine.macs), macs(bmc.macs)
    uuids = same_uuid(machine.system_uuid, bmc.system_uuid)
    serials = same_serial(machine.serial, bmc.serial)
    same: bool | None
    if uuids is False:
        same, why = False, "different UUIDs"
    elif common := sorted(machine_macs & bmc_macs):
        same, why = True, f"both have the MAC address {common[0]}"
    elif serials is False:
        same, why = False, "different serial numbers"
    else:
        equal = " and ".join(what for what, is_equal in (("UUID", uuids), ("serial number", serials)) if is_equal)
        disjoint = bool(machine_macs and bmc_macs)
        same = (None if equal else False) if disjoint else (True if equal else None)
        parts = [f"same {equal}" if equal else "", "no common MAC address" if disjoint else ""]
        why = ", ".join(part for part in parts if part) or "nothing to compare"
    return BmcMatch(same, f"{why}: {machine.hardware_text}; {bmc.text}")
