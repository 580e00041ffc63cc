"""A machine as a bare server gets its system: an image with cloud-init and without a user, and a NoCloud seed disk.

cloud-init finds the seed on a disk with the label CIDATA (cloudinit.readthedocs.io, "NoCloud").
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from xml.etree.ElementTree import SubElement, fromstring, tostring

from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import disks, hypervisor, images, ssh
from gpunodes.lab.host import Report, run, which
from gpunodes.lab.layout import LabMachine, LabRecord, Layout

FILES = ("user-data", "meta-data")
_LABEL = "CIDATA"
_DEVICE = "vdz"
"""Far from other disks; no program looks for the seed by this name."""
# The image's network and its only source of seeds; without the list cloud-init waits for the clouds' own networks.
_CONFIG = "# Written by gpunodes lab.\ndatasource_list: [NoCloud]\nnetwork: {config: disabled}\n"


def reinstall(
    layout: Layout, record: LabRecord, name: str, seed: Path, machines: hypervisor.Hypervisor, report: Report
) -> None:
    """Replace a machine's disk by a new one without any user, attach the seed in the folder ``seed``, and start it.

    The machine must be off. Its snapshots are lost, and `gpunodes lab ssh` has no user there.

    Raises:
        WrongInput: the folder is no seed, a program is missing, or the machine is on or boots its own kernel.
        GpunodesError: a tool failed, or no SSH server responds.
    """
    machine = record.machine(name)
    medium = layout.disks / f"{name}-seed.iso"
    _check(seed)
    if machine.own_kernel:
        raise WrongInput(
            f"{name} boots its own kernel, which an image for a seed does not have",
            "a lab without --own-kernel",
            "run `gpunodes lab down` first",
        )
    if machines.running(name):
        raise WrongInput(f"{name} is on", "a machine that is off", f"run `gpunodes lab power {name} off`")
    image = images.get(layout.cache, record.system, report, images.Kind.SEEDED)
    report(f"making a disk without a user for {name}")
    disks.overlay(layout, name).unlink(missing_ok=True)
    disks.make(layout, image, name, guest_files(record, machine))
    run(["xorriso", "-as", "mkisofs", "-quiet", "-volid", _LABEL, "-joliet", "-rock", "-output", medium,
         *(seed / each for each in FILES)])  # fmt: skip
    # It may be another kernel than that of the lab's other machines: this image is built at another time.
    kernel, initrd = layout.disks / f"{name}-vmlinuz", layout.disks / f"{name}-initrd.img"
    shutil.copy(image.kernel, kernel)
    shutil.copy(image.initrd, initrd)
    machines.define(with_seed(hypervisor.domain_xml(layout, machine, record.accelerator), medium, kernel, initrd))
    report(f"starting {name}")
    machines.start(name)
    _wait(layout, machine)


def with_seed(xml: str, medium: Path, kernel: Path, initrd: Path) -> str:
    """A machine's definition with another kernel and the seed's disk."""
    domain = fromstring(xml)  # noqa: S314 - this program made it
    for tag, path in (("os/kernel", kernel), ("os/initrd", initrd)):
        found = domain.find(tag)
        if found is not None:
            found.text = str(path)
    devices = domain.find("devices")
    if devices is not None:
        disk = SubElement(devices, "disk", type="file", device="disk")
        SubElement(disk, "driver", name="qemu", type="raw")
        SubElement(disk, "source", file=str(medium))
        SubElement(disk, "target", dev=_DEVICE, bus="virtio")
        SubElement(disk, "readonly")
    return tostring(domain, encoding="unicode")


def guest_files(record: LabRecord, machine: LabMachine) -> list[disks.GuestFile]:
    """What the network of a provider would tell the machine; name, user and keys come from the seed."""
    return [
        disks.GuestFile("/etc/hostname", "bare\n"),
        disks.GuestFile("/etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"),
        # Else systemd would enable all units, as at a first boot.
        disks.GuestFile("/etc/machine-id", f"{machine.uuid.replace('-', '')}\n"),
        disks.GuestFile("/etc/resolv.conf", f"search lab\nnameserver {record.gateway}\n"),
        disks.GuestFile("/etc/cloud/cloud.cfg.d/99-lab.cfg", _CONFIG),
    ]


def _check(seed: Path) -> None:
    missing = [name for name in FILES if not (seed / name).is_file()]
    if missing:
        raise WrongInput(
            f"{seed} has no file {' and no file '.join(missing)}",
            "the folder of a NoCloud seed",
            f"make it with `gpunodes provision seed --output {seed}`",
        )
    if which("xorriso") is None:
        raise WrongInput("xorriso is missing", "the program that writes the seed's disk", "apt-get install xorriso")


def _wait(layout: Layout, machine: LabMachine) -> None:
    """Wait for the SSH server: cloud-init makes its host keys, after the user."""
    deadline = time.monotonic() + ssh.START_LIMIT
    while not ssh.responds(machine):
        if time.monotonic() > deadline:
            raise GpunodesError(
                f"no SSH server on {machine.name}; its console's last lines: {ssh.console_tail(layout, machine)}",
                remedy=f"see `gpunodes lab console {machine.name}`",
            )
        time.sleep(1)
