"""What we changed on a machine, and what was there before: enough to take all of it back.

The ledger is one JSON file, 0600. Every entry is written before the step that it describes, so that a power cut in the
middle of the step leaves an entry too many, never one too few; undoing an entry whose step never ran does nothing. What
was there before is noted once: a later change of the same thing leaves the first note standing.
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
PARTS = ("gpu",)
"""What can be taken back by itself has a book of its own beside the ledger, of the same form."""


@dataclass(frozen=True)
class OldFile:
    """A file as it was; ``content`` is None where there was none."""

    content: str | None
    mode: int = 0
    uid: int = 0
    gid: int = 0


@dataclass
class Ledger:
    """Entries by kind. Names and paths are keys, so that noting the same thing twice changes nothing."""

    packages: list[str] = field(default_factory=list)
    """Packages that were not there before."""
    holds: list[str] = field(default_factory=list)
    """Packages that we held and nobody had held before."""
    files: dict[str, OldFile] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    """Directories that were not there before and hold only what came with us."""
    modules: list[str] = field(default_factory=list)
    """Kernel modules that were not loaded before."""
    sysctls: dict[str, str] = field(default_factory=dict)
    """Values of kernel settings as they were."""
    swaps: list[str] = field(default_factory=list)
    """Swap devices and files that were on."""
    services: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Services as they were: {"enabled": ..., "active": ..., "masked": ...}."""
    firewall_tables: list[str] | None = None
    """The kernel's netfilter tables before us, or None where they could not be listed."""
    restarts: list[str] = field(default_factory=list)
    """Services whose files or packages changed and that have not been restarted since."""
    groups: list[str] = field(default_factory=list)
    """Groups of users that were not there before."""
    users: list[str] = field(default_factory=list)
    """Users of the system that were not there before."""
    unloaded: list[str] = field(default_factory=list)
    """Kernel modules that were loaded before and that we unloaded, or kept from loading."""
    initramfs: str = ""
    """"rebuilt" where it was for us, "seen" where that was not needed, "" where nobody looked."""
    kubeadm: str = ""
    """How far kubeadm came: "", "init started", "init done", "join started" or "join done"."""

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

    def note_sysctl(self, name: str, value: str) -> None:
        self.sysctls.setdefault(name, value)

    def note_swaps(self, devices: Iterable[str]) -> None:
        _add(self.swaps, devices)

    def note_service(self, name: str, state: Mapping[str, bool]) -> None:
        self.services.setdefault(name, dict(state))

    def note_restart(self, name: str) -> None:
        _add(self.restarts, [name])

    def restarted(self, name: str) -> None:
        self.restarts = [entry for entry in self.restarts if entry != name]

    def to_json(self) -> str:
        return json.dumps({"version": 1, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str = "") -> None:
        """Write it, 0600, in a folder of 0700."""
        path = path or PATH
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        text = self.to_json()
        if disk.read(path) != text:
            disk.write(path, text, 0o600)


def from_json(text: str) -> Ledger:
    """Read a ledger; raises MachineProblem when it is damaged or of a later version of this program."""
    try:
        document = json.loads(text)
        version = document.pop("version")
        document["files"] = {path: OldFile(**old) for path, old in document["files"].items()}
        if version == 1:
            return Ledger(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MachineProblem(
            f"{PATH} is damaged ({error})",
            "the record of what was changed here",
            "restore it, or reinstall the machine",
        ) from error
    raise MachineProblem(
        f"{PATH} is of version {version}", "version 1", "use the gpunodes that wrote it, or a newer one"
    )


def load(path: str = "") -> Ledger:
    """The machine's ledger; an empty one where there is none."""
    text = disk.read(path or PATH)
    return Ledger() if text is None else from_json(text)


def path_of(part: str) -> str:
    """Where the book of a part lies; "" is the ledger itself."""
    return f"{os.path.dirname(PATH)}/{part}.json" if part else PATH


def forget(part: str = "") -> None:
    """Remove the ledger, or the book of a part, when all of it is taken back."""
    if part:
        disk.remove(path_of(part))
        with contextlib.suppress(OSError):  # the ledger is still there
            os.rmdir(os.path.dirname(PATH))
    else:
        tree.remove(os.path.dirname(PATH))


def _add(entries: list[str], new: Iterable[str]) -> None:
    for entry in new:
        if entry not in entries:
            entries.append(entry)
