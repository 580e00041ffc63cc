"""Mounts that move the data of services to another disk (data_directory.py)."""

from __future__ import annotations

import os

from .. import data_directory, tree
from ..process import must, run
from ..report import Difference
from . import files
from .changes import Changes
from .spec import File

_FOLDER = "/etc/systemd/system"
_MODE = 0o711
"""Processes of a user namespace must be able to enter the folder, as containerd's and Docker's own modes allow."""
# The assertions keep systemd from creating the source on the root disk, which it does for a bind mount, where the disk
# is missing or another one is mounted. They fail the services: a condition would start them without the mount.
# `private,shared`: with a peer group of its own, a mount of a pod does not appear in the source a second time
# (mount_namespaces(7)); mount(8) applies both in this order.
# Without default dependencies a disk that needs the network is no cycle: local file systems come before the network.
_MOUNT = """\
# Managed by gpunodes.
[Unit]
Description=Data of {service} in gpunodes_data_directory
DefaultDependencies=no
Conflicts=umount.target
Before=umount.target
RequiresMountsFor={source}
AssertPathIsMountPoint={disk}
AssertPathIsDirectory={source}

[Mount]
What={source}
Where={folder}
Type=none
Options=bind,private,shared
"""
_DROP_IN = "# Managed by gpunodes.\n[Unit]\nRequiresMountsFor={folder}\n"


def move(changes: Changes) -> None:
    """Mount the folders of the desired state on the data directory, now and whenever their services start.

    Raises MachineProblem if that would hide or move data, or if the directory cannot be used.
    """
    directory, found = changes.spec.data_directory, changes.ledger
    if not changes.spec.moved:
        return
    data_directory.check(directory, changes.spec.moved.values(), found)
    for service, folder in changes.spec.moved.items() if directory else ():
        source = data_directory.source(directory, folder)
        if folder not in found.mounts:
            found.note_mount(folder, source, tree.mount_of(directory).point)
            found.note_directories(path for path in (source, folder) if not os.path.lexists(path))
        unit = data_directory.unit(folder)
        values = {"service": service, "folder": folder, "source": source, "disk": found.data_disk}
        units = {unit: _MOUNT, f"{service}.service.d/15-gpunodes-data.conf": _DROP_IN}
        written = [
            files.write(changes, File(f"{_FOLDER}/{name}", content.format(**values))) for name, content in units.items()
        ]
        if any(written) and not changes.check:
            run(["systemctl", "daemon-reload"])
        if data_directory.is_mounted(folder, source):
            continue
        if changes.step(f"mount {source} on {folder}", Difference("mounts", {}, {folder: source})):
            os.makedirs(source, mode=_MODE, exist_ok=True)
            os.chmod(source, _MODE)
            must(["systemctl", "start", unit])
