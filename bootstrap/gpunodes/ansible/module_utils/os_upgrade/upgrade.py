"""The stages of an upgrade of the operating system. Each may be repeated after any interruption.

What is installed on the machine decides what is left to do. A new kernel is installed before the packages that depend
on the newest kernel: if the driver does not build for it, it is removed, and the next boot is as before.
"""

from __future__ import annotations

import fnmatch
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import disk, ledger, packages
from ..causes import Program
from ..host import gpu_driver
from ..problem import MachineProblem
from ..process import CommandResult, run
from ..report import Difference
from . import kernels, locks, reboot
from .pending import Package, Pending, kept_files, parse

apt = packages.Apt.get
_EXACTLY = "-oAPT::Get::Upgrade-By-Source-Package=false"
"""By default apt upgrades what has the same source package, too: of a kernel the packages that depend on the newest."""


@dataclass(frozen=True)
class Request:
    """What is requested of an upgrade."""

    security: bool = False
    """Only packages with a security update."""
    keep: Sequence[str] = ()
    """Shell patterns of packages that are never upgraded: those of gpunodes."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Releases of kernels that are not installed, with the reason: the driver does not build for them."""
    driver: bool = False
    """Whether DKMS must have built the driver for a kernel before it may boot."""


@dataclass
class Outcome:
    """What a stage did or, in check mode, would do."""

    actions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look(lists: str = "present") -> Pending:
    """What an upgrade would do.

    ``lists``: the machine's lists of packages as they are ("present"), read again ("refreshed"), or read into a folder
    that is deleted afterwards ("private"), which changes nothing.
    """
    _apt_only()
    if lists == "private":
        with packages.other_lists() as options:
            _must("apt-get update", apt(*options, "update"))
            return _pending(*options)
    if lists == "refreshed":
        locks.wait()
        packages.detect().refresh()
    return _pending()


def prepare(request: Request, check: bool = False) -> Outcome:
    """Download what ``apply`` installs; raises MachineProblem if that fails or does not fit on the disk."""
    found, done = look(), Outcome()
    wanted = {each.name: each.new for each in _all(found, request)}
    if not wanted:
        return done
    locks.wait()
    _check_boot(found, request)
    if _to_download(wanted):
        done.actions.append(f"download {len(wanted)} packages")
        done.differences.append(Difference("downloaded packages", {}, wanted))
        if not check:
            _must("downloading packages", apt(_EXACTLY, "install", "--download-only", *_versions(wanted)))
    return done


def apply(request: Request, check: bool = False) -> Outcome:
    """Upgrade the packages, then the kernel; packages that gpunodes or users hold stay."""
    _apt_only()
    done = Outcome()
    locks.wait()
    manager = packages.detect()
    if not check and _finish_interrupted(manager, request, done):
        done.actions.append("finish an interrupted package installation")
        done.differences.append(Difference("package manager", {"state": "interrupted"}, {"state": "consistent"}))
    found = look()
    rest = found.chosen(request.keep, security=request.security)
    if rest:
        _install(rest, f"upgrade {len(rest)} packages", done, check)
    if back := [each for each in found.kept_back if not any(fnmatch.fnmatchcase(each, name) for name in request.keep)]:
        done.notes.append(f"kept back, because they are held or their upgrade would remove others: {', '.join(back)}")
    metas = _metas(found, request)
    for release in sorted(_kernels(found, request), key=kernels.numbers)[-1:]:
        if why := request.refused.get(release):
            _hold(metas, f"the kernel {release} is not installed: {why}", done, check)
            return done
        _release(metas, done, check)
        new = _of_kernel(found, release, request)
        failure = _install_kernel(new, release, done, check)
        if not check:
            if why := kernels.build_driver(release) if request.driver else "":
                _remove([each.name for each in new], f"the kernel {release} is removed again: {why}", done)
                _hold(metas, "", done, check)
                return done
            if failure:
                raise failure
            # The packages that depend on the newest kernel keep it, as after an upgrade by hand.
            run(["apt-mark", "auto", *(each.name for each in new)])
    if metas:
        _install(metas, f"upgrade {', '.join(each.name for each in metas)}", done, check)
    if not check:
        _check_newest(request)
    return done


def verify(request: Request, *, rebooted: bool) -> list[str]:
    """Why a reboot is still due; raises MachineProblem if the machine is not in order.

    ``rebooted``: it was rebooted if that was due, so the newest kernel must run.
    """
    running, newest = platform.release(), kernels.newest(platform.release())
    if run(["dpkg", "--audit"]).out.strip():
        raise MachineProblem("packages are only half installed", "complete packages", "see `dpkg --audit`")
    if rebooted and running != newest:
        raise MachineProblem(
            f"the kernel {running} runs, although {newest} is installed",
            newest,
            "see the boot loader's default (GRUB_DEFAULT in /etc/default/grub)",
        )
    if request.driver and not os.path.exists(f"{gpu_driver.SYS}/module/nvidia"):
        raise MachineProblem("the module nvidia is not loaded", "a loaded driver", "see `dkms status` and `dmesg`")
    if disk.read("/etc/kubernetes/kubelet.conf") is not None:
        state = run(["systemctl", "is-active", "kubelet"]).out.strip()
        if state != "active":
            raise MachineProblem(f"kubelet is {state or 'not installed'}", "active", "see `journalctl -u kubelet`")
    return reboot.reasons()


# --- what there is to do ---


def _apt_only() -> None:
    if isinstance(packages.detect(), packages.Dnf):
        raise MachineProblem(
            "its packages come by dnf",
            "a system with apt: Debian or Ubuntu",
            "upgrade it by hand: drain the node, `dnf upgrade`, reboot, `gpunodes gpu verify`",
        )


def _pending(*options: str) -> Pending:
    """What an upgrade would do, and what it would do without the holds of gpunodes on kernels."""
    result = apt(*options, "upgrade", "--with-new-pkgs", "--simulate")
    _must("apt-get upgrade", result)
    found = parse(result.out)
    own = [name for name in ledger.load().holds if name in found.kept_back and Package(name, "x", "x").is_kernel_meta]
    if not own:
        return found
    held = apt(*options, "install", "--only-upgrade", "--ignore-hold", "--simulate", *own)
    _must("apt-get install", held)
    more = parse(held.out)
    names = {each.name for each in (*found.upgrades, *found.new)}
    return Pending(
        [*found.upgrades, *(each for each in more.upgrades if each.name in own)],
        [*found.new, *(each for each in more.new if each.name not in names)],
        [name for name in found.kept_back if name not in own],
        own,
    )


def _kernels(found: Pending, request: Request) -> list[str]:
    """The releases of the new kernels that are requested."""
    return [each.kernel for each in found.new if each.kernel and (each.security or not request.security)]


def _metas(found: Pending, request: Request) -> list[Package]:
    return [each for each in found.upgrades if each.is_kernel_meta and (each.security or not request.security)]


def _of_kernel(found: Pending, release: str, request: Request) -> list[Package]:
    """The packages of a new kernel, with its headers if the driver's module is to be built for it."""
    new, headers = found.of_kernel(release), f"linux-headers-{release}"
    if request.driver and headers not in {each.name for each in new}:
        new += [Package(headers, "", versions[0]) for versions in packages.detect().available([headers]).values()]
    return new


def _all(found: Pending, request: Request) -> list[Package]:
    """All packages that are to be installed, without those of refused kernels."""
    releases = sorted(_kernels(found, request), key=kernels.numbers)[-1:]
    built = [release for release in releases if release not in request.refused]
    new = [each for release in built for each in _of_kernel(found, release, request)]
    metas = [] if any(release in request.refused for release in releases) else _metas(found, request)
    return [*found.chosen(request.keep, security=request.security), *new, *metas]


def _versions(wanted: Mapping[str, str]) -> list[str]:
    return [f"{name}={version}" for name, version in wanted.items()]


def _to_download(wanted: Mapping[str, str]) -> bool:
    """Whether a package is missing in apt's archives."""
    result = apt(_EXACTLY, "install", "--print-uris", *_versions(wanted))
    _must("apt-get install", result)
    return any(line.startswith("'") for line in result.out.splitlines())


def _check_boot(found: Pending, request: Request) -> None:
    """Raise MachineProblem if /boot has no space for another kernel: half an initramfs does not boot."""
    if not _kernels(found, request):
        return
    running = platform.release()
    files = [f"{gpu_driver.BOOT}/{name}-{running}" for name in ("vmlinuz", "initrd.img", "System.map", "config")]
    needed = 2 * sum(os.path.getsize(path) for path in files if os.path.exists(path))
    state = os.statvfs(gpu_driver.BOOT)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise MachineProblem(
            f"{gpu_driver.BOOT} has {free >> 20} MiB of free space",
            f"{needed >> 20} MiB for a new kernel and its initramfs",
            "remove old kernels (`apt autoremove --purge`)",
        )


def _check_newest(request: Request) -> None:
    """Build the driver for the kernel that the next boot chooses, if an interrupted run left it without one."""
    newest = kernels.newest(platform.release())
    if request.driver and newest != platform.release() and (why := kernels.build_driver(newest)):
        raise MachineProblem(
            f"the next boot would choose the kernel {newest}, and {why}",
            "a kernel with the driver's module",
            f"remove that kernel (`apt purge linux-image-{newest}`)",
        )


# --- changes ---


def _finish_interrupted(manager: packages.Manager, request: Request, done: Outcome) -> bool:
    """Finish an interrupted installation, without kernels for which the driver does not build: they fail again."""
    was = manager.finish_interrupted()
    if was and request.driver and (names := kernels.half_installed()):
        _remove(names, f"removed again, because the driver does not build for this kernel: {', '.join(names)}", done)
    return was


def _install_kernel(new: Sequence[Package], release: str, done: Outcome, check: bool) -> MachineProblem | None:
    """Install a kernel; why its packages were not configured, although it is on the disk, None if they were.

    DKMS fails them if a module does not build (Debian, /etc/kernel/postinst.d/dkms). Raises MachineProblem if nothing
    was installed.
    """
    try:
        _install(new, f"install the kernel {release}", done, check)
    except MachineProblem as problem:
        if not kernels.is_unpacked(release):
            raise
        return problem
    return None


def _install(wanted: Sequence[Package], action: str, done: Outcome, check: bool) -> None:
    """Install exactly these versions; raises MachineProblem if that would remove a package."""
    versions = _versions({each.name: each.new for each in wanted})
    simulated = apt(_EXACTLY, "install", "--simulate", *versions)
    _must("apt-get install", simulated)
    effects = packages.parse_simulation(simulated.out)
    if effects.removes:
        fact = f"to {action} would remove {', '.join(effects.removes)}"
        raise MachineProblem(fact, "an upgrade that removes nothing", "remove it yourself, or hold it")
    done.actions.append(action)
    done.differences.append(
        Difference(
            "packages",
            {each.name: each.old for each in wanted if each.old},
            {each.name: each.new for each in wanted},
        )
    )
    if check:
        return
    _note_headers(effects.installs)
    result = apt(_EXACTLY, "install", *versions)
    _must(action, result)
    done.notes += [
        f"{path}: the machine's version was kept; the package's is beside it, as {path}.dpkg-dist"
        for path in kept_files(result.out)
    ]


def _note_headers(installs: Sequence[str]) -> None:
    """Let the ledger have the headers of a new kernel if it has those of the running one: they leave with the driver.

    They need the compiler, which would count as needed by others and stay.
    """
    path = ledger.path_of("gpu")
    found = ledger.load(path)
    if f"linux-headers-{platform.release()}" in found.packages:
        found.note_packages(name for name in installs if name.startswith(("linux-headers-", "linux-kbuild-")))
        found.save(path)


def _remove(names: Sequence[str], note: str, done: Outcome) -> None:
    """Remove the packages of a kernel that was just installed."""
    done.actions.append(f"remove {', '.join(names)}")
    done.notes.append(note)
    _must(f"removing {', '.join(names)}", apt("purge", *names))


def _hold(metas: Sequence[Package], note: str, done: Outcome, check: bool) -> None:
    """Hold the packages that would bring a kernel; the ledger has them first, so that a reset releases them."""
    if note:
        done.notes.append(note)
    names = [each.name for each in metas]
    state = packages.detect().installed(names)
    unheld = [name for name in names if name in state and not state[name].held]
    if not unheld:
        return
    done.actions.append(f"hold {', '.join(unheld)}")
    done.differences.append(Difference("held packages", {}, dict.fromkeys(unheld, "held")))
    if not check:
        found = ledger.load()
        found.note_holds(unheld)
        found.save()
        packages.detect().hold(unheld, held=True)


def _release(metas: Sequence[Package], done: Outcome, check: bool) -> None:
    """Release the holds of gpunodes on packages whose kernel is wanted now."""
    names = [each.name for each in metas]
    state = packages.detect().installed(names)
    own = {*ledger.load().holds}
    held = [name for name in names if name in state and state[name].held and name in own]
    if held:
        done.actions.append(f"release the hold of {', '.join(held)}")
        done.differences.append(Difference("held packages", dict.fromkeys(held, "held"), {}))
        if not check:
            packages.detect().hold(held, held=False)


def _must(title: str, result: CommandResult) -> None:
    if not result.ok:
        raise packages.failure(Program.APT, title, result)
