"""A GPU driver: builds and loads its modules, unloads the conflicting one, makes its devices known to containers."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
from collections.abc import Sequence

from .. import causes, disk, gpu_facts, gpu_users, ledger
from ..causes import Program
from ..probe.log import kmsg
from ..problem import MachineProblem, Problem
from ..process import CommandResult, last_line, run
from ..report import GENERATED, Difference
from .changes import Changes
from .spec import Driver

SYS = "/sys"
DEV = "/dev"
PROC = "/proc"
DKMS = "/var/lib/dkms"
MODULES = "/lib/modules"
BOOT = "/boot"
CDI = "/var/run/cdi/nvidia.yaml"
_BUILD_LIMIT_S = 3600
"""A build of the driver takes minutes, on an emulated machine more than twenty."""
_INITRAMFS_LIMIT_S = 1800
_LOAD_LIMIT_S = 180


# --- the driver ---


def note_modules(changes: Changes, driver: Driver) -> None:
    """Record the driver's modules that are not loaded yet, before its packages are installed.

    Any boot after that may load them, also of another machine with this disk: an undo unloads them then.
    """
    changes.ledger.note_modules(module for module in driver.modules if not _loaded(module))


def load_driver(changes: Changes, driver: Driver) -> None:
    """Load the driver's modules, or only build them; if a reboot is required, the reason is recorded in the changes.

    Raises MachineProblem with the first cause: the compiler's first error, or a module that the kernel rejects.
    """
    if driver.conflicting_module:
        _clean_initramfs(changes, driver.conflicting_module)
        _unload_conflicting(changes, driver.conflicting_module)
    if changes.reboot:
        return
    name = driver.modules[0]
    kernel = platform.release()
    loaded = _loaded(name)
    installed = not changes.check and _version(name, kernel)
    if loaded and installed and _text(f"{SYS}/module/{name}/version") not in {"", installed}:
        # Pods may use the GPUs: a loaded driver is replaced only by a reboot.
        changes.reboot = f"the driver {_text(f'{SYS}/module/{name}/version')} is loaded, and {installed} is installed"
        return
    if not loaded and not changes.check and not installed:
        _build(name, kernel)
    missing = [module for module in driver.modules if not _loaded(module)]
    if not missing:
        return
    if not driver.loaded:
        return
    difference = Difference("kernel modules", dict.fromkeys(missing, "not loaded"), dict.fromkeys(missing, "loaded"))
    if changes.step(f"load kernel modules {', '.join(missing)}", difference):
        for module in missing:
            _load(module)
        if not os.path.exists(f"{DEV}/nvidiactl"):
            # udev does not create these devices: NVIDIA's program does.
            run(["nvidia-modprobe", "-c", "0", "-u"])


def _loaded(module: str) -> bool:
    return os.path.exists(f"{SYS}/module/{module.replace('-', '_')}")


def _version(module: str, kernel: str) -> str:
    """The version of the module that is installed for the kernel, "" if there is none."""
    # modprobe finds Debian's file nvidia-current.ko by a rule in /etc/modprobe.d, which modinfo does not read.
    names = [module, *(path for path in [gpu_facts.module_file(kernel)] if path)]
    versions = (run(["modinfo", "--set-version", kernel, "--field", "version", name]).out.strip() for name in names)
    return next(filter(None, versions), "")


def _build(module: str, kernel: str) -> None:
    """Build the module with DKMS if its packages did not; raises MachineProblem with the cause of a failure."""
    if not os.path.exists(f"{MODULES}/{kernel}/build/Makefile"):
        raise MachineProblem(
            f"the headers of the running kernel {kernel} are not installed",
            "headers to build the driver's module",
            "reboot into the installed kernel, or install its headers",
        )
    result = run(["dkms", "autoinstall", "-k", kernel], _BUILD_LIMIT_S)
    if _version(module, kernel):
        return
    cause = causes.find(Program.BUILD, result.text)
    raise build_problem(module, kernel) or MachineProblem(
        f"no module {module} for the kernel {kernel}: "
        f"{cause.found if cause else last_line(result.text) or 'DKMS has none'}",
        "the driver's module, built by DKMS",
        (cause and cause.remedy) or "see `dkms status`",
        result.text,
    )


def build_problem(module: str, kernel: str, since: float = 0.0) -> MachineProblem | None:
    """The error of the newest failed build of a module after ``since`` (seconds since 1970); None if no log has one."""
    logs = [
        *glob.glob(f"{DKMS}/{module}*/*/build/make.log"),
        *glob.glob(f"{DKMS}/{module}*/*/{kernel}/*/log/make.log"),
    ]
    for path in sorted(logs, key=os.path.getmtime, reverse=True):
        log = (disk.read(path) or "") if os.path.getmtime(path) >= since else ""
        if cause := causes.find(Program.BUILD, log):
            # Compilers name a file below DKMS's folder of the build.
            error = re.sub(r"^\S*/build/", "", cause.found)
            remedy = cause.remedy or "choose a driver branch that supports this kernel, or an older kernel"
            return MachineProblem(
                f"the driver's module does not build for the kernel {kernel}: {error}",
                "a module that compiles",
                f"{remedy}; see the log {path}",
                log,
            )
    return None


def _load(module: str) -> None:
    result = run(["modprobe", module], _LOAD_LIMIT_S)
    if result.ok:
        return
    message = last_line(result.text)
    if re.search(r"[Kk]ey was rejected|Required key not available|Loading of unsigned module", result.text):
        raise MachineProblem(
            f"the kernel rejects the module {module}: {message}",
            "a module signed with an enrolled key, because Secure Boot is on",
            "enrol DKMS's key (`mokutil --import /var/lib/dkms/mok.pub`, confirm it at boot), or turn off Secure Boot",
        )
    log = messages(_kernel_log())
    cause = causes.of(Program.DRIVER, log) if log else Problem("")
    raise MachineProblem(
        f"the module {module} does not load: {message}" + (f" ({cause.found})" if cause.found else ""),
        "a driver that supports the machine's GPUs",
        "; ".join(filter(None, [cause.remedy, "see `dmesg | grep -e NVRM -e nvidia`"])),
        log,
    )


def _kernel_log() -> str:
    """The kernel's own lines in its ring buffer: names that processes choose do not look like lines of the driver."""
    texts = [text for _, text in kmsg(f"{DEV}/kmsg")[0]]
    # The driver writes several lines in one message.
    return "\n".join(text.replace("\\x0a", "\n") if text.startswith("NVRM:") else text for text in texts)


def messages(log: str) -> str:
    """What the driver wrote into the kernel log since it was loaded last, one message a line.

    It breaks messages into lines of its own, each with its name.
    """
    lines = [line.strip() for line in log.split("\n")]
    start = "nvidia-nvlink: Nvlink Core is being initialized"
    loads = [number for number, line in enumerate(lines) if line.startswith(start)]
    found: list[str] = []
    for line in lines[loads[-1] if loads else 0 :]:
        if not line.startswith("NVRM:"):
            continue
        text = line[len("NVRM:") :].strip()
        if found and (found[-1].endswith(":") or re.match(r"(?!loading )[a-z(]|NVIDIA \d", text)):
            found[-1] += f" {text}"
        else:
            found.append(text)
    return "\n".join(found)


# --- the conflicting module ---


def _clean_initramfs(changes: Changes, conflicting_module: str) -> None:
    """Rebuild the initramfs if it contains the conflicting module, which would be loaded early; checked only once."""
    if changes.ledger.initramfs or changes.check:
        return
    affected = [path for path in images() if _contains(path, conflicting_module)]
    changes.ledger.initramfs = "rebuilt" if affected else "seen"
    difference = Difference(
        "initramfs",
        dict.fromkeys(affected, f"with {conflicting_module}"),
        dict.fromkeys(affected, f"without {conflicting_module}"),
    )
    if affected and changes.step(f"rebuild {', '.join(affected)} without {conflicting_module}", difference):
        rebuild(affected)


def rebuild(paths: Sequence[str]) -> None:
    """Rebuild these initramfs; raises MachineProblem if that fails."""
    for image in paths:
        kernel = re.sub(r"^.*?(initrd\.img|initramfs)-|\.img$", "", os.path.basename(image))
        if os.path.exists("/usr/sbin/update-initramfs"):
            result = run(["update-initramfs", "-u", "-k", kernel], _INITRAMFS_LIMIT_S)
        else:
            result = run(["dracut", "--force", image, kernel], _INITRAMFS_LIMIT_S)
        if not result.ok:
            cause = causes.of(Program.BUILD, result.text)
            raise MachineProblem(
                f"{image} cannot be rebuilt: {cause.found}",
                "",
                cause.remedy or "check the free space of /boot",
                result.text,
            )


def images() -> list[str]:
    """The initramfs of all installed kernels."""
    found = [*glob.glob(f"{BOOT}/initrd.img-*"), *glob.glob(f"{BOOT}/initramfs-*.img")]
    return sorted(path for path in found if "rescue" not in path)


def _contains(image: str, module: str) -> bool:
    lister = "lsinitramfs" if os.path.exists("/usr/bin/lsinitramfs") else "lsinitrd"
    return re.search(rf"/{module}\.ko", run([lister, image], 300).out) is not None


def _unload_conflicting(changes: Changes, conflicting_module: str) -> None:
    """Unload the conflicting module; if a console keeps it in use, a reboot is required."""
    if not _loaded(conflicting_module):
        return
    changes.ledger.note_unloaded([conflicting_module])
    difference = Difference("kernel modules", {conflicting_module: "loaded"}, {conflicting_module: "not loaded"})
    if not changes.step(f"unload {conflicting_module}", difference):
        return
    for console in glob.glob(f"{SYS}/class/vtconsole/vtcon*"):
        if "frame buffer" in _text(f"{console}/name"):
            with contextlib.suppress(OSError), open(f"{console}/bind", "w", encoding="ascii") as file:
                file.write("0")
    result = run(["modprobe", "--remove", conflicting_module])
    if _loaded(conflicting_module):
        changes.reboot = (
            f"{conflicting_module} uses the GPU and cannot be unloaded: {last_line(result.text) or 'it is in use'}"
        )


# --- its devices ---


def publish_devices(changes: Changes) -> None:
    """Write the CDI specification if it does not match the present devices, and make them known to systemd."""
    nodes = device_nodes()
    if not nodes and not changes.check:
        cause = causes.find(Program.DRIVER, messages(_kernel_log())) or Problem("")
        raise MachineProblem(
            f"{DEV}/nvidia0 does not exist" + (f" ({cause.found})" if cause.found else ""),
            "the devices of the GPUs",
            "; ".join(filter(None, [cause.remedy, "see `nvidia-smi` and `dmesg | grep NVRM`"])),
        )
    before = disk.read(CDI)
    if not matches_devices(before or "", nodes, _text(f"{SYS}/module/nvidia/version")):
        if changes.step(f"write {CDI}"):
            os.makedirs(os.path.dirname(CDI), mode=0o755, exist_ok=True)
            # An undo deletes the file, even if the toolkit's service wrote it: it is useless without the toolkit.
            changes.ledger.note_file(CDI, ledger.OldFile(None))
            _check_nvidia_ctk(run(["nvidia-ctk", "cdi", "generate", f"--output={CDI}"], _LOAD_LIMIT_S))
        changes.differences.append(Difference(CDI, before, GENERATED if changes.check else disk.read(CDI)))
    unnamed = [path for path in nodes if not os.path.exists(_link(path))]
    difference = Difference(f"links in {DEV}/char", {}, {_link(path): path for path in unnamed})
    if unnamed and changes.step(f"name {', '.join(unnamed)} in {DEV}/char", difference):
        _check_nvidia_ctk(run(["nvidia-ctk", "system", "create-dev-char-symlinks"], _LOAD_LIMIT_S))


def device_nodes() -> list[str]:
    """The GPUs' device nodes: /dev/nvidia0, /dev/nvidia1, ..."""
    found = [path for path in glob.glob(f"{DEV}/nvidia[0-9]*") if re.fullmatch(r".*/nvidia\d+", path)]
    return sorted(found, key=lambda path: int(re.sub(r"\D", "", os.path.basename(path))))


def matches_devices(specification: str, nodes: Sequence[str], version: str) -> bool:
    """Whether a CDI specification describes these device nodes and this driver."""
    listed = set(re.findall(r"path: (/dev/nvidia\d+)\b", specification))
    return bool(listed) and listed == set(nodes) and (not version or f".so.{version}" in specification)


def _link(path: str) -> str:
    """The link by which systemd finds a device when it renews a container's device rules."""
    number = os.stat(path).st_rdev
    return f"{DEV}/char/{os.major(number)}:{os.minor(number)}"


def _check_nvidia_ctk(result: CommandResult) -> None:
    if not result.ok:
        errors = re.findall(r'level=(?:error|fatal) msg="(.*?)"\n', result.text + "\n")
        raise MachineProblem(
            f"`{' '.join(result.argv[:3])}` failed: {errors[0] if errors else last_line(result.text)}",
            "a loaded driver with its library and devices",
            "see `nvidia-smi -L`",
        )


# --- undo ---


def unload(modules: Sequence[str]) -> list[str]:
    """Unload the driver's modules, dependent modules first; returns those that stay loaded."""
    family = [
        name for name in ("nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm", "nvidia") if _loaded(name)
    ]
    names = [module.replace("-", "_") for module in modules]
    for name in [*family, *(name for name in names if name not in family)]:
        if _loaded(name):
            run(["rmmod", name])
    return [name for name in names if _loaded(name)]


def holders(services: Sequence[str]) -> list[str]:
    """Processes that have a GPU device open, as ``name (pid)``, excluding those of ``services``."""
    return [
        f"{user.name} ({user.pid})"
        for user in gpu_users.find(r"nvidia(?:\d+|ctl|-uvm)", PROC)
        if not any(f"/{service}.service" in user.cgroup for service in services)
    ]


def _text(path: str) -> str:
    return (disk.read(path) or "").strip()
