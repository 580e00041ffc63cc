"""Undoes all changes in the ledger of a machine."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from . import data_directory, disk, firewall, in_use, ledger, lock, packages, still_needed, tree
from .firewalls import firewalld, nftables, ufw
from .firewalls.wanted import MARK
from .host import gpu_driver, kernel, proxies, services, swap, users
from .kubeadm import reset
from .problem import MachineProblem
from .process import run
from .report import Difference, of_file

TEMPORARY_FILES = ("/run/gpunodes-nvidia-smi.lock", "/run/gpunodes-gpu-reset", "/run/gpunodes-etcd-snapshot.lock")
"""Files of the probe, the escalation program and backups, until the next boot; these are sent without this module."""
_RUNTIMES = ("/run/containerd", "/var/lib/containerd", "/run/docker", "/var/lib/docker")
"""Folders where container runtimes mount, and may leave mounts when they stop. Only the kubelet mounts elsewhere."""
_LINKS = "/sys/class/net"
_DOCKER_DATA = "/var/lib/docker"
_VOLUMES = f"{_DOCKER_DATA}/volumes/"
"""Mounts below this folder contain a user's data; a container's own mounts are elsewhere."""
_GPU_RELEASE_S = 120
"""How long deleted pods may take to release the GPUs."""


class Undoer:
    """One undo run. Every step may be repeated: the next run completes an interrupted one."""

    def __init__(self, check: bool = False, section: str = "") -> None:
        """``section`` undoes only one of ``ledger.SECTIONS``; "" all of them, and then the ledger itself."""
        self.check = check
        self.section = section
        self.actions: list[str] = []
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        """What the user should know: packages that stay."""
        self.ledger = ledger.load(ledger.path_of(section))
        self.going = {*self.ledger.packages}
        """The packages that this run removes, those of other sections too."""
        self.kept: set[str] = set()
        """Those of them that stay."""
        self.alone = bool(section)
        """Whether the section is undone without the others."""

    def run(self) -> list[str]:
        """Undo; returns the actions taken, empty if there was nothing to undo.

        Raises MachineProblem when software or a folder that is to be removed is in use; in that case nothing of its
        section is removed.
        """
        sections = self._sections()
        self.check_unmounted()
        self.going.update(*(section.going for section in sections))
        for section in sections:
            section.going, section.kept, section.alone = self.going, self.kept, False
            self.actions += section.run()
            self.differences += section.differences
            self.notes += section.notes
        if os.path.exists(ledger.path_of(self.section)):
            self._undo()
        if not self.check and not os.path.exists(os.path.dirname(ledger.PATH)):
            for path in (*TEMPORARY_FILES, lock.PATH):
                disk.remove(path)
        return self.actions

    def check_unmounted(self) -> None:
        """Raise MachineProblem while a user has mounts in folders that are to be removed; changes nothing."""
        for undoer in (self, *self._sections()):
            folders = undoer._folders()
            own = data_directory.mounted(undoer.ledger)
            tree.check_unmounted(
                set(folders) - {*_RUNTIMES, reset.KUBELET}, created=[path for path in folders if path not in own]
            )
            if _DOCKER_DATA in folders:
                tree.check_unmounted([_VOLUMES])

    def _sections(self) -> list[Undoer]:
        return [] if self.section else [Undoer(self.check, section) for section in ledger.SECTIONS]

    def _undo(self) -> None:
        self._drivers()
        if self.ledger.packages:
            self._keep()
        self._services()
        self._mounts()
        self._docker()
        self._firewalls()
        if not self.check:
            # Before the packages: gpunodes may have installed nft.
            firewall.remove_empty_tables(self.ledger.firewall_tables)
        self._packages()
        self._users()
        lists = self._apt_lists()
        forget = self._how_firewalld_forgets()
        self._files()
        forget()
        self._directories()
        self._kernel()
        if not self.section:
            self._swap()
        for path in lists:
            self.differences.append(_gone("indices of package sources", path))
            if not self.check:
                disk.remove(path)
        self._conflicting_modules()
        self._restarts()
        what = f"the section {self.section} of the ledger" if self.section else "the ledger"
        difference = _gone("ledger of changes", ledger.path_of(self.section))
        self._do(f"remove {what}", lambda: ledger.remove(self.section), difference)

    def _do(self, action: str, function: Callable[[], object], *differences: Difference) -> None:
        self.actions.append(action)
        self.differences += differences
        if not self.check:
            function()

    def _drivers(self) -> None:
        """Check that no process uses the GPUs; services in the ledger do not count."""
        if "nvidia" not in self.ledger.modules or not os.path.exists(f"{gpu_driver.SYS}/module/nvidia"):
            return
        deadline = time.monotonic() + (0 if self.check else _GPU_RELEASE_S)
        while holders := gpu_driver.holders([name for name in self.ledger.services if name.startswith("nvidia-")]):
            if time.monotonic() >= deadline:
                raise MachineProblem(
                    f"{', '.join(holders)} use{'s' if len(holders) == 1 else ''} the GPUs",
                    "no process: the driver is not removed while it is in use",
                    "end these processes (pods: `kubectl drain`), then run the command again",
                )
            time.sleep(2)

    def _conflicting_modules(self) -> None:
        """Restore the kernel modules that conflicted with the driver."""
        if self.ledger.initramfs == "rebuilt":
            difference = Difference("initramfs", {"conflicting module": "without"}, {"conflicting module": "with"})
            self._do("rebuild the initramfs", lambda: gpu_driver.rebuild(gpu_driver.images()), difference)
        for name in self.ledger.unloaded:
            if not os.path.exists(f"{gpu_driver.SYS}/module/{name}"):
                difference = Difference("kernel modules", {name: "not loaded"}, {name: "loaded"})
                self._do(f"load {name}", partial(run, ["modprobe", name]), difference)

    def _restarts(self) -> None:
        """Restart services that existed before gpunodes and still run with files that were just removed.

        Of the ledger itself only those that still have a proxy in their environment.
        """
        concerned = {
            name: before
            for name, before in self.ledger.services.items()
            if self.section or proxies.variables_file(name) in self.ledger.files
        }
        states = services.states(list(concerned)) if concerned else {}
        for name, before in concerned.items():
            if before["active"] and states.get(name, {}).get("active"):
                difference = Difference(
                    f"service {name}", {"started with": "removed files"}, {"started with": "present files"}
                )
                self._do(f"restart {name}", partial(services.start, name, "restart"), difference)

    def _services(self) -> None:
        states = services.states(list(self.ledger.services)) if self.ledger.services else {}
        for name, before in self.ledger.services.items():
            now = states.get(name, {"enabled": False, "active": False})
            if now["active"] and not before["active"]:
                difference = Difference(f"service {name}", {"active": True}, {"active": False})
                self._do(f"stop {name}", partial(run, ["systemctl", "stop", name], 300), difference)
            if now["enabled"] and not before["enabled"]:
                difference = Difference(f"service {name}", {"enabled": True}, {"enabled": False})
                self._do(f"disable {name}", partial(run, ["systemctl", "disable", name]), difference)

    def _docker(self) -> None:
        """Remove the links and the firewall rules that a stopped Docker leaves; a user's own Docker keeps them."""
        if self.ledger.services.get("docker", {"active": True})["active"]:
            return
        for link in sorted(os.listdir(_LINKS)):
            if re.fullmatch(firewall.DOCKER_LINK, link):
                difference = _gone("network links", link)
                self._do(f"remove the link {link}", partial(run, ["ip", "link", "delete", link]), difference)
        if not self.check:
            firewall.clean(firewall.DOCKER)
            now = firewall.forward_policies() if self.ledger.forward_policies else {}
            for program, policy in self.ledger.forward_policies.items():
                if policy != now.get(program):
                    run([program, "--policy", "FORWARD", policy])

    def _firewalls(self) -> None:
        """Remove the rules that gpunodes added to ufw and nftables; firewalld's are files."""
        rules = self.ledger.firewalls.get("ufw", ())
        present = ufw.added() if rules and ufw.is_installed() else {}
        if own := [rule for rule in rules if present.get(rule) == MARK]:
            difference = Difference("rules of ufw", dict.fromkeys(own, "added by gpunodes"), {})
            self._do("remove the rules of gpunodes from ufw", lambda: ufw.delete(own), difference)
        if (chains := self.ledger.firewalls.get("nftables")) and (commands := nftables.removal()):
            difference = Difference("rules in chains of nftables", dict.fromkeys(chains, MARK), {})
            self._do("remove the rules of gpunodes from nftables", lambda: nftables.load(commands), difference)

    def _how_firewalld_forgets(self) -> Callable[[], None]:
        """How firewalld forgets the files that are removed next: asked before it can notice that they are gone."""
        if not self.ledger.firewalls.get("firewalld") or not firewalld.is_active():
            return lambda: None
        difference = Difference("firewalld", {"policies of gpunodes": "loaded"}, {})
        forget = firewalld.empty if firewalld.lost_by_reload() else firewalld.reload
        return lambda: self._do("remove the policies of gpunodes from firewalld", forget, difference)

    def _users(self) -> None:
        for group, names in self.ledger.members.items():
            present = users.members(group)
            for name in [name for name in names if name in present]:
                difference = Difference(f"members of the group {group}", {name: "member"}, {})
                action = partial(run, ["gpasswd", "--delete", name, group])
                self._do(f"remove {name} from the group {group}", action, difference)
        for name in self.ledger.users:
            if users.has_user(name):
                # That also removes its group (login.defs: USERGROUPS_ENAB).
                self._do(f"remove the user {name}", partial(run, ["userdel", name]), _gone("users", name))
        for name in self.ledger.groups:
            if users.has_group(name):
                self._do(f"remove the group {name}", partial(run, ["groupdel", name]), _gone("groups", name))

    def _keep(self) -> None:
        """Leave out the packages that others need or have configured, before anything is undone.

        A later undo has those of a section: its ledger gets them. After all is undone they are the administrator's.
        """
        manager = packages.detect()
        if not self.check:
            manager.finish_interrupted()
        needed = self._needed(manager)
        if not needed.packages:
            return
        paths = [ledger.path_of(each) for each in ("", *ledger.SECTIONS) if each != self.section]
        others = {path: ledger.load(path) for path in paths if os.path.exists(path)}
        self.notes += needed.notes(self.going.union(*(each.packages for each in others.values())))
        self.kept.update(needed.packages)
        taken = still_needed.take(self.ledger, manager, needed.packages)
        if self.alone and others and not self.check:
            path = max(others, key=lambda path: len({*needed.by} & {*others[path].packages}))
            still_needed.give(others[path], taken)
            others[path].save(path)

    def _needed(self, manager: packages.Manager) -> still_needed.Needed:
        present = manager.installed(self.ledger.packages)
        names = [name for name in self.ledger.packages if name in present]
        try:
            return still_needed.find(manager, names, self.going - self.kept)
        except MachineProblem:
            if self.check:
                return still_needed.Needed()  # The package manager was interrupted, and only a real run completes that.
            raise

    def _packages(self) -> None:
        if not self.ledger.packages and not self.ledger.holds:
            return
        manager = packages.detect()
        installed = manager.installed(sorted({*self.ledger.holds, *self.ledger.packages}))
        held = [name for name in self.ledger.holds if name in installed and installed[name].held]
        if held:
            difference = Difference("held packages", dict.fromkeys(held, "held"), {})
            self._do(f"release the hold of {', '.join(held)}", lambda: manager.hold(held, held=False), difference)
        added = [name for name in self.ledger.packages if name in installed]
        # Purging docker.io of Debian and Ubuntu empties that folder (its postrm: nuke-graph-directory.sh).
        unpurged = [name for name in added if name == "docker.io" and _DOCKER_DATA not in self.ledger.directories]
        if unpurged:
            difference = Difference("packages", {name: installed[name].version for name in unpurged}, {})
            self._do(f"remove {unpurged[0]}, but keep {_DOCKER_DATA}", lambda: manager.remove(unpurged), difference)
        if purged := [name for name in added if name not in unpurged]:
            difference = Difference("packages", {name: installed[name].version for name in purged}, {})
            self._do(f"remove {', '.join(purged)}", lambda: manager.purge(purged), difference)

    def _apt_lists(self) -> list[str]:
        """apt's copies of the indices of the package sources in the ledger."""
        found = []
        for path in self.ledger.files:
            if path.endswith(".sources"):
                for line in (disk.read(path) or "").splitlines():
                    if line.startswith("URIs:"):
                        url = urlsplit(line.split(None, 1)[1])
                        name = f"{url.netloc}{url.path}".rstrip("/").replace("_", "%5f").replace("/", "_")
                        found += glob.glob(f"/var/lib/apt/lists/{glob.escape(name)}_*")
        return found

    def _files(self) -> None:
        for path, old in self.ledger.files.items():
            if old.content is None:
                if os.path.lexists(path):
                    self._do(f"remove {path}", partial(os.unlink, path), *of_file(path, None))
            elif not _is(path, old):
                difference = of_file(path, old.content, old.mode, old.uid)
                self._do(f"restore {path}", partial(_restore, path, old), *difference)
        # Units and drop-ins may have been removed with the packages and files.
        if not self.check:
            run(["systemctl", "daemon-reload"])
            run(["systemctl", "reset-failed", *self.ledger.services])
            if in_use.OWN_EXPORTS in self.ledger.files:
                run(["exportfs", "-ra"])

    def _folders(self) -> list[str]:
        """The existing folders that gpunodes or its software created, innermost first."""
        found = sorted(set(self.ledger.directories) - data_directory.missing(self.ledger), key=len, reverse=True)
        return [path for path in found if os.path.isdir(path) and not os.path.islink(path)]

    def _mounts(self) -> None:
        """Unmount what gpunodes mounted, and check that nothing else is mounted in folders to be removed.

        That is before package scripts or gpunodes remove them.
        """
        folders = self._folders()
        own = data_directory.mounted(self.ledger)
        if not self.check:
            tree.unmount(path for path in {*folders, *own} if path in _RUNTIMES)
        for folder, source in own.items():
            self._do(f"unmount {folder}", partial(_unmount, folder, source), Difference("mounts", {folder: source}, {}))
        if not self.check:
            tree.check_unmounted(folders, created=folders)

    def _directories(self) -> None:
        for path in self._folders():
            if not _has_other_modules(path):
                self._do(f"remove {path}", partial(tree.remove, path, created=True), _gone("folders", path))

    def _kernel(self) -> None:
        for name, value in self.ledger.sysctls.items():
            path = kernel.path_of(name)
            now = disk.read(path)
            if now is not None and now.split() != value.split():
                difference = Difference("kernel settings", {name: now.strip()}, {name: value})
                self._do(f"set {name} back to {value}", partial(_write, path, value), difference)
        if "nvidia" in self.ledger.modules and os.path.exists(f"{gpu_driver.SYS}/module/nvidia"):
            self._do("unload nvidia", lambda: gpu_driver.unload(self.ledger.modules), _unloaded("nvidia"))
        for name in reversed(self.ledger.modules):
            if not name.startswith("nvidia") and os.path.exists(f"/sys/module/{name.replace('-', '_')}"):
                # A module that is in use stays.
                self._do(f"unload {name}", partial(run, ["modprobe", "--remove", name]), _unloaded(name))

    def _swap(self) -> None:
        fstab = disk.read("/etc/fstab") or ""
        if swap.with_swap(fstab) != fstab:
            mode = stat.S_IMODE(os.stat("/etc/fstab").st_mode)
            self._do(
                "enable swap in /etc/fstab",
                lambda: disk.write("/etc/fstab", swap.with_swap(fstab), mode),
                *of_file("/etc/fstab", swap.with_swap(fstab), mode),
            )
        off = [
            device for device in self.ledger.swaps if device not in swap.active_swaps(disk.read("/proc/swaps") or "")
        ]
        for device in off:
            if os.path.exists(device):
                difference = Difference("swap", {device: "off"}, {device: "on"})
                self._do(f"turn swap on ({device})", partial(run, ["swapon", device]), difference)


def _unmount(folder: str, source: str) -> None:
    """Unmount a folder of a data directory; raises MachineProblem, with its users, while it is in use."""
    run(["systemctl", "stop", data_directory.unit(folder)])
    if data_directory.is_mounted(folder, source):
        run(["umount", "--no-canonicalize", folder])
        tree.check_unmounted([], created=[folder])


def _gone(title: str, name: str) -> Difference:
    return Difference(title, {name: "present"}, {})


def _unloaded(module: str) -> Difference:
    return Difference("kernel modules", {module: "loaded"}, {module: "not loaded"})


def _has_other_modules(path: str) -> bool:
    """Whether a folder that DKMS shares among modules now contains modules other than NVIDIA's."""
    if path == gpu_driver.DKMS:
        names = [entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    elif path.startswith("/lib/modules/"):
        names = [name for _, _, files in os.walk(path) for name in files if ".ko" in name]
    else:
        return False
    return any(not name.startswith("nvidia") for name in names)


def _is(path: str, old: ledger.OldFile) -> bool:
    return disk.read(path) == old.content and stat.S_IMODE(os.stat(path).st_mode) == old.mode


def _restore(path: str, old: ledger.OldFile) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    disk.write(path, old.content or "", old.mode, old.uid, old.gid)


def _write(path: str, value: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(value)
