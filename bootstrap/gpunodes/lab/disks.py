"""The machines' disks: a copy of the image with the machine's identity, and an overlay that the machine writes to.

Name, keys and identity of the machine are written into the copy by debugfs(8), without a mount or loop device.
"""

from __future__ import annotations

import hmac
import os
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gpunodes.errors import GpunodesError
from gpunodes.lab.host import run
from gpunodes.lab.images import DISK_SIZE, ROOT_MOUNT, DiskImage
from gpunodes.lab.layout import USER, LabMachine, LabRecord, Layout

_HOST_MACHINE_ID = Path("/etc/machine-id")
DATA_LABEL = "data"
"""Of the file system on a machine's second disk, which is mounted at /data."""


@dataclass(frozen=True)
class GuestFile:
    """A file for a machine's disk, with the folders above it; owned by root."""

    path: str
    content: str | bytes
    mode: int = 0o644

    @property
    def data(self) -> bytes:
        """The content as bytes."""
        return self.content.encode() if isinstance(self.content, str) else self.content


def overlay(layout: Layout, machine: str) -> Path:
    """The disk that QEMU opens."""
    return layout.disks / f"{machine}.qcow2"


def data_overlay(layout: Layout, machine: str) -> Path:
    """The second disk that QEMU opens."""
    return layout.disks / f"{machine}-data.qcow2"


def take_kernel(layout: Layout, image: DiskImage) -> None:
    """Copy the image's kernel for the lab, so that the image can be deleted from the cache while the lab is up."""
    layout.disks.mkdir(parents=True, exist_ok=True)
    if not layout.kernel.exists():
        if image.boot_disk.exists():
            shutil.copy(image.boot_disk, layout.boot_disk)
        shutil.copy(image.initrd, layout.initrd)
        shutil.copy(image.kernel, layout.kernel)


def make(layout: Layout, image: DiskImage, machine: str, files: list[GuestFile]) -> None:
    """Make a machine's disk.

    Raises:
        GpunodesError: a tool failed; the disk does not exist then.
    """
    base = layout.disks / f"{machine}.raw"
    run(["cp", "--sparse=always", image.disk, base])
    _write(base, files)
    _make_overlay(base, overlay(layout, machine))


def make_data(layout: Layout, machine: str) -> None:
    """Make a machine's second disk: an empty file system, which all machines' overlays share.

    Raises:
        GpunodesError: a tool failed; the disk does not exist then.
    """
    base = layout.disks / "data.raw"
    if not base.exists():
        scratch = base.with_suffix(".making")
        options = ("-q", "-F", "-L", DATA_LABEL, "-m", "0", "-E", "assume_storage_prezeroed=1")
        run(["mkfs.ext4", *options, scratch, DISK_SIZE])
        scratch.rename(base)
    _make_overlay(base, data_overlay(layout, machine))


def _make_overlay(base: Path, target: Path) -> None:
    scratch = target.with_suffix(".new")
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", scratch])
    scratch.rename(target)


def _write(disk: Path, files: list[GuestFile]) -> None:
    folder = Path(tempfile.mkdtemp(prefix=".files-", dir=disk.parent))
    try:
        commands = []
        for number, file in enumerate(files):
            source = folder / str(number)
            # debugfs takes the mode of the source; owner and group become 0.
            source.touch(mode=0o600)
            source.write_bytes(file.data)
            source.chmod(file.mode)
            # Existing folders are kept: debugfs prints an error and continues.
            commands += [f"mkdir {folder}" for folder in reversed(PurePosixPath(file.path).parents[:-1])]
            commands += [f"rm {file.path}", f"write {source} {file.path}"]
        script = folder / "commands"
        script.write_text("\n".join(commands) + "\n")
        run(["debugfs", "-w", "-f", script, disk])
        _verify(disk, files, folder)
    finally:
        shutil.rmtree(folder)


def _verify(disk: Path, files: list[GuestFile], folder: Path) -> None:
    """Read the files back: debugfs exits with 0 even if it failed."""
    for number, file in enumerate(files):
        read = folder / f"{number}.read"
        run(["debugfs", "-R", f"dump {file.path} {read}", disk])
        if not read.exists() or read.read_bytes() != file.data:
            raise GpunodesError(f"debugfs did not write {file.path} to {disk}")


def guest_files(record: LabRecord, machine: LabMachine, authorized_key: str, host_key: Path) -> list[GuestFile]:
    """The files that differ between machines: name, identity and keys, as cloud-init would write them."""
    mounts = [GuestFile("/etc/fstab", f"{ROOT_MOUNT}\nLABEL={DATA_LABEL} /data ext4 rw,noatime,discard 0 0\n")]
    return [
        *(mounts if machine.data_disk else []),
        GuestFile("/etc/hostname", f"{machine.name}\n"),
        GuestFile("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n::1 localhost ip6-localhost\n"),
        GuestFile("/etc/machine-id", f"{uuid.uuid5(uuid.UUID(machine.uuid), 'machine-id').hex}\n"),
        GuestFile("/etc/resolv.conf", f"search lab\nnameserver {record.gateway}\n"),
        GuestFile(f"/home/{USER}/.ssh/authorized_keys", f"{authorized_key.strip()}\n"),
        GuestFile("/etc/ssh/ssh_host_ed25519_key", host_key.read_text(), 0o600),
        GuestFile("/etc/ssh/ssh_host_ed25519_key.pub", host_key.with_suffix(".pub").read_text()),
    ]


def make_key(path: Path, comment: str) -> None:
    """Create an SSH key pair at ``path`` and ``path.pub``, unless it exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])


def host_key(layout: Layout, machine: LabMachine) -> Path:
    """The machine's SSH host key, created when it is missing.

    The key depends on the host and the machine's address only: the next lab's machine at this address has the same key,
    so ssh reports no changed host key. The cache may be deleted at any time: the key is not random, but derived from
    the host's machine id, in the way that machine-id(5) allows.
    """
    key = layout.cache / "host-keys" / machine.address / "ssh_host_ed25519_key"
    if not key.exists():
        key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In a container the file may be missing or empty.
        host_id = (_HOST_MACHINE_ID.read_bytes() if _HOST_MACHINE_ID.exists() else b"") or os.urandom(32)
        seed = hmac.digest(host_id, f"gpunodes lab {machine.address}".encode(), "sha256")
        private = Ed25519PrivateKey.from_private_bytes(seed)
        public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        key.with_suffix(".pub").write_text(f"{public} root@{machine.name}\n")
        scratch = key.with_suffix(".new")
        scratch.touch(mode=0o600)
        scratch.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        scratch.replace(key)
    return key
