"""The ledger: all changes of gpunodes on a machine, with the previous state, so that all of them can be undone.

The ledger is one JSON file, 0600. Each entry is written before the change that it describes: after a power cut during
the change there may be an entry too many, never one too few. Undoing an entry without its change does nothing. The
previous state is recorded only once: later changes of the same file or setting keep the first entry.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from . import disk, tree
from .problem import MachineProblem

FOLDER = "/var/lib/gpunodes"
PATH = f"{FOLDER}/ledger.json"
SECTIONS = ("gpu", "nfs_client", "nfs_server")
"""A section can be undone separately: it has a file of its own in the ledger's folder, with the same format."""


@dataclass(frozen=True)
class OldFile:
    """The previous state of a file; ``content`` is None where the file did not exist."""

    content: str | None
    mode: int = 0
    uid: int = 0
    gid: int = 0


@dataclass
class Ledger:
    """Entries by kind. Names and paths are keys, so that recording the same change twice has no effect."""

    packages: list[str] = field(default_factory=list)
    """Packages that were not installed before."""
    holds: list[str] = field(default_factory=list)
    """Packages that gpunodes held and that were not held before."""
    files: dict[str, OldFile] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    """Folders that did not exist before and that contain only files of gpunodes and its software."""
    shared: list[str] = field(default_factory=list)
    """Folders that did not exist before and hold users' data: only `gpunodes storage down` removes them, if empty."""
    modules: list[str] = field(default_factory=list)
    """Kernel modules that were not loaded before."""
    sysctls: dict[str, str] = field(default_factory=dict)
    """Previous values of kernel settings."""
    swaps: list[str] = field(default_factory=list)
    """Swap devices and files that were in use."""
    services: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Previous states of services: {"enabled": ..., "active": ..., "masked": ...}."""
    firewall_tables: list[str] | None = None
    """The kernel's netfilter tables before gpunodes, or None where they could not be listed."""
    firewalls: dict[str, list[str]] = field(default_factory=dict)
    """What gpunodes added to each firewall: rules of ufw, chains of nftables that have a jump, and "policies" of
    firewalld, which are files."""
    forward_policies: dict[str, str] = field(default_factory=dict)
    """Policies for forwarded packets before Docker, by program: "iptables" and "ip6tables"."""
    restarts: list[str] = field(default_factory=list)
    """Services whose files or packages have changed since their last restart."""
    groups: list[str] = field(default_factory=list)
    """User groups that did not exist before."""
    users: list[str] = field(default_factory=list)
    """System users that did not exist before."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """Users that were not members of a group before, by group."""
    unloaded: list[str] = field(default_factory=list)
    """Kernel modules that were loaded before, and that gpunodes unloaded or blocked."""
    initramfs: str = ""
    """"rebuilt" if gpunodes rebuilt it, "seen" if that was not necessary, "" if it was not checked."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Folders on which gpunodes mounts a folder of gpunodes_data_directory, with that folder."""
    data_disk: str = ""
    """Mount point of the disk of these folders."""
    kubeadm: str = ""
    """Progress of kubeadm: "", "init started", "init done", "join started" or "join done"."""
    given: list[str] = field(default_factory=list)
    """Files below /etc/kubernetes that were there before kubeadm, such as a CA of the user: they stay."""
    upgrade: str = ""
    """"apply" or "node" while that command of ``kubeadm upgrade`` is unfinished, else ""."""
    kubelet_before: str = ""
    """The kubelet's version before the last upgrade, to which a worker can return; "" without an upgrade."""

    manifests: dict[str, str] = field(default_factory=dict)
    """Static pods whose manifests gpunodes has moved away for a moment, with the paths where they are."""
    control_plane: dict[str, str] = field(default_factory=dict)
    """What changes with the settings of the control plane, static pods and "kubeadm-config": "begun" or "done". The
    earlier state is kept in /etc/kubernetes/gpunodes-settings until the change is verified; a reset removes that."""
    etcd_restore: dict[str, str] = field(default_factory=dict)
    """A restore of etcd that has begun: "snapshot" (SHA-256), "state", "before" (folder of the old data), "replaced"
    (its revision, as far as it can be read) and "bump" (by how much the snapshot's revision is raised)."""
    etcd_revision: int = 0
    """The revision with which the last restore of etcd began: clients of that cluster know it, whatever is read."""

    def note_packages(self, names: Iterable[str]) -> None:
        _add(self.packages, names)

    def note_holds(self, names: Iterable[str]) -> None:
        _add(self.holds, names)

    def note_file(self, path: str, old: OldFile) -> None:
        self.files.setdefault(path, old)

    def note_directories(self, paths: Iterable[str]) -> None:
        _add(self.directories, paths)

    def note_modules(self, names: Iterable[str]) -> None:
        _add(self.modules, names)

    def note_unloaded(self, names: Iterable[str]) -> None:
        _add(self.unloaded, names)

    def note_groups(self, names: Iterable[str]) -> None:
        _add(self.groups, names)

    def note_users(self, names: Iterable[str]) -> None:
        _add(self.users, names)

    def note_member(self, group: str, user: str) -> None:
        _add(self.members.setdefault(group, []), [user])

    def forget_member(self, group: str, user: str) -> None:
        self.members[group] = [each for each in self.members.get(group, ()) if each != user]

    def note_sysctl(self, name: str, value: str) -> None:
        self.sysctls.setdefault(name, value)

    def note_swaps(self, devices: Iterable[str]) -> None:
        _add(self.swaps, devices)

    def note_service(self, name: str, state: Mapping[str, bool]) -> None:
        self.services.setdefault(name, dict(state))

    def note_firewall(self, name: str, entries: Iterable[str]) -> None:
        _add(self.firewalls.setdefault(name, []), entries)

    def forget_firewall(self, name: str, entries: Iterable[str]) -> None:
        """Remove entries, after what they describe is removed."""
        gone = {*entries}
        self.firewalls[name] = [entry for entry in self.firewalls.get(name, []) if entry not in gone]

    def note_mount(self, folder: str, source: str, data_disk: str) -> None:
        self.mounts.setdefault(folder, source)
        self.data_disk = self.data_disk or data_disk

    def note_restart(self, name: str) -> None:
        _add(self.restarts, [name])

    def restarted(self, name: str) -> None:
        self.restarts = [entry for entry in self.restarts if entry != name]

    def to_json(self) -> str:
        return json.dumps({"version": 1, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str = "") -> None:
        """Write the ledger with mode 0600, in a folder with mode 0700."""
        path = path or PATH
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        text = self.to_json()
        if disk.read(path) != text:
            disk.write(path, text, 0o600)


def from_json(text: str) -> Ledger:
    """Parse a ledger; raises MachineProblem when it is damaged or was written by a newer version of gpunodes."""
    try:
        document = json.loads(text)
        version = document.pop("version")
        document["files"] = {path: OldFile(**old) for path, old in document["files"].items()}
        if version == 1:
            return Ledger(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MachineProblem(
            f"{PATH} is damaged ({error})",
            "the ledger of gpunodes on this machine",
            "restore it, or reinstall the machine",
        ) from error
    raise MachineProblem(
        f"{PATH} has version {version}", "version 1", "use the version of gpunodes that wrote it, or a newer one"
    )


def load(path: str = "") -> Ledger:
    """The machine's ledger; empty if the file does not exist."""
    text = disk.read(path or PATH)
    return Ledger() if text is None else from_json(text)


def path_of(section: str) -> str:
    """The path of a section; "" is the ledger itself."""
    return f"{os.path.dirname(PATH)}/{section}.json" if section else PATH


def remove(section: str = "") -> None:
    """Remove the ledger, or one of its sections, after all its changes are undone."""
    if section:
        disk.remove(path_of(section))
        with contextlib.suppress(OSError):  # the folder still contains the ledger
            os.rmdir(os.path.dirname(PATH))
    else:
        tree.remove(os.path.dirname(PATH))


def _add(entries: list[str], new: Iterable[str]) -> None:
    for entry in new:
        if entry not in entries:
            entries.append(entry)
