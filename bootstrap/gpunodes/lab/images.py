"""Node images as a hosting provider has them: built from Debian's packages and cached by the hash of their recipe."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import bootloader, initrd
from gpunodes.lab.host import Report, run, which
from gpunodes.lab.layout import USER, System

DISK_SIZE = "20G"
"""Of the machines' disks; sparse files on the host."""

_PACKAGES = (
    # boot, login, network
    "systemd", "systemd-sysv", "dbus", "udev", "openssh-server", "sudo", "login", "passwd", "linux-image-cloud-amd64",
    # part of hosting providers' images; expected by Kubernetes' packages or Ansible
    "python3", "python3-apt", "ca-certificates", "curl", "gpgv", "kmod", "procps", "iproute2", "iputils-ping",
    "netbase", "less", "zstd",
)  # fmt: skip

_NETWORK = """[Match]
Name=en* eth*

[Network]
DHCP=ipv4
IPv6AcceptRA=no

[DHCPv4]
UseHostname=no
UseDNS=no
"""

ROOT_MOUNT = "/dev/vda / ext4 rw,noatime,discard 0 0"
"""In /etc/fstab."""

# Runs in the finished tree. Units that only cost time on an emulated machine are masked: nobody upgrades it overnight.
_BEGIN = 'set -eu\ncd "$1"\n'
_USER = f"""chroot . useradd --create-home --shell /bin/bash --groups sudo {USER}
echo '{USER} ALL=(ALL) NOPASSWD: ALL' > etc/sudoers.d/{USER}
chmod 0440 etc/sudoers.d/{USER}
install -d -m 0700 -o 1000 -g 1000 home/{USER}/.ssh
"""
_FINISH = f"""cat > etc/systemd/network/10-ethernet.network <<'END'
{_NETWORK}END
echo '{ROOT_MOUNT}' > etc/fstab
chroot . systemctl --quiet enable systemd-networkd.service
chroot . systemctl --quiet disable systemd-networkd-wait-online.service
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \\
    fstrim.timer getty@tty1.service systemd-pstore.service sshd-keygen.service; do
    ln -sf /dev/null "etc/systemd/system/$unit"
done
# Else systemd takes the first start for one after an upgrade (ConditionNeedsUpdate) and makes its caches anew.
touch etc/.updated var/.updated
rm -f etc/ssh/ssh_host_* etc/machine-id var/lib/dbus/machine-id etc/hostname etc/resolv.conf etc/hosts
rm -f etc/apt/sources.list etc/apt/sources.list.d/* boot/initrd.img-*
"""

_MKFS = ("-q", "-F", "-L", "root", "-N", "400000", "-m", "0", "-E", "lazy_itable_init=0,assume_storage_prezeroed=1")


class Kind(StrEnum):
    """Kinds of images."""

    PLAIN = "plain"
    SEEDED = "seeded"
    """With cloud-init, and no user."""
    OWN_KERNEL = "own-kernel"
    """With a boot loader that starts the kernel on the disk."""


@dataclass(frozen=True)
class DiskImage:
    """A node image in the cache."""

    folder: Path

    @property
    def disk(self) -> Path:
        """The root file system, raw, without partitions."""
        return self.folder / "disk.raw"

    @property
    def kernel(self) -> Path:
        """Debian's kernel."""
        return self.folder / "vmlinuz"

    @property
    def kernel_release(self) -> str:
        """The output of ``uname -r`` with this kernel, from the kernel's header (Documentation/arch/x86/boot.rst)."""
        data = self.kernel.read_bytes()
        start = int.from_bytes(data[0x20E:0x210], "little") + 0x200
        return data[start : data.index(b"\0", start)].decode().split()[0]

    @property
    def initrd(self) -> Path:
        """The lab's initial ramdisk for that kernel."""
        return self.folder / "initrd.img"

    @property
    def boot_disk(self) -> Path:
        """The disk with the boot loader, in images of the kind OWN_KERNEL."""
        return self.folder / "boot.raw"


def _packages(kind: Kind) -> tuple[str, ...]:
    return _PACKAGES + {Kind.SEEDED: ("cloud-init",), Kind.OWN_KERNEL: bootloader.PACKAGES}.get(kind, ())


def _customise(kind: Kind) -> str:
    """The script that finishes the tree. cloud-init makes the user of a seeded machine."""
    user = "" if kind is Kind.SEEDED else _USER
    return _BEGIN + user + _FINISH + (bootloader.SCRIPT if kind is Kind.OWN_KERNEL else "")


def recipe_hash(system: System, kind: Kind = Kind.PLAIN) -> str:
    """Identifies an image: equal recipes make equal images, except for Debian's updates."""
    recipe = [
        system.suite,
        _packages(kind),
        _customise(kind),
        _MKFS,
        DISK_SIZE,
        Path(initrd.__file__).read_text(),
    ]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def get(cache: Path, system: System, report: Report, kind: Kind = Kind.PLAIN) -> DiskImage:
    """The image of ``system``, built if the cache has none; images of earlier recipes are deleted.

    Raises:
        GpunodesError: a tool failed, or apt on this machine has no source of Debian packages.
    """
    name = str(system) if kind is Kind.PLAIN else f"{system}.{kind}"
    folder = cache / "images" / f"{name}-{recipe_hash(system, kind)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            report(f"building the {name} image (once; about 2 minutes)")
            with _fresh_folder(folder) as scratch:
                _make(system, scratch, kind)
            for old in folder.parent.glob(f"{name}-*"):
                if old != folder:
                    shutil.rmtree(old)
    return DiskImage(folder)


@contextmanager
def _fresh_folder(target: Path) -> Iterator[Path]:
    """A scratch folder that is renamed to ``target`` on success, and deleted otherwise."""
    scratch = target.with_name("making")
    if scratch.exists():  # an earlier build was killed
        shutil.rmtree(scratch)
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make(system: System, folder: Path, kind: Kind) -> None:
    tree = folder / "tree"
    customise = folder / "customise"
    customise.write_text(_customise(kind))
    options = ["--variant=minbase", "--customize-hook", f'sh {customise} "$1"']
    for path in ("doc", "man", "info", "locale", "lintian"):
        options += ["--dpkgopt", f"path-exclude=/usr/share/{path}/*"]
    debootstrap(system.suite, tree, _packages(kind), *options)
    kernel = next((tree / "boot").glob("vmlinuz-*"))
    modules = tree / "usr/lib/modules" / kernel.name.removeprefix("vmlinuz-")
    busybox = which("busybox")
    if busybox is None:
        raise GpunodesError("busybox is missing", remedy="apt-get install busybox-static")
    image = DiskImage(folder)
    image.initrd.write_bytes(initrd.build(modules, Path(busybox)))
    shutil.copy(kernel, image.kernel)
    if kind is Kind.OWN_KERNEL:
        shutil.copy(image.initrd, tree / "boot" / f"initrd.img-{modules.name}")
        image.boot_disk.write_bytes(bootloader.boot_disk(tree))
    run(["mkfs.ext4", *_MKFS, "-d", tree, image.disk, DISK_SIZE], timeout=600)
    shutil.rmtree(tree)
    customise.unlink()


def debootstrap(suite: str, tree: Path, packages: Sequence[str], *options: str) -> None:
    """Make a tree of Debian packages and what they need, from the archive of this machine's apt.

    Raises:
        GpunodesError: it failed, or apt on this machine has no source of Debian packages.
    """
    apt = [argument for option in apt_options() for argument in ("--aptopt", option)]
    command = ["mmdebstrap", "--quiet", "--mode=root", *options, *apt, "--include", ",".join(packages)]
    run([*command, suite, tree, debian_archive()], timeout=1800)


def debian_archive() -> str:
    """The Debian archive of this machine: from GPUNODES_DEBIAN_ARCHIVE, or its apt sources.

    Raises:
        WrongInput: apt has no source of a Debian release.
    """
    archive = os.environ.get("GPUNODES_DEBIAN_ARCHIVE")
    if archive:
        return archive
    listed = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"])
    uri = pick_archive(listed)
    if uri is None:
        raise WrongInput(
            "apt on this machine has no source of a Debian release",
            "a source such as `deb URI bookworm main`",
            "set GPUNODES_DEBIAN_ARCHIVE to the URI of a Debian archive",
        )
    return uri


def pick_archive(listed: str) -> str | None:
    """The URI of Debian's main archive among ``apt-get indextargets`` lines of URI, release and component."""
    releases = {system.suite for system in System} | {"stable", "testing", "oldstable", "sid", "unstable", "forky"}
    for line in listed.splitlines():
        uri, release, component = line.split()
        if release in releases and component == "main":
            return uri
    return None


def apt_options() -> list[str]:
    """Proxy and certificate options of this machine's apt, for another apt."""
    lines = run(["apt-config", "dump", "Acquire"]).splitlines()
    return [line.rstrip(";") for line in lines if "Proxy" in line or "CaInfo" in line or "Verify-Peer" in line]
