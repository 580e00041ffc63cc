"""Stand-ins that several unit tests share: the facts of a good machine, and a view that records its calls."""

from __future__ import annotations

from typing import Any

from gpunodes.model import MachineResult, Phase


def facts(**changes: Any) -> dict[str, Any]:
    """The facts of a good machine, with changes."""
    good: dict[str, Any] = {
        "os": {"id": "debian", "version": "13", "codename": "trixie", "name": "Debian GNU/Linux 13 (trixie)"},
        "arch": "x86_64",
        "kernel": "6.12.48+deb13-cloud-amd64",
        "python": "3.13.5",
        "cpus": 2,
        "memory_mib": 2000,
        "disk_free_mib": 9000,
        "cgroup": 2,
        "swap": [],
        "hostname": "worker-1",
        "machine_id": "0a",
        "product_uuid": "1A",
        "boot_id": "b",
        "time": 1000.0,
        "default_address": "10.0.0.11",
        "listening": [22],
        "modules": {"overlay": "available", "br_netfilter": "available"},
        "package_manager": "apt",
        "packages": {"kubelet": None, "kubeadm": None},
        "kubernetes": {"role": None, "ca_hash": None, "server": None},
        "ledger": False,
        "sources": [],
    }
    return {**good, **changes}


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
