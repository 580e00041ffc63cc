"""The files on a machine's disk that its image does not have."""

from __future__ import annotations

from pathlib import Path

from gpunodes.lab import bootloader, disks, hypervisor, images
from gpunodes.lab.host import Report
from gpunodes.lab.layout import LabMachine, LabRecord, Layout
from gpunodes.lab.mirror import aptrepo, updates
from gpunodes.lab.standin import board, objects
from gpunodes.lab.standin import construct as standin

MIRROR_URL = "http://mirror.lab"


def files(
    layout: Layout, record: LabRecord, machine: LabMachine, image: images.DiskImage, authorized: str, report: Report
) -> list[disks.GuestFile]:
    """All files of one machine; ``authorized`` is the public key of its user.

    Raises:
        GpunodesError: the stand-in boards of a GPU machine could not be compiled.
    """
    found = disks.guest_files(record, machine, authorized, disks.host_key(layout, machine))
    if machine.boards:
        found += board.guest_files(machine.boards, _board_modules(layout, record, image, report))
    if machine.own_kernel:
        options = hypervisor.kernel_options(record.accelerator, kernel_options(machine))
        own = bootloader.configuration(image.kernel_release, options)
        found += [disks.GuestFile(path, text) for path, text in own.items()]
    return [*found, *_apt_sources(layout, record)]


def _board_modules(
    layout: Layout, record: LabRecord, image: images.DiskImage, report: Report
) -> dict[str, objects.Objects]:
    """The boards' compiled module for each kernel that the machines may boot."""
    suite = record.system.suite
    kernels: dict[str, tuple[str, ...]] = {image.kernel_release: ()}
    if record.updates:
        kernels[updates.kernel(Path(record.updates))] = (updates.source(suite),)
    return {
        kernel: standin.compiled(layout.cache, suite=suite, kernel=kernel, report=report, archive_suites=suites)
        for kernel, suites in kernels.items()
    }


def kernel_options(machine: LabMachine) -> tuple[str, ...]:
    """The machine's own options of the kernel."""
    return (board.KERNEL_OPTION,) if machine.boards else ()


def _apt_sources(layout: Layout, record: LabRecord) -> list[disks.GuestFile]:
    return source_files(record, aptrepo.signing_key(layout.cache / "mirror").armoured)


def source_files(record: LabRecord, key: str) -> list[disks.GuestFile]:
    """apt's sources, and the key of the mirror."""
    path = "/usr/share/keyrings/mirror.lab.asc"
    suite = record.system.suite
    repositories = {"debian": suite} | ({"debian-security": f"{suite}-security"} if record.updates else {})
    sources = (
        f"Types: deb\nURIs: {MIRROR_URL}/{folder}\nSuites: {name}\nComponents: main\nSigned-By: {path}\n"
        for folder, name in repositories.items()
    )
    return [disks.GuestFile(path, key), disks.GuestFile("/etc/apt/sources.list.d/debian.sources", "\n".join(sources))]
