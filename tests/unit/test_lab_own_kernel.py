"""Machines of the lab that boot their own kernel, and links that are cut, without a virtual machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import bootloader, guest, hypervisor, images, network, seeded
from gpunodes.lab.layout import SUBNETS, Equipment, LabRecord, LabRole, Layout, Size, System, plan_machines
from gpunodes.lab.mirror import debian, updates

LAYOUT = Layout("cut", Path("/cache"))
SIZES = {LabRole.CONTROL_PLANE: Size(4096, 2), LabRole.WORKER: Size(2048, 1)}
OWN = Equipment(second_network=True, data_disk=True, own_kernel=True)


def record(equipment: Equipment = OWN, updates: str | None = "/cache/updates") -> LabRecord:
    identities = [(f"00000000-0000-4000-8000-{number:012d}", "secret") for number in range(2)]
    machines = plan_machines(SUBNETS[0], 1, SIZES, identities, equipment=equipment)
    return LabRecord("cut", System.DEBIAN13, str(SUBNETS[0]), "tcg", machines, "/x", "/tree", updates=updates)


def domain(machine_number: int, equipment: Equipment = OWN) -> ElementTree.Element:
    xml = hypervisor.domain_xml(LAYOUT, record(equipment).machines[machine_number], "tcg")
    return ElementTree.fromstring(xml)  # noqa: S314 - written by the lab


def test_a_machine_with_its_own_kernel_boots_from_the_boot_disk() -> None:
    machine = domain(1)
    assert [machine.find(f"os/{name}") for name in ("kernel", "initrd", "cmdline")] == [None, None, None]
    disks = {disk.find("target").get("dev"): disk for disk in machine.findall("devices/disk")}  # type: ignore[union-attr]  # every disk has a target
    assert list(disks) == ["vda", "vdb", "vdy"]
    boot = disks["vdy"]
    assert boot.find("readonly") is not None
    assert [disk.find("boot") is not None for disk in disks.values()] == [False, False, True]
    # Other labs are as before.
    plain = domain(1, Equipment())
    assert plain.findtext("os/kernel") == "/cache/run/cut/vmlinuz"
    assert plain.find("devices/disk/boot") is None


def test_the_boot_disk_is_the_boot_sector_and_the_core_image(tmp_path: Path) -> None:
    folder = tmp_path / "boot/grub/i386-pc"
    folder.mkdir(parents=True)
    sector = bytes(510) + b"\x55\xaa"
    (folder / "boot.img").write_bytes(sector)
    (folder / "core.img").write_bytes(b"core")
    disk = bootloader.boot_disk(tmp_path)
    assert (disk[:512], disk[512:516], len(disk)) == (sector, b"core", 1 << 20)
    (folder / "boot.img").write_bytes(bytes(512))
    with pytest.raises(GpunodesError, match="boot sector"):
        bootloader.boot_disk(tmp_path)


def test_grub_gets_the_kernels_options_literally() -> None:
    """The `$` of memmap is a variable for GRUB unless it is escaped; the shell reads the second file."""
    files = bootloader.configuration("6.12.1-cloud-amd64", ["console=ttyS0", "memmap=4K$0x30000000"])
    assert (
        "linux /boot/vmlinuz-6.12.1-cloud-amd64 root=/dev/vda console=ttyS0 memmap=4K\\$0x30000000\n"
        in (files["/boot/grub/grub.cfg"])
    )
    shell = f'{files["/etc/default/grub.d/lab.cfg"]}printf %s "$GRUB_CMDLINE_LINUX"'
    done = subprocess.run(["sh", "-u", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout == "console=ttyS0 memmap=4K\\$0x30000000"


def test_only_images_of_that_kind_have_a_boot_loader() -> None:
    own, plain = images.Kind.OWN_KERNEL, images.Kind.PLAIN
    assert set(bootloader.PACKAGES) <= set(images._packages(own))
    assert not set(bootloader.PACKAGES) & set(images._packages(plain))
    assert images._customise(own).endswith(bootloader.SCRIPT)
    assert "grub" not in images._customise(plain)
    assert len({images.recipe_hash(System.DEBIAN13, kind) for kind in images.Kind}) == 3
    subprocess.run(["sh", "-n"], input=images._customise(own), text=True, check=True)


def test_only_machines_with_their_own_kernel_see_the_newer_one() -> None:
    """apt-get upgrade finds it by the names of Debian's security archive."""

    def sources(each: LabRecord) -> str:
        [text] = [file.content for file in guest.source_files(each, "KEY") if file.path.endswith(".sources")]
        return str(text)

    assert "URIs: http://mirror.lab/debian-security\nSuites: trixie-security\n" in sources(record())
    assert "security" not in sources(record(updates=None))
    for paragraph in sources(record()).split("\n\n"):
        assert paragraph.startswith("Types: deb\n")


def test_the_newer_kernel_is_the_one_of_the_backports() -> None:
    names = ["linux-image-cloud-amd64_7.3.4-1~bpo13+1_amd64.deb", "linux-base_4.17~bpo13+1_all.deb"]
    kernel = "linux-image-7.3.4+deb13-cloud-amd64_7.3.4-1~bpo13+1_amd64.deb"
    assert updates.kernel_of([Path(name) for name in (*names, kernel)]) == "7.3.4+deb13-cloud-amd64"
    with pytest.raises(GpunodesError, match="0 kernels"):
        updates.kernel_of([Path(name) for name in names])
    assert "http://a/debian trixie-backports main\n" in debian.sources(
        "http://a/debian", "trixie", ["trixie-backports"]
    )
    assert "backports" not in debian.sources("http://a/debian", "trixie")


def test_what_only_the_newer_kernel_needs_is_offered_with_it() -> None:
    """Headers of the release's kernel depend on gcc-14, those of the newer one on gcc-14-for-host."""
    newer = [
        Path(name)
        for name in (
            "linux-base_4.17~bpo13+1_all.deb",
            "gcc-14-for-host_14.2.0-19_amd64.deb",
            "gcc-14-base_14.2.0-19_amd64.deb",
            "libc6_2.41-12+deb13u6_amd64.deb",
        )
    ]
    own = [Path(f"{name}_1_amd64.deb") for name in ("linux-base", "gcc-14-base", "libc6", "gcc-14")]
    assert updates.missing(newer, own) == newer[:2]


def test_a_seed_is_refused_where_machines_boot_their_own_kernel(tmp_path: Path) -> None:
    for name in seeded.FILES:
        (tmp_path / name).touch()
    if shutil.which("xorriso") is None:
        pytest.skip("needs xorriso")
    with pytest.raises(WrongInput, match="boots its own kernel"):
        seeded.reinstall(LAYOUT, record(), "worker-1", tmp_path, None, print)  # type: ignore[arg-type]  # refused before


def test_a_record_with_its_own_kernels_is_read_as_it_was_written() -> None:
    assert LabRecord.from_json(record().to_json()) == record()


@pytest.fixture
def links() -> Iterator[Layout]:
    """A network namespace with a bridge, and two namespaces whose links are ports of it, as taps of machines."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root for network namespaces")
    layout = dataclasses.replace(LAYOUT, name=f"u{os.getpid()}"[:10])
    ends = [f"{layout.namespace}-{name}" for name in ("a", "b")]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    made = []
    try:
        for name in (layout.namespace, *ends):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", layout.namespace, "link", "add", "lab0", "type", "bridge", "forward_delay", "0")
        ip("-n", layout.namespace, "link", "set", "lab0", "up")
        for number, (end, tap) in enumerate(zip(ends, ("tap-control-1", "tap-worker-1"), strict=True), start=1):
            ip("-n", layout.namespace, "link", "add", tap, "type", "veth", "peer", "name", "eth0", "netns", end)
            ip("-n", layout.namespace, "link", "set", tap, "master", "lab0", "up")
            ip("-n", end, "addr", "add", f"10.213.0.{number}/24", "dev", "eth0")
            ip("-n", end, "link", "set", "eth0", "up")
        yield layout
    finally:
        for name in made:
            ip("netns", "delete", name)


def reaches(layout: Layout) -> bool:
    """Whether a packet comes back: a port without a server refuses the connection."""
    connect = "import socket; socket.create_connection(('10.213.0.2', 9), timeout=2)"
    argv = ["ip", "netns", "exec", f"{layout.namespace}-a", sys.executable, "-c", connect]
    return "ConnectionRefusedError" in subprocess.run(argv, capture_output=True, text=True, check=False).stderr


def test_a_machine_that_is_cut_off_sees_silence_and_no_lost_carrier(links: Layout) -> None:
    machine = record(Equipment()).machines[1]
    assert reaches(links)
    network.connect(links, machine, connected=False)
    assert network.disconnected(links) == {"tap-worker-1"}
    assert not reaches(links)
    show = ["ip", "-n", f"{links.namespace}-b", "link", "show", "eth0"]
    assert "NO-CARRIER" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout
    network.connect(links, machine, connected=True)
    assert network.disconnected(links) == set()
    assert reaches(links)


def test_the_links_of_a_machine_that_is_off_cannot_be_cut(links: Layout) -> None:
    with pytest.raises(GpunodesError, match="tap2-worker-1"):
        network.connect(links, record().machines[1], connected=False)
