"""The time service that a machine without one gets, by its package manager. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.host.spec import File, Service, Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage

INSTALL = "install"
"""The value of gpunodes_time_service that requests it."""
_TIMESYNCD = Spec(
    packages=(RequestedPackage("systemd-timesyncd"),),
    directories=("/etc/systemd/timesyncd.conf.d", "/var/lib/systemd/timesync", "/var/lib/private/systemd/timesync"),
    users=("systemd-timesync",),
    services=(Service("systemd-timesyncd"),),
)
# chrony reads no folder of drop-ins by default: with servers of the settings its whole file is gpunodes'. `rtcsync`
# makes it report to the kernel that the clock is synchronised (chrony.conf(5)).
_CHRONY = Spec(
    packages=(RequestedPackage("chrony"),),
    directories=("/var/lib/chrony", "/var/log/chrony"),
    users=("chrony",),
    services=(Service("chronyd"),),
)
_CHRONY_FILE = """\
# Managed by gpunodes.
{servers}driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
keyfile /etc/chrony.keys
leapsectz right/UTC
logdir /var/log/chrony
"""


def time_service(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Spec:
    """The desired state of a machine's time service; empty if another one runs, or if none is requested."""
    clock = facts.get("clock") or {}
    others = set(clock.get("services") or ()) - {clock.get("own")}
    if others or settings["gpunodes_time_service"] != INSTALL:
        return Spec()
    servers = [str(server) for server in settings["gpunodes_time_servers"] or ()]
    dnf = facts["package_manager"] == "dnf"
    return _with(_CHRONY, _chrony(servers)) if dnf else _with(_TIMESYNCD, _timesyncd(servers))


def _with(spec: Spec, files: Sequence[File]) -> Spec:
    return replace(spec, files=files)


def _timesyncd(servers: Sequence[str]) -> list[File]:
    content = f"# Managed by gpunodes.\n[Time]\nNTP={' '.join(servers)}\n"
    return [File("/etc/systemd/timesyncd.conf.d/10-gpunodes.conf", content)] if servers else []


def _chrony(servers: Sequence[str]) -> list[File]:
    lines = "".join(f"server {server} iburst\n" for server in servers)
    return [File("/etc/chrony.conf", _CHRONY_FILE.replace("{servers}", lines))] if servers else []
