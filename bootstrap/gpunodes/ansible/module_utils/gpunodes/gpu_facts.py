"""Reads what the planner needs to know of a machine's GPUs, and of what is installed for them. Nothing is changed.

No driver and no nvidia-smi is needed: PCI functions come from sysfs, packages from dpkg's or rpm's list, Secure Boot
from the firmware's variables. A machine without NVIDIA functions and without the driver costs one look at the PCI bus.
"""

from __future__ import annotations

import glob
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .process import run

NVIDIA = "10de"
_DISPLAY = "03"  # PCI base class: display controller
_NVSWITCH = "0680"  # PCI class: bridge, other
_EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
_SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"
_ATTRIBUTES = 4
"""Bytes before the value of a variable in efivarfs (kernel, Documentation/filesystems/efivarfs.rst)."""

# Where DKMS keeps the key that it signs modules with: its own place, and Ubuntu's.
_MOK_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")

_DRIVER = re.compile(
    r"(cuda-drivers|nvidia-(open|driver|dkms|headless|utils|kernel|fabric-?manager|tesla-.*(kernel-dkms|smi)|smi)"
    r"|libnvidia-compute|libcuda1|kmod-nvidia|linux-modules-nvidia)"
)
# Names that NVIDIA's repositories alone have, and names that distributions alone have.
_NVIDIAS = re.compile(
    r"(cuda-drivers(-\d+)?|nvidia-open(-\d+)?|nvidia-driver-(pinning-.*|cuda)|nvidia-kernel-open-dkms"
    r"|kmod-nvidia-(open|latest)-dkms)"
)
_DISTRIBUTIONS = re.compile(
    r"(nvidia-headless-.*-server.*|linux-modules-nvidia-.*|nvidia-tesla-.*|nvidia-open-kernel-dkms)"
)
_TOOLKIT = re.compile(r"(lib)?nvidia-container[a-z0-9-]*")
_RUNTIMES = ("containerd", "containerd.io", "docker-ce", "docker.io")
# NVIDIA's services hold the GPUs for as long as the machine runs, and use none. 15 signs, as the kernel cuts them.
_SERVICES = ("nvidia-persiste", "nv-fabricmanage", "nvidia-device-p", "nv-hostengine", "nvidia-smi")


@dataclass(frozen=True)
class InstalledPackage:
    """A package that is installed."""

    version: str
    maintainer: str
    """Who made it: dpkg's Maintainer, rpm's Vendor."""


def read(root: str = "/") -> dict[str, Any]:
    """The facts below ``root``; programs are asked when that is the machine's own."""
    functions = list(_functions(root))
    kernel = platform.release() if root == "/" else _text(root, "/proc/sys/kernel/osrelease") or ""
    loaded = _exists(root, "/sys/module/nvidia")
    if not functions and not loaded:
        return {"functions": [], "nvswitches": 0}
    packages = installed(root)
    return {
        "functions": functions,
        "nvswitches": sum(function["class"].startswith(_NVSWITCH) for function in functions),
        "nouveau": _nouveau(root, kernel),
        "secure_boot": _secure_boot(root),
        "mok": _mok(root),
        "headers": _headers(root, kernel, packages),
        "driver": _driver(root, kernel, packages, loaded=loaded),
        "cuda": _cuda(root, packages),
        "toolkit": {name: one.version for name, one in packages.items() if _TOOLKIT.fullmatch(name)},
        "runtimes": {name: packages[name].version for name in _RUNTIMES if name in packages},
        "clients": _clients(root) if loaded else None,
    }


def present() -> bool:
    """Whether the machine has anything of NVIDIA's on its PCI bus: a quick look."""
    return any(True for _ in _functions("/"))


def _functions(root: str) -> Iterator[dict[str, Any]]:
    """NVIDIA's GPUs and NVSwitches on the PCI bus, in the order of their addresses."""
    base = _at(root, "/sys/bus/pci/devices")
    for address in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        folder = f"/sys/bus/pci/devices/{address}"
        vendor, class_ = _hex(root, f"{folder}/vendor"), _hex(root, f"{folder}/class")
        if vendor != NVIDIA or not class_.startswith((_DISPLAY, _NVSWITCH)):
            continue
        driver = _at(root, f"{folder}/driver")
        yield {
            "address": address,
            "vendor": vendor,
            "device": _hex(root, f"{folder}/device"),
            "subsystem": f"{_hex(root, f'{folder}/subsystem_vendor')}:{_hex(root, f'{folder}/subsystem_device')}",
            "class": class_,
            "driver": os.path.basename(os.readlink(driver)) if os.path.islink(driver) else None,
        }


def _nouveau(root: str, kernel: str) -> str:
    """``loaded``, ``blacklisted``, ``available`` (it will be loaded at the next boot) or ``absent``."""
    if _exists(root, "/sys/module/nouveau"):
        return "loaded"
    if not re.search(r"/nouveau\.ko", _text(root, f"/lib/modules/{kernel}/modules.dep") or ""):
        return "absent"
    command_line = _text(root, "/proc/cmdline") or ""
    if re.search(r"(?:modprobe\.|module_|rd\.driver\.)blacklist=\S*\bnouveau\b", command_line):
        return "blacklisted"
    for folder in ("/etc", "/run", "/usr/lib", "/lib"):
        for path in glob.glob(_at(root, f"{folder}/modprobe.d/*.conf")):
            if re.search(r"^\s*(blacklist|install)\s+nouveau\b", _text("/", path) or "", re.MULTILINE):
                return "blacklisted"
    return "available"


def _secure_boot(root: str) -> bool | None:
    """Whether the kernel takes signed modules only; None where the firmware does not say."""
    if not _exists(root, "/sys/firmware/efi"):
        return False
    shim = _bytes(root, f"/sys/firmware/efi/efivars/MokSBStateRT-{_SHIM}")
    if shim and shim[_ATTRIBUTES:] == b"\x01":
        return False  # validation is switched off in the shim: the kernel goes by that
    found = _bytes(root, f"/sys/firmware/efi/efivars/SecureBoot-{_EFI_GLOBAL}")
    return found[_ATTRIBUTES:] == b"\x01" if found else None


def _mok(root: str) -> dict[str, Any]:
    """The machine owner's key that DKMS signs with, and whether the firmware's list has it."""
    for path in _MOK_KEYS:
        key = _bytes(root, path)
        if key:
            enrolled = (
                _bytes(root, "/sys/firmware/efi/mok-variables/MokListRT")
                or _bytes(root, f"/sys/firmware/efi/efivars/MokListRT-{_SHIM}")
                or b""
            )
            return {"key": path, "enrolled": key in enrolled}
    return {"key": None, "enrolled": False}


def _headers(root: str, kernel: str, packages: Mapping[str, InstalledPackage]) -> dict[str, Any]:
    """Whether the running kernel's headers are there, and the package that has them: None where none is known."""
    build = f"/lib/modules/{kernel}/build"
    link = _at(root, build)
    if os.path.islink(link):
        build = os.path.join(os.path.dirname(build), os.readlink(link))
    there = _exists(root, f"{build}/Makefile")
    if not _exists(root, "/var/lib/dpkg/status"):
        return {"running": there, "package": f"kernel-devel-{kernel}"}
    name = f"linux-headers-{kernel}"
    return {"running": there, "package": name if name in packages or (not there and _has(root, name)) else None}


def _has(root: str, name: str) -> bool:
    """Whether apt's sources have the package; they are trusted to have it where they were never read."""
    if root != "/" or not glob.glob("/var/lib/apt/lists/*_Packages*"):
        return True
    return run(["apt-cache", "show", "--no-all-versions", name], 30).ok


def _driver(root: str, kernel: str, packages: Mapping[str, InstalledPackage], *, loaded: bool) -> dict[str, Any]:
    """The driver that is loaded, else the one that is installed: its version, modules, and who brought it."""
    ours = {name: one for name, one in packages.items() if _is_driver(name)}
    version, flavour = _text(root, "/sys/module/nvidia/version"), None
    if loaded:
        output = _text(root, "/proc/driver/nvidia/version") or ""
        flavour = "open" if "Open Kernel Module" in output else "proprietary" if output else None
    elif root == "/" and (file := module_file(kernel)):
        output = run(["modinfo", file], 10).out
        found = re.search(r"^version:\s*(\S+)", output, re.MULTILINE)
        version = found.group(1) if found else None
        flavour = "open" if re.search(r"^license:.*GPL", output, re.MULTILINE) else "proprietary" if version else None
    if flavour is None and ours:
        kernels = [name for name in ours if re.search(r"dkms|kernel|kmod|linux-modules|headless|nvidia-open", name)]
        flavour = "open" if any("open" in name for name in kernels) else "proprietary" if kernels else None
    return {
        "module": version,
        "loaded": loaded,
        "origin": _origin(root, ours, there=bool(version)),
        "packages": {name: one.version for name, one in sorted(ours.items())},
        "flavour": flavour,
    }


def module_file(kernel: str) -> str | None:
    """The driver's module of a kernel; Debian calls it nvidia-current, or after its branch."""
    listing = _text("/", f"/lib/modules/{kernel}/modules.dep") or ""
    found = re.search(r"^(\S*/nvidia(?:-current|-tesla-\d+)?\.ko\S*):", listing, re.MULTILINE)
    return f"/lib/modules/{kernel}/{found.group(1)}" if found else None


def _is_driver(name: str) -> bool:
    return bool(_DRIVER.match(name)) and not name.startswith(("nvidia-open-kernel-support", "nvidia-kernel-common"))


def _origin(root: str, packages: Mapping[str, InstalledPackage], *, there: bool) -> str | None:
    """Who brought the driver: its packages' names or maintainers say so; NVIDIA's .run leaves its uninstaller."""
    if _exists(root, "/usr/bin/nvidia-uninstall"):
        return "runfile"
    if any(_NVIDIAS.fullmatch(name) for name in packages):
        return "nvidia-repository"
    if any(_DISTRIBUTIONS.fullmatch(name) for name in packages):
        return "distribution"
    makers = " ".join(one.maintainer for one in packages.values()).lower()
    if "nvidia.com" in makers or "nvidia corporation" in makers:
        return "nvidia-repository"
    if re.search(r"debian|ubuntu|canonical|red hat|rocky|almalinux|centos", makers):
        return "distribution"
    return "unknown" if there or packages else None


def _cuda(root: str, packages: Mapping[str, InstalledPackage]) -> dict[str, str]:
    """CUDA toolkits by version, and who brought each."""
    found = {}
    for folder in glob.glob(_at(root, "/usr/local/cuda-*.*")):
        found[os.path.basename(folder)[len("cuda-") :]] = "runfile"
    for name, one in packages.items():
        toolkit = re.fullmatch(r"cuda-(?:toolkit|nvcc)-(\d+)-(\d+)", name)
        if toolkit:
            found[".".join(toolkit.groups())] = "nvidia-repository"
        elif name == "nvidia-cuda-toolkit":
            found[".".join(re.findall(r"\d+", one.version)[:2])] = "distribution"
    return dict(sorted(found.items()))


def _clients(root: str) -> int:
    """Processes that have a GPU open, without the services that always have."""
    count = 0
    for folder in glob.glob(_at(root, "/proc/[0-9]*")):
        try:
            links = [os.readlink(path) for path in glob.glob(f"{folder}/fd/*")]
        except OSError:
            continue  # it ended meanwhile
        if any(re.fullmatch(r"/dev/nvidia(\d+|-uvm)", link) for link in links):
            name = (_text("/", f"{folder}/comm") or "")[:15]
            count += name not in _SERVICES
    return count


# --- packages ---


def installed(root: str) -> dict[str, InstalledPackage]:
    """Installed packages that may concern GPUs."""
    status = _text(root, "/var/lib/dpkg/status")
    if status is not None:
        return parse_status(status)
    if root != "/":
        return {}
    return parse_rpm(run(["rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\t%{VENDOR}\n"], 60).out)


_CONCERN = re.compile(r"(lib)?(nvidia|cuda)|linux-(modules-nvidia|headers)|kmod-nvidia|kernel-devel|containerd|docker")


def parse_status(text: str) -> dict[str, InstalledPackage]:
    """dpkg's status file: paragraphs of fields."""
    found = {}
    for paragraph in text.split("\n\n"):
        name = paragraph.partition("\n")[0].partition(": ")[2]
        if not _CONCERN.match(name):
            continue
        fields = dict(re.findall(r"^(Status|Version|Maintainer): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found[name] = InstalledPackage(fields.get("Version", ""), fields.get("Maintainer", ""))
    return found


def parse_rpm(listing: str) -> dict[str, InstalledPackage]:
    """Lines of name, version and vendor."""
    found = {}
    for line in listing.splitlines():
        name, version, vendor = [*line.split("\t"), "", ""][:3]
        if _CONCERN.match(name):
            found[name] = InstalledPackage(version, vendor)
    return found


# --- files ---


def _at(root: str, path: str) -> str:
    return path if root == "/" else root.rstrip("/") + path


def _exists(root: str, path: str) -> bool:
    return os.path.exists(_at(root, path))


def _bytes(root: str, path: str) -> bytes | None:
    try:
        with open(_at(root, path), "rb") as file:
            return file.read()
    except OSError:
        return None


def _text(root: str, path: str) -> str | None:
    found = _bytes(root, path)
    return None if found is None else found.decode(errors="replace").strip()


def _hex(root: str, path: str) -> str:
    """A number of sysfs (``0x10de``) without its prefix."""
    return (_text(root, path) or "")[2:].lower()
