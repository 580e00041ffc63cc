"""Stand-ins that several unit tests share: facts of machines, what a desired state follows from, and a view."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpunodes.ansible.filter import general as filters
from gpunodes.model import MachineResult, Phase
from gpunodes.planner.desired import Given
from gpunodes.settings import defaults

NONE: dict[str, str] = {"url": "", "key": "", "fingerprint": ""}
SOURCES: dict[str, dict[str, str]] = {
    name: {part: defaults().get(f"gpunodes_{name}_packages_{part}", "") for part in NONE}
    for name in ("kubernetes", "docker", "cri_dockerd", "nvidia", "nvidia_toolkit", "debian")
}


def listener(port: int, program: str | None, unit: str | None = None, **changes: Any) -> dict[str, Any]:
    """A listening socket in the facts of a machine."""
    pid = None if program is None else 812
    found = {"protocol": "tcp", "address": "::", "port": port, "pid": pid, "program": program, "unit": unit}
    return {**found, "interface": None, **changes}


def facts(**changes: Any) -> dict[str, Any]:
    """The facts of a good machine, with changes."""
    good: dict[str, Any] = {
        "os": {"id": "debian", "version": "13", "codename": "trixie", "name": "Debian GNU/Linux 13 (trixie)"},
        "arch": "x86_64",
        "kernel": "6.12.48+deb13-cloud-amd64",
        "python": "3.13.5",
        "cpus": 2,
        "memory_mib": 2000,
        "disks": [
            {"path": path, "device": 1, "mount": "/", "free_mib": 9000}
            for path in ("/usr", "/var/lib", "/var/cache", "/boot", "/tmp")
        ],
        "data_directory": {"path": "", "problem": None},
        "clock": {"began": 1000.0, "synchronised": True, "services": ["chrony"], "own": ""},
        "cgroup": 2,
        "swap": [],
        "hostname": "worker-1",
        "machine_id": "0a",
        "product_uuid": "1A",
        "boot_id": "b",
        "time": 1000.0,
        "default_address": "10.0.0.11",
        "network": {
            "devices": [
                {"name": "lo", "addresses": ["127.0.0.1/8", "::1/128"], "udp_port": None},
                {"name": "eth0", "addresses": ["10.0.0.11/24"], "udp_port": None},
            ],
            "routes": [{"to": "10.0.0.0/24", "device": "eth0", "gateway": ""}],
            "docker_bridge": "",
        },
        "sockets": [listener(22, "sshd", "ssh.service")],
        "firewalls": [],
        "modules": {"overlay": "available", "br_netfilter": "available"},
        "package_manager": "apt",
        "packages": {"kubelet": None, "kubeadm": None},
        "kubernetes": {"role": None, "ca_hash": None, "server": None},
        "ledger": False,
        "sources": [],
    }
    return {**good, **changes}


def gpu_machine(*functions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    gpu = {"functions": list(functions), "nvswitches": 0, "nouveau": "available", "headers": {"running": True}}
    return {**facts(kernel="6.12.1", time=0, gpu=gpu, packages={}, hostname="gpu-1"), **changes}


def given(found: dict[str, Any] | None = None, *, groups: tuple[str, ...] = ("workers",), **more: Any) -> Given:
    """``more`` are settings (``gpunodes_...``) and other fields of Given."""
    settings = {name: value for name, value in more.items() if name.startswith("gpunodes_")}
    return Given(
        machine="gpu-1",
        facts=found or gpu_machine(),
        settings={**defaults(), **settings},
        sources=SOURCES,
        docker_systems=["debian 12", "rocky 9"],
        images=["flannel:1"],
        groups=groups,
        **{name: value for name, value in more.items() if name not in settings},
    )


def filtered(request: Given) -> dict[str, Any]:
    fields = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    return filters.desired(fields.pop("facts"), fields.pop("machine"), **fields)


class Silent:
    """A view that records its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.positions: list[tuple[int, int]] = []
        self.tasks: list[str] = []

    def begin(self, title: str, machines: Any) -> None:
        pass

    def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
        self.seen.append((machine, phase.name))
        self.positions.append((number, total))

    def task(self, machine: str, task: str) -> None:
        self.tasks.append(f"{machine}: {task}")

    def findings(self, findings: Any) -> None:
        pass

    def ended(self, result: MachineResult) -> None:
        pass
