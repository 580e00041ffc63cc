"""The stages of an upgrade of the driver. Each may be repeated after any interruption.

What is installed, loaded and kept on the machine decides what is left to do.
"""

from __future__ import annotations

import glob
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .. import disk, gpu_mig, ledger, packages
from ..causes import Program
from ..host import gpu_driver, services
from ..host.changes import Changes
from ..host.converge import converge
from ..host.sources import Sources
from ..host.spec import Spec
from ..os_upgrade import locks
from ..problem import MachineProblem
from ..process import run
from ..report import Difference
from . import kept, transaction, users

BLOCK = "/run/modprobe.d/gpunodes-driver-upgrade.conf"
"""Keeps nvidia-smi and others from loading a module while it is replaced; the next boot has no such file."""
_BLOCKED = "# Managed by gpunodes, while it replaces the driver.\n" + "".join(
    f"install {name} /bin/false\n"
    for name in ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")
)
_REFRESH = "nvidia-cdi-refresh.path"
"""The unit that starts the service of this name when modules change."""
_RELEASE_S = 120
"""How long the containers of evicted pods may take to end."""


@dataclass
class Outcome:
    """What a stage did or, in check mode, would do."""

    actions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    version: str = ""
    """The driver's version after it."""
    reboot: str = ""
    """Why the machine must be rebooted to complete it, "" if no reboot is required."""


def prepare(spec: Spec, check: bool = False) -> Outcome:
    """Download the requested driver, and keep the installed one; changes neither of them.

    What an earlier attempt downloaded is used unless the source has a newer driver that was requested. Raises
    MachineProblem if one of them cannot be had, and for what a replacement would lose.
    """
    changes, manager = _begin(spec, check)
    before = _installed_version(spec, manager)
    done = kept.matching(spec.packages)
    old = kept.load(done.replaces) if done else None
    if _meets(spec, manager) or (done and old and _is_between(old, done, manager)):
        return Outcome(version=before)
    again = done if old and _has(old, manager) else None
    if check and again:
        return Outcome(version=before)
    _check_mig()
    title = f"download the driver that replaces {before}, and keep the packages of {before}"
    difference = Difference("kept drivers", {}, {before: "kept"})
    if not again and not changes.step(title, difference):
        return Outcome(changes.actions, changes.differences, before)
    if not os.path.isdir(kept.ROOT):
        changes.ledger.note_directories([kept.ROOT])
        changes.save()
    locks.wait()
    manager.finish_interrupted()
    sources = Sources(changes)
    for repository in spec.repositories:
        sources.configure(repository)
    sources.refresh()
    installed = manager.matching(spec.holds)
    chosen = _chosen(spec, sources)
    version = next(packages.upstream(chosen[each.name]) for each in spec.packages if each.version)
    if again and kept.numbers(version) <= kept.numbers(again.version):
        return Outcome(changes.actions, changes.differences, before)
    if again:
        changes.step(title, difference)
    available = manager.available(list(installed)) if installed else {}
    own = {name: state for name, state in installed.items() if packages.upstream(state.version) == before}
    pins = {name: state for name, state in installed.items() if name.startswith("nvidia-driver-pinning-")}
    made = transaction.plan(chosen, {**own, **pins}, available, spec.holds, version)
    transaction.download(made, spec.holds, version, before)
    kept.forget_all_but([before, version])
    return Outcome(changes.actions, changes.differences, before)


def apply(spec: Spec, *, reboot: bool = False, check: bool = False) -> Outcome:
    """Replace the driver by the one that ``prepare`` downloaded, and load it.

    While the old one is in use, it is left untouched and MachineProblem names its users; with ``reboot`` the new one is
    installed beside it, and the outcome says that a reboot loads it.
    """
    _, manager = _begin(spec, check)
    if _meets(spec, manager) and users.loaded_version() == _installed_version(spec, manager) and not _is_blocked():
        return _finished(check=check)
    target = kept.matching(spec.packages)
    if target is None and not _meets(spec, manager):
        raise MachineProblem(
            "the packages of the requested driver are not on the machine", "a prepared machine", "run the stage prepare"
        )
    return _replace(spec, target, reboot=reboot, check=check)


def undo(spec: Spec, *, reboot: bool = False, check: bool = False) -> Outcome:
    """Go back to the driver that the requested one replaced; nothing if the machine still has it, loaded."""
    _, manager = _begin(spec, check)
    new = kept.matching(spec.packages)
    old = kept.load(new.replaces) if new else None
    if new is None or old is None:
        return Outcome(version=users.loaded_version())
    if _has(old, manager) and users.loaded_version() == old.version and not _is_blocked():
        return _finished(check=check)
    return _replace(replace(spec, packages=(), repositories=()), old, reboot=reboot, check=check)


def verify(spec: Spec) -> str:
    """The version of the driver; raises MachineProblem unless it is installed, built for this kernel, and loaded."""
    _, manager = _begin(spec, check=True)
    version, loaded = _installed_version(spec, manager), users.loaded_version()
    if not _meets(spec, manager):
        raise MachineProblem(f"driver {version or 'none'} is installed", _wanted(spec), "see `apt-cache policy`")
    if loaded != version:
        raise MachineProblem(
            f"driver {loaded or 'none'} is loaded", version, "see `dkms status` and `dmesg | grep NVRM`"
        )
    return loaded


# --- the replacement ---


def _replace(spec: Spec, target: kept.Kept | None, *, reboot: bool, check: bool) -> Outcome:
    """Release the GPUs, install a kept set (None: it is installed), and load its modules."""
    changes = Changes(spec, check)
    manager = packages.detect()
    before = users.loaded_version()
    version = target.version if target else _installed_version(spec, manager)
    gone = transaction.obsolete(manager.matching(spec.holds), target.packages, version.split(".")[0]) if target else []
    loads = Difference("driver", {"loaded": before or "none"}, {"loaded": version})
    action = f"replace driver {before or 'that is not loaded'} by {version}"
    if not changes.step(action, loads):
        return Outcome(changes.actions, changes.differences, before)
    if before and before != version:
        why = _release(changes)
        if why and not reboot:
            raise MachineProblem(
                why,
                "a driver that nothing uses: the installed one was left as it was",
                "end these processes, or allow a reboot (--reboot if-needed)",
            )
    if target and not _has(target, manager):
        _install(changes, target, gone)
    disk.remove(BLOCK)
    _clean_initramfs(changes, version)
    done = converge(replace(spec, packages=_without_first(spec)))
    actions = [*changes.actions, *done.actions]
    if not done.reboot:
        gpu_driver.publish_devices(done)
        if users.loaded_version() != version:
            raise MachineProblem(f"driver {users.loaded_version() or 'none'} is loaded", version, "see `dkms status`")
        _start_others()
    return Outcome(actions, [*changes.differences, *done.differences], users.loaded_version(), done.reboot)


def _release(changes: Changes) -> str:
    """Stop the driver's services and unload it; why it stays loaded, "" if it does not. Then all is as it was."""
    # An interrupted run may have stopped enabled services already.
    stopped = [name for name, state in services.states(users.SERVICES).items() if state["active"] or state["enabled"]]
    if run(["systemctl", "is-enabled", _REFRESH]).ok:
        stopped.insert(0, _REFRESH)
    os.makedirs(os.path.dirname(BLOCK), mode=0o755, exist_ok=True)
    changes.ledger.note_file(BLOCK, ledger.OldFile(None))
    changes.save()
    disk.write(BLOCK, _BLOCKED, 0o644)
    if stopped:
        run(["systemctl", "stop", *stopped], 300)
    before = users.loaded()
    if not (found := users.wait_until_unused(_RELEASE_S)):
        for name in before:
            run(["rmmod", name])
    if not users.loaded_version():
        return ""
    why = users.described(found or users.find())
    disk.remove(BLOCK)
    for name in reversed(before):
        if name not in users.loaded():
            run(["modprobe", name])
    if stopped:
        run(["systemctl", "start", *stopped], 300)
    return why


def _finished(*, check: bool) -> Outcome:
    """The driver is the right one; an interrupted run may have left services that it stopped."""
    started = _start_others(check=check)
    return Outcome([f"start {name}" for name in started], version=users.loaded_version())


def _start_others(*, check: bool = False) -> list[str]:
    """Start NVIDIA's other enabled services again, such as DCGM; one that fails does not stop the upgrade."""
    states = services.states(users.SERVICES)
    others = [name for name, state in states.items() if state["enabled"] and not state["active"]]
    if not check:
        refresh = [_REFRESH] if run(["systemctl", "is-enabled", _REFRESH]).ok else []
        others = [name for name in others if run(["systemctl", "start", name], 300).ok]
        for name in refresh:
            run(["systemctl", "start", name], 300)
    return others


def _install(changes: Changes, target: kept.Kept, gone: Sequence[str]) -> None:
    """Install a set without a network; raises MachineProblem with the compiler's error if its modules do not build."""
    files = target.files()
    names = [os.path.basename(path).partition("_")[0] for path in files]
    manager = packages.detect()
    present = manager.installed(names)
    held = [name for name, state in present.items() if state.held]
    changes.ledger.note_packages(name for name in names if name not in present)
    changes.ledger.note_holds(name for name in target.packages if name not in held)
    changes.save()
    locks.wait()
    manager.finish_interrupted()
    began = time.time()
    options = (*packages.WITHOUT_SOURCES, *transaction.REPLACE)
    result = transaction.apt(*options, "install", *files, *(f"{name}-" for name in gone))
    # apt may have released them: an administrator's hold is not in the ledger.
    manager.hold([*manager.installed(held)], held=True)
    if not result.ok:
        problem = gpu_driver.build_problem("nvidia", platform.release(), began)
        raise problem or packages.failure(Program.APT, f"installing driver {target.version}", result)


def _clean_initramfs(changes: Changes, version: str) -> None:
    """Rebuild the initramfs that contain a module of the driver: the next boot would load the old one."""
    affected = [path for path in gpu_driver.images() if gpu_driver._contains(path, "nvidia(-current)?")]
    if affected:
        changes.ledger.initramfs = "rebuilt"
        changes.step(f"rebuild {', '.join(affected)} with driver {version}")
        gpu_driver.rebuild(affected)


# --- what the machine has ---


def _begin(spec: Spec, check: bool) -> tuple[Changes, packages.Manager]:
    manager = packages.detect()
    if isinstance(manager, packages.Dnf):
        raise MachineProblem("its packages come by dnf", "a system with apt", "remove the driver, and install it again")
    if spec.driver is None:
        raise MachineProblem("the machine gets no driver", "a machine with GPUs", "select machines with GPUs")
    return Changes(spec, check), manager


def _without_first(spec: Spec) -> Sequence[packages.RequestedPackage]:
    """The requested packages that are installed now: a replacement installs no others, such as headers."""
    present = packages.detect().installed([each.name for each in spec.packages])
    return [each for each in spec.packages if each.name in present]


def _meets(spec: Spec, manager: packages.Manager) -> bool:
    wanted = [each for each in spec.packages if each.version]
    installed = manager.installed([each.name for each in wanted])
    return all(each.name in installed and packages.fits(each, installed[each.name].version) for each in wanted)


def _has(target: kept.Kept, manager: packages.Manager) -> bool:
    installed = manager.installed(list(target.packages))
    return all(name in installed and installed[name].version == each for name, each in target.packages.items())


def _is_between(old: kept.Kept, new: kept.Kept, manager: packages.Manager) -> bool:
    """Whether a replacement of ``old`` by ``new`` was interrupted: it goes on with what is kept."""
    installed = manager.installed(list(old.packages))
    known = all(installed[name].version in {old.packages[name], new.packages.get(name)} for name in installed)
    return known and not _has(old, manager)


def _installed_version(spec: Spec, manager: packages.Manager) -> str:
    """The version of the installed driver by its module's packages, else by the loaded module, "" for none."""
    for name, state in manager.matching(spec.holds).items():
        if "dkms" in name or name.startswith("nvidia-headless-"):
            return packages.upstream(state.version)
    return users.loaded_version()


def _chosen(spec: Spec, sources: Sources) -> dict[str, str]:
    """The exact version of each requested package of the driver, the best one that its source has."""
    wanted = [each for each in spec.packages if not each.name.startswith(("linux-headers", "kernel-devel"))]
    available = sources.available(wanted)
    chosen: dict[str, str] = {}
    for each in wanted:
        same = chosen.get(each.same_as, "")
        exact = packages.RequestedPackage(each.name, f"{packages.upstream(same)}*") if same else each
        chosen[each.name] = packages.choose(exact, available.get(each.name, ()), sources.unread)
    return chosen


def _check_mig() -> None:
    if gpu_mig.is_made():
        return  # the unit makes them again when nvidia-persistenced starts
    if instances := glob.glob(users.MIG_INSTANCES):
        raise MachineProblem(
            f"{len(instances)} MIG instances exist, and end when the driver is unloaded",
            "GPUs without MIG instances, or with those of gpunodes_gpu_sharing, which are made again",
            "destroy them (`nvidia-smi mig -dci`, `nvidia-smi mig -dgi`), and make them again after the upgrade",
        )


def _is_blocked() -> bool:
    return os.path.exists(BLOCK)


def _wanted(spec: Spec) -> str:
    return ", ".join(f"{each.name} {each.version}" for each in spec.packages if each.version)
