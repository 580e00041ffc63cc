"""The machine that the lab runs on: commands, what is missing, and whose files we make."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from ipaddress import IPv4Network
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput

Say = Callable[[str], None]
"""Takes one line of progress for the user."""

# The file that each Debian package of system-packages.txt is looked for by; a package that is not named here is needed
# to build or install the lab (libvirt-dev), not to run it.
_PROBES = {
    "dnsmasq-base": "dnsmasq",
    "e2fsprogs": "debugfs",
    "busybox-static": "busybox",
    "iproute2": "ip",
    "libvirt-daemon-system": "libvirtd",
    "libvirt-clients": "virsh",
    "mmdebstrap": "mmdebstrap",
    "openssh-client": "ssh",
    "qemu-system-x86": "qemu-system-x86_64",
    "qemu-utils": "qemu-img",
}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Check:
    """One thing that the lab needs from this machine."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Owner:
    """The user whose inventory and key the lab makes: the one behind sudo, where there is one."""

    uid: int
    gid: int

    @classmethod
    def current(cls) -> Owner:
        """Who asked for the lab."""
        return cls(int(os.environ.get("SUDO_UID", os.getuid())), int(os.environ.get("SUDO_GID", os.getgid())))

    def give(self, *paths: Path) -> None:
        """Make ``paths`` theirs."""
        for path in paths:
            os.chown(path, self.uid, self.gid)


def run(command: Sequence[str | Path], *, stdin: str | None = None, timeout: float = 120) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        GpunodesError: it failed or took longer than ``timeout`` seconds; carries its last words.
    """
    words = [str(word) for word in command]
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '/usr/bin:/bin')}:{_SBIN}", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise GpunodesError(f"`{' '.join(words)}` did not end", f"at most {timeout:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise GpunodesError(f"`{' '.join(words)}` failed ({done.returncode}): {' / '.join(last)}")
    return done.stdout


def which(program: str) -> str | None:
    """Where a program is, the administrator's folders included even when the user's PATH lacks them."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}:/usr/bin:/bin")


def system_packages() -> tuple[str, ...]:
    """The Debian packages that a lab needs on its host."""
    text = resources.files("gpunodes.lab").joinpath("system-packages.txt").read_text()
    return tuple(line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))


def checks() -> tuple[Check, ...]:
    """All that the lab needs from this machine, found or missing."""
    found = [
        Check("root", os.geteuid() == 0, f"user id {os.geteuid()}", "run it as root: sudo gpunodes lab ..."),
        Check(
            "network tunnel device",
            Path("/dev/net/tun").exists(),
            "/dev/net/tun " + ("there" if Path("/dev/net/tun").exists() else "missing"),
            "modprobe tun (in a container: --device /dev/net/tun --cap-add NET_ADMIN --cap-add SYS_ADMIN)",
        ),
    ]
    for package in system_packages():
        program = _PROBES.get(package)
        if program:
            path = which(program)
            found.append(Check(program, path is not None, path or "missing", f"apt-get install {package}"))
    for module, package in (("libvirt", "libvirt-python"), ("sushy_tools", "sushy-tools")):
        there = importlib.util.find_spec(module) is not None
        found.append(Check(package, there, "installed" if there else "missing", "pip install 'gpunodes[lab]'"))
    return tuple(found)


def require(found: Sequence[Check]) -> None:
    """Stop at once when something is missing.

    Raises:
        WrongInput: names all that is missing, with the commands that install it.
    """
    missing = [check for check in found if not check.ok]
    if missing:
        packages = [check.remedy.removeprefix("apt-get install ") for check in missing if "apt-get" in check.remedy]
        remedies = list(dict.fromkeys(check.remedy for check in missing if "apt-get" not in check.remedy))
        if packages:
            remedies.append("apt-get install " + " ".join(packages))
        names = ", ".join(f"{check.name} ({check.found})" for check in missing)
        raise WrongInput(f"this machine cannot run a lab yet: {names}", remedy="; ".join(remedies))


def used_networks() -> list[IPv4Network]:
    """Networks that the host has routes to, its default route apart."""
    routes = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]))
    found = [IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]
    return [network for network in found if network.prefixlen]


def memory_mib() -> int:
    """Memory that programs could take now without swapping, in MiB (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0
