"""A GPU driver on a machine: modules built and loaded, the conflicting one unloaded, devices shown to containers.

Packages, files and services are the converger's; here is what they alone do not bring about.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import disk, gpu_facts, ledger
from .problem import MachineProblem
from .process import CommandResult, last_line, run

if TYPE_CHECKING:
    from .host import Converger, Driver

SYS = "/sys"
DEV = "/dev"
PROC = "/proc"
DKMS = "/var/lib/dkms"
MODULES = "/lib/modules"
BOOT = "/boot"
CDI = "/var/run/cdi/nvidia.yaml"
_BUILD_LIMIT_S = 3600
"""A build of the real driver takes minutes, on an emulated machine more than twenty."""
_INITRAMFS_LIMIT_S = 1800
_LOAD_LIMIT_S = 180


# --- the driver ---


def drive(converger: Converger, driver: Driver) -> None:
    """Bring the driver's modules into the kernel; what only a reboot can do is noted in the outcome.

    Raises MachineProblem with the first cause: the compiler's first error, a module that the kernel refuses.
    """
    if driver.conflicting_module:
        _mind_initramfs(converger, driver.conflicting_module)
        _retire(converger, driver.conflicting_module)
    if converger.outcome.reboot:
        return
    name = driver.modules[0]
    kernel = platform.release()
    loaded = _loaded(name)
    there = not converger.check and _version(name, kernel)
    if loaded and there and _text(f"{SYS}/module/{name}/version") not in {"", there}:
        # Pods may hold its GPUs: another driver comes in with the next boot, never under them.
        converger.outcome.reboot = (
            f"the driver {_text(f'{SYS}/module/{name}/version')} is loaded, and {there} is installed"
        )
        return
    if not loaded and not converger.check and not there:
        _build(name, kernel)
    missing = [module for module in driver.modules if not _loaded(module)]
    if not missing:
        return
    converger.ledger.note_modules(missing)
    if converger.step(f"load kernel modules {', '.join(missing)}"):
        for module in missing:
            _load(module)
        if not os.path.exists(f"{DEV}/nvidiactl"):
            # udev knows nothing of these devices: NVIDIA's own program makes them.
            run(["nvidia-modprobe", "-c", "0", "-u"])


def _loaded(module: str) -> bool:
    return os.path.exists(f"{SYS}/module/{module.replace('-', '_')}")


def _version(module: str, kernel: str) -> str:
    """The version of the module that is installed for the kernel, "" where there is none."""
    # modprobe finds Debian's file, nvidia-current.ko, by a rule of /etc/modprobe.d that modinfo does not read.
    names = [module, *(path for path in [gpu_facts.module_file(kernel)] if path)]
    versions = (run(["modinfo", "--set-version", kernel, "--field", "version", name]).out.strip() for name in names)
    return next(filter(None, versions), "")


def _build(module: str, kernel: str) -> None:
    """Have DKMS build what its packages did not; raises MachineProblem with what stopped it."""
    if not os.path.exists(f"{MODULES}/{kernel}/build/Makefile"):
        raise MachineProblem(
            f"the headers of the running kernel {kernel} are not installed",
            "headers to build the driver's module with",
            "reboot into the installed kernel, or install its headers",
        )
    done = run(["dkms", "autoinstall", "-k", kernel], _BUILD_LIMIT_S)
    if _version(module, kernel):
        return
    raise build_problem(module, kernel) or MachineProblem(
        f"there is no module {module} for the kernel {kernel}: {last_line(done.text) or 'DKMS knows of none'}",
        "the driver's module, built by DKMS",
        "see `dkms status`",
    )


def build_problem(module: str, kernel: str, since: float = 0.0) -> MachineProblem | None:
    """What stopped the newest build of a module after ``since`` (seconds since 1970); None where no log of one says."""
    logs = [
        *glob.glob(f"{DKMS}/{module}*/*/build/make.log"),
        *glob.glob(f"{DKMS}/{module}*/*/{kernel}/*/log/make.log"),
    ]
    for path in sorted(logs, key=os.path.getmtime, reverse=True):
        error = first_error(disk.read(path) or "") if os.path.getmtime(path) >= since else ""
        if error:
            return MachineProblem(
                f"the driver's module does not build for the kernel {kernel}: {error}",
                "a module that compiles",
                f"choose a driver branch that knows this kernel, or an older kernel; the whole log is {path}",
            )
    return None


def first_error(log: str) -> str:
    """The first error in a log of make and a compiler, "" when there is none.

    gcc and clang write ``file:line:column: error: ...`` (or ``fatal error:``), make ``***``; what make says is only
    taken where the compiler says nothing.
    """
    lines = [line.strip() for line in log.splitlines()]
    for pattern in (
        r"^\S+:\d+(:\d+)?: (fatal )?error: ",
        r"(^|: )(fatal )?error:? |No space left on device|undefined!$|Killed|version check failed",
        r"\*\*\* ",
    ):
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE) and "-Werror" not in line.partition(": ")[0]:
                return re.sub(r"^\S*/build/", "", line)
    return ""


def _load(module: str) -> None:
    done = run(["modprobe", module], _LOAD_LIMIT_S)
    if done.ok:
        return
    message = last_line(done.text)
    if re.search(r"[Kk]ey was rejected|Required key not available|Loading of unsigned module", done.text):
        raise MachineProblem(
            f"the kernel refuses the module {module}: {message}",
            "a module signed by a key that the firmware knows: Secure Boot is on",
            "enrol DKMS's key (`mokutil --import /var/lib/dkms/mok.pub`, then confirm while booting), or switch it off",
        )
    kernel = [line for line in run(["dmesg", "--notime"]).out.splitlines() if line.startswith("NVRM:")]
    word = kernel[-1] if kernel else ""
    raise MachineProblem(
        f"the module {module} does not load: {message}" + (f" ({word})" if word else ""),
        "a driver that takes the machine's GPUs",
        "see `dmesg | grep -e NVRM -e nvidia`",
    )


# --- the conflicting module ---


def _mind_initramfs(converger: Converger, conflicting_module: str) -> None:
    """Rebuild the initramfs where it would load the conflicting module before anything is mounted; looked at once."""
    if converger.ledger.initramfs or converger.check:
        return
    wrong = [path for path in images() if _holds(path, conflicting_module)]
    converger.ledger.initramfs = "rebuilt" if wrong else "seen"
    if wrong and converger.step(f"rebuild {', '.join(wrong)} without {conflicting_module}"):
        rebuild(wrong)


def rebuild(paths: Sequence[str]) -> None:
    """Write these initramfs anew; raises MachineProblem when that fails."""
    for image in paths:
        kernel = re.sub(r"^.*?(initrd\.img|initramfs)-|\.img$", "", os.path.basename(image))
        if os.path.exists("/usr/sbin/update-initramfs"):
            done = run(["update-initramfs", "-u", "-k", kernel], _INITRAMFS_LIMIT_S)
        else:
            done = run(["dracut", "--force", image, kernel], _INITRAMFS_LIMIT_S)
        if not done.ok:
            raise MachineProblem(f"{image} cannot be rebuilt: {last_line(done.text)}", "", "see that /boot has room")


def images() -> list[str]:
    """The initramfs of every kernel that is installed."""
    found = [*glob.glob(f"{BOOT}/initrd.img-*"), *glob.glob(f"{BOOT}/initramfs-*.img")]
    return sorted(path for path in found if "rescue" not in path)


def _holds(image: str, module: str) -> bool:
    lister = "lsinitramfs" if os.path.exists("/usr/bin/lsinitramfs") else "lsinitrd"
    return re.search(rf"/{module}\.ko", run([lister, image], 300).out) is not None


def _retire(converger: Converger, conflicting_module: str) -> None:
    """Take the conflicting module out of the kernel; a console that it draws keeps it, then only a reboot helps."""
    if not _loaded(conflicting_module):
        return
    converger.ledger.note_unloaded([conflicting_module])
    if not converger.step(f"unload {conflicting_module}"):
        return
    for console in glob.glob(f"{SYS}/class/vtconsole/vtcon*"):
        if "frame buffer" in _text(f"{console}/name"):
            with contextlib.suppress(OSError), open(f"{console}/bind", "w", encoding="ascii") as file:
                file.write("0")
    done = run(["modprobe", "--remove", conflicting_module])
    if _loaded(conflicting_module):
        converger.outcome.reboot = (
            f"{conflicting_module} holds the GPU and does not let go: {last_line(done.text) or 'it is in use'}"
        )


# --- its devices ---


def show_devices(converger: Converger) -> None:
    """Write the CDI specification where it is not that of the devices that are there, and name them to systemd."""
    nodes = device_nodes()
    if not nodes and not converger.check:
        raise MachineProblem(
            f"there is no {DEV}/nvidia0", "the devices of the GPUs", "see `nvidia-smi` and `dmesg | grep NVRM`"
        )
    if not describes(disk.read(CDI) or "", nodes, _text(f"{SYS}/module/nvidia/version")) and converger.step(
        f"write {CDI}"
    ):
        os.makedirs(os.path.dirname(CDI), mode=0o755, exist_ok=True)
        # Whoever wrote the one that is there, the toolkit's service or we: it goes with the toolkit.
        converger.ledger.note_file(CDI, ledger.OldFile(None))
        _nvidia_ctk(run(["nvidia-ctk", "cdi", "generate", f"--output={CDI}"], _LOAD_LIMIT_S))
    unnamed = [path for path in nodes if not os.path.exists(_link(path))]
    if unnamed and converger.step(f"name {', '.join(unnamed)} in {DEV}/char"):
        _nvidia_ctk(run(["nvidia-ctk", "system", "create-dev-char-symlinks"], _LOAD_LIMIT_S))


def device_nodes() -> list[str]:
    """The GPUs' device nodes: /dev/nvidia0 and so on."""
    found = [path for path in glob.glob(f"{DEV}/nvidia[0-9]*") if re.fullmatch(r".*/nvidia\d+", path)]
    return sorted(found, key=lambda path: int(re.sub(r"\D", "", os.path.basename(path))))


def describes(specification: str, nodes: Sequence[str], version: str) -> bool:
    """Whether a CDI specification is that of these device nodes and of this driver."""
    named = set(re.findall(r"path: (/dev/nvidia\d+)\b", specification))
    return bool(named) and named == set(nodes) and (not version or f".so.{version}" in specification)


def _link(path: str) -> str:
    """The name by which systemd finds a device when it renews a container's device rules."""
    number = os.stat(path).st_rdev
    return f"{DEV}/char/{os.major(number)}:{os.minor(number)}"


def _nvidia_ctk(done: CommandResult) -> None:
    if not done.ok:
        errors = re.findall(r'level=(?:error|fatal) msg="(.*?)"\n', done.text + "\n")
        raise MachineProblem(
            f"`{' '.join(done.argv[:3])}` failed: {errors[0] if errors else last_line(done.text)}",
            "a driver whose library and devices it finds",
            "see `nvidia-smi -L`",
        )


# --- taking it back ---


def unload(modules: Sequence[str]) -> list[str]:
    """Take the driver's modules out of the kernel, all that stands on them first; those that stay are returned."""
    family = [
        name for name in ("nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm", "nvidia") if _loaded(name)
    ]
    wanted = [module.replace("-", "_") for module in modules]
    for name in [*family, *(name for name in wanted if name not in family)]:
        if _loaded(name):
            run(["rmmod", name])
    return [name for name in wanted if _loaded(name)]


def holders(services: Sequence[str]) -> list[str]:
    """Processes that have a GPU's device open, ``name (pid)``; those of ``services`` do not count."""
    found = []
    for folder in glob.glob(f"{PROC}/[0-9]*"):
        try:
            links = [os.readlink(path) for path in glob.glob(f"{folder}/fd/*")]
        except OSError:
            continue  # it ended meanwhile
        group = _text(f"{folder}/cgroup")
        if any(f"/{service}.service" in group for service in services):
            continue
        if any(re.fullmatch(r"/dev/nvidia(\d+|ctl|-uvm)", link) for link in links):
            found.append(f"{_text(f'{folder}/comm')} ({os.path.basename(folder)})")
    return found


def _text(path: str) -> str:
    return (disk.read(path) or "").strip()
