"""The machines' disks: a copy of the image that knows who it is, and an overlay on it that the machine writes to.

What differs between machines (name, keys, identity) goes into the copy by debugfs(8): no mount, no loop device.
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
from gpunodes.lab.images import DiskImage
from gpunodes.lab.layout import USER, LabMachine, LabRecord, Layout

_OWN_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class GuestFile:
    """A file to put on a machine's disk, and the folders above it; root's."""

    path: str
    content: str | bytes
    mode: int = 0o644

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return self.content.encode() if isinstance(self.content, str) else self.content


def overlay(layout: Layout, machine: str) -> Path:
    """The disk that QEMU opens."""
    return layout.disks / f"{machine}.qcow2"


def take_kernel(layout: Layout, image: DiskImage) -> None:
    """Give the lab its own copy of the image's kernel, so that the image may leave the cache while the lab is up."""
    layout.disks.mkdir(parents=True, exist_ok=True)
    if not layout.kernel.exists():
        shutil.copy(image.initrd, layout.initrd)
        shutil.copy(image.kernel, layout.kernel)


def make(layout: Layout, image: DiskImage, machine: str, files: list[GuestFile]) -> None:
    """Make a machine's disk.

    Raises:
        GpunodesError: a tool failed; nothing is left.
    """
    base = layout.disks / f"{machine}.raw"
    run(["cp", "--sparse=always", image.disk, base])
    _write(base, files)
    scratch = layout.disks / f"{machine}.new"
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", scratch])
    scratch.rename(overlay(layout, machine))


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
            # What is there already stays: debugfs only grumbles.
            commands += [f"mkdir {folder}" for folder in reversed(PurePosixPath(file.path).parents[:-1])]
            commands += [f"rm {file.path}", f"write {source} {file.path}"]
        script = folder / "commands"
        script.write_text("\n".join(commands) + "\n")
        run(["debugfs", "-w", "-f", script, disk])
        _verify(disk, files, folder)
    finally:
        shutil.rmtree(folder)


def _verify(disk: Path, files: list[GuestFile], folder: Path) -> None:
    """debugfs ends well whatever happened, so look."""
    for number, file in enumerate(files):
        read = folder / f"{number}.read"
        run(["debugfs", "-R", f"dump {file.path} {read}", disk])
        if not read.exists() or read.read_bytes() != file.data:
            raise GpunodesError(f"debugfs did not write {file.path} to {disk}")


def guest_files(record: LabRecord, machine: LabMachine, authorized_key: str, host_key: Path) -> list[GuestFile]:
    """What a machine's disk has beyond the image: its name, identity and keys, as a hoster's first start sets them."""
    return [
        GuestFile("/etc/hostname", f"{machine.name}\n"),
        GuestFile("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n::1 localhost ip6-localhost\n"),
        GuestFile("/etc/machine-id", f"{uuid.uuid5(uuid.UUID(machine.uuid), 'machine-id').hex}\n"),
        GuestFile("/etc/resolv.conf", f"search lab\nnameserver {record.gateway}\n"),
        GuestFile(f"/home/{USER}/.ssh/authorized_keys", f"{authorized_key.strip()}\n"),
        GuestFile("/etc/ssh/ssh_host_ed25519_key", host_key.read_text(), 0o600),
        GuestFile("/etc/ssh/ssh_host_ed25519_key.pub", host_key.with_suffix(".pub").read_text()),
    ]


def make_key(path: Path, comment: str) -> None:
    """An SSH key pair at ``path`` and ``path.pub``, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])


def host_key(layout: Layout, machine: LabMachine) -> Path:
    """The machine's SSH host key, made if need be.

    It belongs to the address, as seen from the machine that the lab runs on: the next lab's machine at this address
    has the same, so nobody's known_hosts complains that it has changed. The cache may be deleted at any time: the key
    is not random, but derived from this machine's id, in the way that machine-id(5) allows.
    """
    key = layout.cache / "host-keys" / machine.address / "ssh_host_ed25519_key"
    if not key.exists():
        key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A container may have none, or an empty one.
        own_id = (_OWN_ID.read_bytes() if _OWN_ID.exists() else b"") or os.urandom(32)
        seed = hmac.digest(own_id, f"gpunodes lab {machine.address}".encode(), "sha256")
        private = Ed25519PrivateKey.from_private_bytes(seed)
        public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        key.with_suffix(".pub").write_text(f"{public} root@{machine.name}\n")
        whole = key.with_suffix(".new")
        whole.touch(mode=0o600)
        whole.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        whole.replace(key)
    return key
