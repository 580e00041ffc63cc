"""Kernel modules and kernel settings."""

from __future__ import annotations

import os

from .. import disk, firewall
from ..problem import MachineProblem
from ..process import must
from ..report import Difference
from . import files
from .changes import Changes
from .spec import File

_SYS = "/proc/sys"
_MODULES_FILE = "/etc/modules-load.d/gpunodes.conf"
_FORWARDING = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv6.conf.default.forwarding")
_SYSCTL_FILE = "/etc/sysctl.d/99-gpunodes.conf"
_RAISED_FILE = "/etc/sysctl.d/10-gpunodes.conf"
"""systemd-sysctl reads files by name, and the last value applies: any later file may set a higher one."""


def load_modules(changes: Changes) -> None:
    """Load kernel modules now and at every boot."""
    modules = changes.spec.modules
    if not modules:
        return
    absent = [name for name in modules if not os.path.exists(f"/sys/module/{name.replace('-', '_')}")]
    if absent:
        changes.ledger.note_modules(absent)
        difference = Difference("kernel modules", dict.fromkeys(absent, "not loaded"), dict.fromkeys(absent, "loaded"))
        if changes.step(f"load kernel modules {', '.join(absent)}", difference):
            for name in absent:
                must(["modprobe", name])
    files.write(changes, File(_MODULES_FILE, "".join(f"{name}\n" for name in modules)))


def note_forwarding(changes: Changes) -> None:
    """Record whether packets are forwarded, for software that changes that without gpunodes."""
    for name in _FORWARDING:
        before = disk.read(f"/proc/sys/{name.replace('.', '/')}")
        if before is not None:
            changes.ledger.note_sysctl(name, before.strip())
    if not changes.ledger.forward_policies:
        changes.ledger.forward_policies = firewall.forward_policies()
    if changes.ledger.firewall_tables is None:
        changes.ledger.firewall_tables = firewall.tables()


def set_sysctls(changes: Changes) -> None:
    """Set kernel settings now and at every boot; raises MachineProblem if the kernel rejects one."""
    sysctls = changes.spec.sysctls
    if not sysctls:
        return
    lines = "".join(f"{name} = {value}\n" for name, value in sorted(sysctls.items()))
    files.write(changes, File(_SYSCTL_FILE, lines))
    for name, value in sysctls.items():
        before = disk.read(path_of(name))
        if before is not None and before.split() == value.split():
            continue
        _set(changes, name, before, value)


def raise_sysctls(changes: Changes) -> None:
    """Raise limits of the kernel that are lower than those of the desired state, now and at every boot."""
    present = {name: disk.read(path_of(name)) for name in changes.spec.raised}
    raised = {
        name: value
        for name, value in changes.spec.raised.items()
        if (before := present[name]) is not None and (name in changes.ledger.sysctls or int(before) < int(value))
    }
    if raised:
        lines = "".join(f"{name} = {value}\n" for name, value in sorted(raised.items()))
        files.write(changes, File(_RAISED_FILE, lines))
    for name, value in raised.items():
        if int(present[name] or 0) < int(value):
            _set(changes, name, present[name], value)


def path_of(name: str) -> str:
    """The file of a kernel setting."""
    return f"{_SYS}/{name.replace('.', '/')}"


def _set(changes: Changes, name: str, before: str | None, value: str) -> None:
    if before is not None:
        changes.ledger.note_sysctl(name, before.strip())
    difference = Difference("kernel settings", {} if before is None else {name: before.strip()}, {name: value})
    if changes.step(f"set {name} to {value}", difference):
        try:
            with open(path_of(name), "w", encoding="ascii") as file:
                file.write(value)
        except OSError as error:
            raise MachineProblem(f"{name} cannot be set to {value}: {error.strerror}") from error
