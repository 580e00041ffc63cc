"""Matches machines and BMCs."""

from __future__ import annotations

from dataclasses import dataclass

from .model import BmcIdentity, MachineIdentity
from .values import macs, same_uuid, serial


@dataclass(frozen=True)
class BmcMatch:
    """Whether a BMC belongs to the machine: True, False, or None where that is unknown; ``why`` is the reason."""

    same: bool | None
    why: str


def match_bmc(machine: MachineIdentity, bmc: BmcIdentity) -> BmcMatch:
    """Whether a BMC belongs to ``machine``.

    The first of these decides: the UUIDs, in any byte order; a common MAC address; the serial numbers; MAC addresses
    without a common one. Machines of one chassis may share a serial number: an equal one decides nothing where the MAC
    addresses have none in common. ``why`` names both sides.
    """
    both = f"{machine.hardware_text}; {bmc.text}"
    machine_macs, bmc_macs = macs(machine.macs), macs(bmc.macs)
    common = sorted(machine_macs & bmc_macs)
    disjoint = bool(machine_macs and bmc_macs) and not common
    if (same := same_uuid(machine.system_uuid, bmc.system_uuid)) is not None:
        return BmcMatch(same, f"{'same UUID' if same else 'different UUIDs'}: {both}")
    if common:
        return BmcMatch(True, f"both have the MAC address {common[0]}: {both}")
    machine_serial, bmc_serial = serial(machine.serial), serial(bmc.serial)
    if machine_serial and bmc_serial and machine_serial != bmc_serial:
        return BmcMatch(False, f"different serial numbers: {both}")
    if machine_serial and bmc_serial:
        return BmcMatch(
            None if disjoint else True,
            f"same serial number{', no common MAC address' if disjoint else ''}: {both}",
        )
    return BmcMatch(
        False if disjoint else None, f"{'no common MAC address' if disjoint else 'nothing to compare'}: {both}"
    )
