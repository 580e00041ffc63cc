"""Reads the facts that the planner needs about a machine's GPUs and the software installed for them. Changes nothing.

Needs neither driver nor nvidia-smi: PCI functions come from sysfs, packages from dpkg's or rpm's list, Secure Boot from
the firmware's variables. Without NVIDIA functions and driver it only reads the PCI bus.
"""

from __future__ import annotations

import glob
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import gpu_users
from .process import run

NVIDIA = "10de"
_DISPLAY = "03"  # PCI base class: display controller
_NVSWITCH = "0680"  # PCI class: bridge, other
_EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
_SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"
_ATTRIBUTES = 4
"""Bytes before the value of a variable in efivarfs (kernel, Documentation/filesystems/efivarfs.rst)."""

# Keys with which DKMS signs modules: its own path, and Ubuntu's.
_MOK_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")

_DRIVER = re.compile(
    r"(cuda-drivers|nvidia-(open|driver|dkms|headless|utils|kernel|fabric-?manager|tesla-.*(kernel-dkms|smi)|smi)"
    r"|libnvidia-compute|libcuda1|kmod-nvidia|linux-modules-nvidia)"
)
# Package names that occur only in NVIDIA's repositories, and names that occur only in distributions.
_NVIDIA_PACKAGES = re.compile(
    r"(cuda-drivers(-\d+)?|nvidia-open(-\d+)?|nvidia-driver-(pinning-.*|cuda)|nvidia-kernel-open-dkms"
    r"|kmod-nvidia-(open|latest)-dkms)"
)
_DISTRIBUTION_PACKAGES = re.compile(
    r"(nvidia-headless-.*-server.*|linux-modules-nvidia-.*|nvidia-tesla-.*|nvidia-open-kernel-dkms)"
)
_TOOLKIT = re.compile(r"(lib)?nvidia-container[a-z0-9-]*")
_RUNTIMES = ("containerd", "containerd.io", "docker-ce", "docker.io")
# NVIDIA's services keep GPU devices open without using them. The kernel truncates process names to 15 characters.
_SERVICES = ("nvidia-persiste", "nv-fabricmanage", "nvidia-device-p", "nv-hostengine", "nvidia-smi")


@dataclass(frozen=True)
class InstalledPackage:
    """An installed package."""

    version: str
    maintainer: str
    """Its maintainer: dpkg's Maintainer, rpm's Vendor."""


def read(root: str = "/", expected: Sequence[str] = ()) -> dict[str, Any]:
    """The facts below ``root``; programs are run only if ``root`` is /.

    ``expected`` are PCI device ids of the GPUs of machines that will boot a copy of this disk. Without a GPU of its
    own, the machine reports them, and all that the planner needs for them.
    """
    functions = list(_functions(root))
    kernel = platform.release() if root == "/" else _text(root, "/proc/sys/kernel/osrelease") or ""
    loaded = _exists(root, "/sys/module/nvidia")
    if not functions and not loaded and not expected:
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
        "cudnn": {name: package.version for name, package in packages.items() if name.startswith("libcudnn")},
        "toolkit": {name: package.version for name, package in packages.items() if _TOOLKIT.fullmatch(name)},
        "runtimes": {name: packages[name].version for name in _RUNTIMES if name in packages},
        "clients": _clients(root) if loaded else None,
        **({"expected": list(expected)} if expected and not functions else {}),
    }


def present() -> bool:
    """Whether the machine has an NVIDIA device on its PCI bus; fast."""
    return any(True for _ in _functions("/"))


def _functions(root: str) -> Iterator[dict[str, Any]]:
    """NVIDIA's GPUs and NVSwitches on the PCI bus, in the order of their addresses."""
    base = _below(root, "/sys/bus/pci/devices")
    for address in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        folder = f"/sys/bus/pci/devices/{address}"
        vendor, class_ = _hex(root, f"{folder}/vendor"), _hex(root, f"{folder}/class")
        if vendor != NVIDIA or not class_.startswith((_DISPLAY, _NVSWITCH)):
            continue
        driver = _below(root, f"{folder}/driver")
        yield {
            "address": address,
            "vendor": vendor,
            "device": _hex(root, f"{folder}/device"),
            "subsystem": f"{_hex(root, f'{folder}/subsystem_vendor')}:{_hex(root, f'{folder}/subsystem_device')}",
            "class": class_,
            "driver": os.path.basename(os.readlink(driver)) if os.path.islink(driver) else None,
        }


def _nouveau(root: str, kernel: str) -> str:
    """``loaded``, ``blacklisted``, ``available`` (the next boot loads it) or ``absent``."""
    if _exists(root, "/sys/module/nouveau"):
        return "loaded"
    if not re.search(r"/nouveau\.ko", _text(root, f"/lib/modules/{kernel}/modules.dep") or ""):
        return "absent"
    command_line = _text(root, "/proc/cmdline") or ""
    if re.search(r"(?:modprobe\.|module_|rd\.driver\.)blacklist=\S*\bnouveau\b", command_line):
        return "blacklisted"
    for folder in ("/etc", "/run", "/usr/lib", "/lib"):
        for path in glob.glob(_below(root, f"{folder}/modprobe.d/*.conf")):
            if re.search(r"^\s*(blacklist|install)\s+nouveau\b", _text("/", path) or "", re.MULTILINE):
                return "blacklisted"
    return "available"


def _secure_boot(root: str) -> bool | None:
    """Whether the kernel accepts signed modules only; None if the firmware does not report it."""
    if not _exists(root, "/sys/firmware/efi"):
        return False
    shim = _bytes(root, f"/sys/firmware/efi/efivars/MokSBStateRT-{_SHIM}")
    if shim and shim[_ATTRIBUTES:] == b"\x01":
        return False  # validation is disabled in the shim, and the kernel follows it
    found = _bytes(root, f"/sys/firmware/efi/efivars/SecureBoot-{_EFI_GLOBAL}")
    return found[_ATTRIBUTES:] == b"\x01" if found else None


def _mok(root: str) -> dict[str, Any]:
    """The machine owner's key with which DKMS signs, and whether it is enrolled in the firmware."""
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


_APT_LISTS = "/var/lib/apt/lists"


def _headers(root: str, kernel: str, packages: Mapping[str, InstalledPackage]) -> dict[str, Any]:
    """Whether the running kernel's headers are installed, and their package; None if no package is known."""
    build = f"/lib/modules/{kernel}/build"
    link = _below(root, build)
    if os.path.islink(link):
        build = os.path.join(os.path.dirname(build), os.readlink(link))
    present = _exists(root, f"{build}/Makefile")
    if not _exists(root, "/var/lib/dpkg/status"):
        return {"running": present, "package": f"kernel-devel-{kernel}"}
    name = f"linux-headers-{kernel}"
    known = name in packages or (not present and _is_available(root, name))
    return {"running": present, "package": name if known else None}


def _is_available(root: str, name: str) -> bool:
    """Whether apt's sources contain the package; assumed unless the lists of all of them were read.

    gpunodes itself may have read only the lists of its own sources.
    """
    if root != "/":
        return True
    # Lines such as 'http://host/dists/trixie/InRelease' host_dists_trixie_InRelease 0; nothing is fetched.
    sources = re.findall(r"^'[^']*' (\S+)Release ", run(["apt-get", "update", "--print-uris"], 30).out, re.MULTILINE)
    if not all(map(_was_read, sources)):
        return True
    return run(["apt-cache", "show", "--no-all-versions", name], 30).ok


def _was_read(source: str) -> bool:
    prefix = f"{_APT_LISTS}/{source.removesuffix('In')}"
    return os.path.exists(f"{prefix}InRelease") or os.path.exists(f"{prefix}Release")


def _driver(root: str, kernel: str, packages: Mapping[str, InstalledPackage], *, loaded: bool) -> dict[str, Any]:
    """The loaded driver, else the installed one: its version, modules and origin."""
    driver_packages = {name: package for name, package in packages.items() if _is_driver(name)}
    version, flavour = _text(root, "/sys/module/nvidia/version"), None
    if loaded:
        output = _text(root, "/proc/driver/nvidia/version") or ""
        flavour = "open" if "Open Kernel Module" in output else "proprietary" if output else None
    elif root == "/" and (file := module_file(kernel)):
        output = run(["modinfo", file], 10).out
        found = re.search(r"^version:\s*(\S+)", output, re.MULTILINE)
        version = found.group(1) if found else None
        flavour = "open" if re.search(r"^license:.*GPL", output, re.MULTILINE) else "proprietary" if version else None
    if flavour is None and driver_packages:
        pattern = r"dkms|kernel|kmod|linux-modules|headless|nvidia-open"
        kernel_packages = [name for name in driver_packages if re.search(pattern, name)]
        is_open = any("open" in name for name in kernel_packages)
        flavour = "open" if is_open else "proprietary" if kernel_packages else None
    return {
        "module": version,
        "loaded": loaded,
        "origin": _origin(root, driver_packages, present=bool(version)),
        "packages": {name: package.version for name, package in sorted(driver_packages.items())},
        "flavour": flavour,
    }


def module_file(kernel: str) -> str | None:
    """The file of the driver's module for a kernel; Debian names it nvidia-current, or after its branch."""
    listing = _text("/", f"/lib/modules/{kernel}/modules.dep") or ""
    found = re.search(r"^(\S*/nvidia(?:-current|-tesla-\d+)?\.ko\S*):", listing, re.MULTILINE)
    return f"/lib/modules/{kernel}/{found.group(1)}" if found else None


def _is_driver(name: str) -> bool:
    return bool(_DRIVER.match(name)) and not name.startswith(("nvidia-open-kernel-support", "nvidia-kernel-common"))


def _origin(root: str, packages: Mapping[str, InstalledPackage], *, present: bool) -> str | None:
    """The driver's origin, by its packages' names or maintainers; NVIDIA's .run installer leaves an uninstaller."""
    if _exists(root, "/usr/bin/nvidia-uninstall"):
        return "runfile"
    if any(_NVIDIA_PACKAGES.fullmatch(name) for name in packages):
        return "nvidia-repository"
    if any(_DISTRIBUTION_PACKAGES.fullmatch(name) for name in packages):
        return "distribution"
    maintainers = " ".join(package.maintainer for package in packages.values()).lower()
    if "nvidia.com" in maintainers or "nvidia corporation" in maintainers:
        return "nvidia-repository"
    if re.search(r"debian|ubuntu|canonical|red hat|rocky|almalinux|centos", maintainers):
        return "distribution"
    return "unknown" if present or packages else None


def _cuda(root: str, packages: Mapping[str, InstalledPackage]) -> dict[str, str]:
    """Origins of CUDA toolkits, by version."""
    found = {}
    for folder in glob.glob(_below(root, "/usr/local/cuda-*.*")):
        found[os.path.basename(folder)[len("cuda-") :]] = "runfile"
    for name, package in packages.items():
        toolkit = re.fullmatch(r"cuda-(?:toolkit|nvcc)-(\d+)-(\d+)", name)
        if toolkit:
            found[".".join(toolkit.groups())] = "nvidia-repository"
        elif name == "nvidia-cuda-toolkit":
            found[".".join(re.findall(r"\d+", package.version)[:2])] = "distribution"
    return dict(sorted(found.items()))


def _clients(root: str) -> int:
    """Number of processes that have a GPU device open, excluding NVIDIA's services."""
    found = gpu_users.find(r"nvidia(?:\d+|-uvm)", _below(root, "/proc"))
    return sum(user.name[:15] not in _SERVICES for user in found)


# --- packages ---


def installed(root: str) -> dict[str, InstalledPackage]:
    """Installed packages that may be related to GPUs."""
    status = _text(root, "/var/lib/dpkg/status")
    if status is not None:
        return parse_status(status)
    if root != "/":
        return {}
    return parse_rpm(run(["rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\t%{VENDOR}\n"], 60).out)


_RELATED = re.compile(
    r"(lib)?(nvidia|cuda|cudnn)|linux-(modules-nvidia|headers)|kmod-nvidia|kernel-devel|containerd|docker"
)


def parse_status(text: str) -> dict[str, InstalledPackage]:
    """Parse dpkg's status file: paragraphs of fields."""
    found = {}
    for paragraph in text.split("\n\n"):
        name = paragraph.partition("\n")[0].partition(": ")[2]
        if not _RELATED.match(name):
            continue
        fields = dict(re.findall(r"^(Status|Version|Maintainer): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found[name] = InstalledPackage(fields.get("Version", ""), fields.get("Maintainer", ""))
    return found


def parse_rpm(listing: str) -> dict[str, InstalledPackage]:
    """Parse lines of name, version and vendor."""
    found = {}
    for line in listing.splitlines():
        name, version, vendor = [*line.split("\t"), "", ""][:3]
        if _RELATED.match(name):
            found[name] = InstalledPackage(version, vendor)
    return found


# --- files ---


def _below(root: str, path: str) -> str:
    return path if root == "/" else root.rstrip("/") + path


def _exists(root: str, path: str) -> bool:
    return os.path.exists(_below(root, path))


def _bytes(root: str, path: str) -> bytes | None:
    try:
        with open(_below(root, path), "rb") as file:
            return file.read()
    except OSError:
        return None


def _text(root: str, path: str) -> str | None:
    found = _bytes(root, path)
    return None if found is None else found.decode(errors="replace").strip()


def _hex(root: str, path: str) -> str:
    """A hexadecimal number in sysfs (``0x10de``), without its prefix."""
    return (_text(root, path) or "")[2:].lower()
