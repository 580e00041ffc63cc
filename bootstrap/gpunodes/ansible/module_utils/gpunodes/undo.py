"""Takes back all that the ledger lists: a machine back to what it was before us."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from . import disk, firewall, gpu_host, host, kubeadm, ledger, lock, packages, tree
from .problem import MachineProblem
from .process import run

NOTES = ("/run/gpunodes-nvidia-smi.lock", "/run/gpunodes-gpu-reset")
"""What the probe and repair's helper keep for the time of a boot; both are files that go to a machine alone."""
_RUNTIMES = ("/run/containerd", "/var/lib/containerd", "/run/docker", "/var/lib/docker")
"""Where container runtimes mount, and may leave mounts when they stop. Beside them only the kubelet mounts."""
_DOCKER_DATA = "/var/lib/docker"
_VOLUMES = f"{_DOCKER_DATA}/volumes/"
"""What is mounted there is somebody's data, and not a container's own."""
_LETTING_GO_S = 120
"""How long pods that were told to go may take to let go of the GPUs."""


class Undoer:
    """One undoing run. Every part may be repeated: an interrupted run is finished by the next."""

    def __init__(self, check: bool = False, part: str = "") -> None:
        """``part`` takes back one of ``ledger.PARTS`` alone; "" all of them, and then the rest."""
        self.check = check
        self.part = part
        self.actions: list[str] = []
        self.ledger = ledger.load(ledger.path_of(part))

    def run(self) -> list[str]:
        """Undo; the actions taken, none where there was nothing of ours.

        Raises MachineProblem when something uses what is to go; nothing of that part was removed then.
        """
        parts = self._parts()
        self.see_bare()
        for part in parts:
            self.actions += part.run()
        if os.path.exists(ledger.path_of(self.part)):
            self._undo()
        if not self.check and not os.path.exists(os.path.dirname(ledger.PATH)):
            for path in (*NOTES, lock.PATH):
                disk.remove(path)
        return self.actions

    def see_bare(self) -> None:
        """Raise MachineProblem while somebody has something mounted in what is to go; nothing is changed."""
        for each in (self, *self._parts()):
            folders = each._folders()
            tree.see_bare(set(folders) - {*_RUNTIMES, kubeadm.KUBELET}, made=folders)
            if _DOCKER_DATA in folders:
                tree.see_bare([_VOLUMES])

    def _parts(self) -> list[Undoer]:
        return [] if self.part else [Undoer(self.check, part) for part in ledger.PARTS]

    def _undo(self) -> None:
        self._drivers()
        self._services()
        if not self.check:
            self._mounts()
        self._docker()
        if not self.check:
            # While nft, which may have come with us, is there.
            firewall.remove_empty_tables(self.ledger.firewall_tables)
        self._packages()
        self._users()
        lists = self._apt_lists()
        self._files()
        self._directories()
        self._kernel()
        if not self.part:
            self._swap()
        for path in lists:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._conflicting_modules()
        self._restarts()
        what = f"what was changed for {self.part}" if self.part else "the ledger"
        self._do(f"forget {what}", lambda: ledger.forget(self.part))

    def _do(self, action: str, function: Callable[[], object]) -> None:
        self.actions.append(action)
        if not self.check:
            function()

    def _drivers(self) -> None:
        """See that nobody uses the GPUs; what our own services hold open does not count."""
        if "nvidia" not in self.ledger.modules or not os.path.exists(f"{gpu_host.SYS}/module/nvidia"):
            return
        deadline = time.monotonic() + (0 if self.check else _LETTING_GO_S)
        while users := gpu_host.holders([name for name in self.ledger.services if name.startswith("nvidia-")]):
            if time.monotonic() >= deadline:
                raise MachineProblem(
                    f"{', '.join(users)} use{'s' if len(users) == 1 else ''} the GPUs",
                    "nobody: the driver is not taken away under its users",
                    "end them (pods: `kubectl drain`), then run the command again",
                )
            time.sleep(2)

    def _conflicting_modules(self) -> None:
        """What had to make way for the driver comes back."""
        if self.ledger.initramfs == "rebuilt":
            self._do("rebuild the initramfs", lambda: gpu_host.rebuild(gpu_host.images()))
        for name in self.ledger.unloaded:
            if not os.path.exists(f"{gpu_host.SYS}/module/{name}"):
                self._do(f"load {name}", partial(run, ["modprobe", name]))

    def _restarts(self) -> None:
        """Services that were there before us, and still run with what we have just taken away from them."""
        states = host.service_states(list(self.ledger.services)) if self.part and self.ledger.services else {}
        for name, before in self.ledger.services.items():
            if before["active"] and states.get(name, {}).get("active"):
                self._do(f"restart {name}", partial(host.start, name, "restart"))

    def _services(self) -> None:
        states = host.service_states(list(self.ledger.services)) if self.ledger.services else {}
        for name, before in self.ledger.services.items():
            now = states.get(name, {"enabled": False, "active": False})
            if now["active"] and not before["active"]:
                self._do(f"stop {name}", partial(run, ["systemctl", "stop", name], 300))
            if now["enabled"] and not before["enabled"]:
                self._do(f"disable {name}", partial(run, ["systemctl", "disable", name]))

    def _docker(self) -> None:
        """What Docker leaves when it has stopped: its bridge and its rules. Somebody else's Docker keeps them."""
        if self.ledger.services.get("docker", {"active": True})["active"]:
            return
        if os.path.exists("/sys/class/net/docker0"):
            self._do("remove the link docker0", partial(run, ["ip", "link", "delete", "docker0"]))
        if not self.check:
            firewall.clean(firewall.DOCKER)

    def _users(self) -> None:
        for name in self.ledger.users:
            if host.has_user(name):
                # Its group goes with it (login.defs: USERGROUPS_ENAB).
                self._do(f"remove the user {name}", partial(run, ["userdel", name]))
        for name in self.ledger.groups:
            if host.has_group(name):
                self._do(f"remove the group {name}", partial(run, ["groupdel", name]))

    def _packages(self) -> None:
        if not self.ledger.packages and not self.ledger.holds:
            return
        manager = packages.detect()
        if not self.check:
            manager.mend()
        there = manager.installed(sorted({*self.ledger.holds, *self.ledger.packages}))
        held = [name for name in self.ledger.holds if name in there and there[name].held]
        if held:
            self._do(f"let go of {', '.join(held)}", lambda: manager.hold(held, held=False))
        ours = [name for name in self.ledger.packages if name in there]
        # Debian's and Ubuntu's docker.io empties that folder when it is purged (its postrm: nuke-graph-directory.sh).
        kept = [name for name in ours if name == "docker.io" and _DOCKER_DATA not in self.ledger.directories]
        if kept:
            self._do(f"remove {kept[0]}, and leave {_DOCKER_DATA}", lambda: manager.remove(kept))
        if ours := [name for name in ours if name not in kept]:
            self._do(f"remove {', '.join(ours)}", lambda: manager.purge(ours))

    def _apt_lists(self) -> list[str]:
        """apt's copies of the indices of our package sources."""
        found = []
        for path in self.ledger.files:
            if path.endswith(".sources"):
                for line in (disk.read(path) or "").splitlines():
                    if line.startswith("URIs:"):
                        parts = urlsplit(line.split(None, 1)[1])
                        stem = glob.escape(
                            f"{parts.netloc}{parts.path}".rstrip("/").replace("_", "%5f").replace("/", "_")
                        )
                        found += glob.glob(f"/var/lib/apt/lists/{stem}_*")
        return found

    def _files(self) -> None:
        for path, old in self.ledger.files.items():
            if old.content is None:
                if os.path.lexists(path):
                    self._do(f"remove {path}", partial(os.unlink, path))
            elif not _is(path, old):
                self._do(f"restore {path}", partial(_restore, path, old))
        # Units and drop-ins may have gone with the packages and files.
        if not self.check:
            run(["systemctl", "daemon-reload"])
            run(["systemctl", "reset-failed", *self.ledger.services])

    def _folders(self) -> list[str]:
        """The folders that came with us and are still there, innermost first."""
        found = sorted(self.ledger.directories, key=len, reverse=True)
        return [path for path in found if os.path.isdir(path) and not os.path.islink(path)]

    def _mounts(self) -> None:
        """See that nothing is mounted in what is to go, before packages' scripts or we remove any of it."""
        folders = self._folders()
        tree.unmount(path for path in folders if path in _RUNTIMES)
        tree.see_bare(folders, made=folders)

    def _directories(self) -> None:
        for path in self._folders():
            if not _others_in(path):
                self._do(f"remove {path}", partial(tree.remove, path, made=True))

    def _kernel(self) -> None:
        for name, value in self.ledger.sysctls.items():
            path = f"/proc/sys/{name.replace('.', '/')}"
            now = disk.read(path)
            if now is not None and now.split() != value.split():
                self._do(f"set {name} back to {value}", partial(_write, path, value))
        if "nvidia" in self.ledger.modules and os.path.exists(f"{gpu_host.SYS}/module/nvidia"):
            self._do("unload nvidia", lambda: gpu_host.unload(self.ledger.modules))
        for name in reversed(self.ledger.modules):
            if not name.startswith("nvidia") and os.path.exists(f"/sys/module/{name.replace('-', '_')}"):
                # A module that something else has come to use stays.
                self._do(f"unload {name}", partial(run, ["modprobe", "--remove", name]))

    def _swap(self) -> None:
        fstab = disk.read("/etc/fstab") or ""
        if host.with_swap(fstab) != fstab:
            mode = stat.S_IMODE(os.stat("/etc/fstab").st_mode)
            self._do("bring swap back in /etc/fstab", lambda: disk.write("/etc/fstab", host.with_swap(fstab), mode))
        off = [
            device for device in self.ledger.swaps if device not in host.active_swaps(disk.read("/proc/swaps") or "")
        ]
        for device in off:
            if os.path.exists(device):
                self._do(f"turn swap on ({device})", partial(run, ["swapon", device]))


def _others_in(path: str) -> bool:
    """Whether a folder that DKMS shares among modules holds another module than NVIDIA's by now."""
    if path == gpu_host.DKMS:
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
