"""Additional files on the disk of a machine with stand-in boards: the module, and a unit that loads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpunodes.errors import WrongInput
from gpunodes.lab.disks import GuestFile
from gpunodes.lab.layout import Boards
from gpunodes.lab.standin.objects import Objects

LATCH = 0x30000000
"""Physical address of the page that keeps, across a reset, the state that only a power cycle clears."""
KERNEL_OPTION = f"memmap=4K${LATCH:#x}"
"""Keeps the kernel from using that page (Documentation/admin-guide/kernel-parameters.txt)."""

_MODULE = "/usr/lib/gpunodes-standin/{kernel}/standin_board.ko"
_RUNNING = "%v"
"""The release of the running kernel, in a unit of systemd."""
# Before udev enumerates the devices, as real boards are present from the start.
_UNIT = """[Unit]
Description=Stand-in for NVIDIA boards (gpunodes lab)
DefaultDependencies=no
Before=systemd-udev-trigger.service sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/sbin/insmod {module} {options}
"""
_DROP_IN = "[Unit]\nWants=standin-board.service\n"
_DEVICE = re.compile(r"[0-9a-f]{4}")


def device_ids(text: str) -> tuple[str, ...]:
    """PCI device ids from ``2330`` or ``2330,20b0``.

    Raises:
        WrongInput: not four hexadecimal digits each.
    """
    found = tuple(text.lower().split(","))
    if not all(_DEVICE.fullmatch(each) for each in found):
        raise WrongInput(
            f"the GPUs' device is {text!r}", "PCI device ids of four hexadecimal digits, for example 2330,20b0"
        )
    return found


def guest_files(boards: Boards, kernels: Mapping[str, Objects]) -> Sequence[GuestFile]:
    """The additional files of a machine with these boards, for each kernel that it may boot."""
    devices = ",".join(f"0x{each}" for each in boards.devices)
    options = f"gpus={boards.gpus} switches={boards.switches} device={devices} latch={LATCH:#x}"
    return [
        *(GuestFile(_MODULE.format(kernel=name), each.board.read_bytes()) for name, each in kernels.items()),
        GuestFile(
            "/etc/systemd/system/standin-board.service",
            _UNIT.format(module=_MODULE.format(kernel=_RUNNING), options=options),
        ),
        GuestFile("/etc/systemd/system/sysinit.target.d/standin-board.conf", _DROP_IN),
    ]
