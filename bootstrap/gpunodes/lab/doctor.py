"""Checks what the lab needs from its host; reports everything that is missing, with the command that installs it."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunodes.errors import WrongInput
from gpunodes.lab.host import which
from gpunodes.lab.mirror import missing_packages

# The program by which each Debian package is detected. The mirror checks its own packages.
_PROBES = {
    "dnsmasq-base": "dnsmasq",
    "e2fsprogs": "debugfs",
    "busybox-static": "busybox",
    "iproute2": "ip",
    "iptables": "iptables",
    "libvirt-daemon-system": "libvirtd",
    "libvirt-clients": "virsh",
    "mmdebstrap": "mmdebstrap",
    "openssh-client": "ssh",
    "qemu-system-x86": "qemu-system-x86_64",
    "qemu-utils": "qemu-img",
}
# The files with which libvirt's Python binding is built, and the Debian package of each.
_HEADERS = {
    "libvirt-dev": Path("/usr/include/libvirt/libvirt.h"),
    "python3-dev": Path(sysconfig.get_path("include"), "Python.h"),
}
_INSTALL = "apt-get install "


@dataclass(frozen=True)
class HostCheck:
    """One requirement of the lab on its host."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def root() -> HostCheck:
    """Whether the user may create network namespaces and virtual machines."""
    return HostCheck("root", os.geteuid() == 0, f"user id {os.geteuid()}", "run it as root: sudo gpunodes lab ...")


def checks() -> tuple[HostCheck, ...]:
    """All requirements of the lab on its host, met or not."""
    tunnel = Path("/dev/net/tun").exists()
    found = [
        root(),
        HostCheck(
            "network tunnel device",
            tunnel,
            f"/dev/net/tun is {'present' if tunnel else 'missing'}",
            "modprobe tun (in a container: --device /dev/net/tun --cap-add NET_ADMIN --cap-add SYS_ADMIN)",
        ),
    ]
    for package, program in _PROBES.items():
        path = which(program)
        found.append(HostCheck(program, path is not None, path or "missing", f"{_INSTALL}{package}"))
    missing = missing_packages()
    found.append(
        HostCheck(
            "packages that the mirror is built with",
            not missing,
            f"missing: {', '.join(missing)}" if missing else "installed",
            f"{_INSTALL}{' '.join(missing)}".rstrip(),
        )
    )
    for module, package in (("libvirt", "libvirt-python"), ("sushy_tools", "sushy-tools")):
        installed = importlib.util.find_spec(module) is not None
        state = "installed" if installed else "missing"
        found.append(HostCheck(package, installed, state, _EXTRA))
        if module == "libvirt" and not installed:
            found += _headers()
    return tuple(found)


# Nothing is published: the name alone could install another author's package.
_EXTRA = "in the checkout of gpunodes: pipx install --force '.[lab]'"


def _headers() -> list[HostCheck]:
    """What the installation of libvirt's Python binding needs."""
    return [
        HostCheck(package, path.exists(), str(path) if path.exists() else "missing", f"{_INSTALL}{package}")
        for package, path in _HEADERS.items()
    ]


def require(found: Sequence[HostCheck]) -> None:
    """Refuse a host that does not meet every requirement.

    Raises:
        WrongInput: lists everything that is missing, with the commands that install it.
    """
    missing = [check for check in found if not check.ok]
    if missing:
        packages = [check.remedy.removeprefix(_INSTALL) for check in missing if check.remedy.startswith(_INSTALL)]
        remedies = list(dict.fromkeys(check.remedy for check in missing if not check.remedy.startswith(_INSTALL)))
        if packages:
            remedies.append(_INSTALL + " ".join(packages))
        names = ", ".join(f"{check.name} ({check.found})" for check in missing)
        raise WrongInput(f"this machine cannot run a lab yet: {names}", remedy="; ".join(remedies))
