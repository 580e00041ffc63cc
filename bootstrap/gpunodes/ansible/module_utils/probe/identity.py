"""What identifies a machine, to find its node and its BMC."""

import os
from typing import List

from . import readers
from .options import Emit, ProbeOptions


def identity(options: ProbeOptions, emit: Emit) -> None:
    """What identifies this machine, to find its node and its BMC."""
    for key, name in (
        ("hostname", "proc/sys/kernel/hostname"),
        ("machine_id", "etc/machine-id"),
        ("product_uuid", "sys/class/dmi/id/product_uuid"),
        ("product_serial", "sys/class/dmi/id/product_serial"),
    ):
        emit(key, readers.text(options.path(name), 256).strip() or None)
    for address in macs(options.root):
        emit("macs", address)


def macs(root: str = "/") -> List[str]:
    """The MAC addresses of the physical network interfaces (those with a device that is not a virtual function).

    The ports of a bond all have its address; their own is in another file (Documentation/networking/bonding.rst).
    """
    base = os.path.join(root, "sys/class/net")
    found = []
    for name in readers.names(base):
        device = os.path.join(base, name, "device")
        if os.path.exists(device) and not os.path.exists(os.path.join(device, "physfn")):
            for file in ("address", "bonding_slave/perm_hwaddr"):
                found.append(readers.text(os.path.join(base, name, file), 64).strip())
    return sorted({address for address in found if address})[:64]
