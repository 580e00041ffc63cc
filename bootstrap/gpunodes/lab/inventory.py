"""The Ansible inventory that ``lab up`` writes to the current folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput
from gpunodes.lab import bmc
from gpunodes.lab.host import Owner
from gpunodes.lab.layout import USER, LabMachine, LabRecord, LabRole, Layout

# Emulated machines are ten times slower than those that kubeadm's defaults are meant for (kubeadm v1beta4, Timeouts).
# An only control plane needs no leader election either: under load it would lose its leases and restart. Of several one
# must lead: their leases are longer, and so are etcd's limits. The defaults of 2 seconds for etcd's health check and 50
# for a node's heartbeat are too short as well: while workers installed packages, the API server was killed and the
# control plane's own node was marked lost.
_API_SERVER = {"etcd-healthcheck-timeout": "10s", "etcd-readycheck-timeout": "10s"}
_NO_ELECTION = {"leader-elect": "false"}
_LONG_LEASES = {
    "leader-elect-lease-duration": "60s",
    "leader-elect-renew-deadline": "45s",
    "leader-elect-retry-period": "15s",
}
_GRACE = {"node-monitor-grace-period": "2m0s"}
# In milliseconds.
_SLOW_ETCD = {"heartbeat-interval": "500", "election-timeout": "5000"}
# On a control plane that joins beside others etcd starts only after minutes; its API server waits for that, and its
# kubelet gets a certificate from this API server (kubeadm 1.36 cmd/join.go). The defaults are 2 and 5 minutes, 20 for
# the whole join, and 15 for its token.
_JOIN_LIMITS = {"etcdAPICall": "10m0s", "tlsBootstrap": "15m0s"}
_JOIN_S = 2400
_PROBE_PERIOD = 15
_VIP_INTERVAL = 2
"""Seconds between two messages of the holder of the virtual address."""


def _slow(*, several: bool) -> dict[str, Any]:
    """Settings for emulated machines."""
    election = _LONG_LEASES if several else _NO_ELECTION
    # kubeadm probes the readiness of the control plane's pods every second, each time with a TLS handshake: a fifth of
    # the processor time of an idle control plane here. Liveness every 10 seconds matters only with several.
    probes = ("readinessProbe", "livenessProbe") if several else ("readinessProbe",)
    patched = dict.fromkeys(("etcd", "kube-apiserver", "kube-scheduler"), probes)
    if several:
        patched["kube-controller-manager"] = ("livenessProbe",)
    return {
        "gpunodes_kubeadm_timeouts": {
            "kubernetesAPICall": "10m0s",
            "controlPlaneComponentHealthCheck": "10m0s",
            "upgradeManifests": "15m0s",
            **(dict(_JOIN_LIMITS) if several else {}),
        },
        "gpunodes_component_arguments": {
            "apiServer": dict(_API_SERVER),
            "controllerManager": election | _GRACE,
            "scheduler": dict(election),
            **({"etcd": dict(_SLOW_ETCD)} if several else {}),
        },
        "gpunodes_kubeadm_patches": {
            f"{pod}0+strategic": {
                "spec": {"containers": [{"name": pod, **{probe: {"periodSeconds": _PROBE_PERIOD} for probe in each}}]}
            }
            for pod, each in patched.items()
        },
        **(_of_several() if several else {}),
    }


def _of_several() -> dict[str, Any]:
    return {
        "gpunodes_control_plane_vip_interval": _VIP_INTERVAL,
        "gpunodes_kubeadm_limit": _JOIN_S,
        "gpunodes_join_token_ttl": _JOIN_S,
    }


def check_free(folder: Path, lab: str) -> None:
    """Refuse a folder with an inventory that lab ``lab`` did not write.

    Raises:
        WrongInput: names the file.
    """
    for path in (folder / "hosts.yml", folder / "group_vars" / "all.yml"):
        if path.exists() and not path.read_text().startswith(_mark(lab)):
            raise WrongInput(
                f"{path} exists and lab {lab!r} did not make it",
                "a folder without an inventory",
                "change to another folder",
            )


def _mark(lab: str) -> str:
    return f"# Made by `gpunodes lab up` (lab {lab});"


def texts(layout: Layout, record: LabRecord, settings: Mapping[str, Any]) -> dict[str, str]:
    """The inventory's files, by path below its folder."""
    mark = f"{_mark(record.name)} `gpunodes lab down` removes it unless you change it.\n"
    groups: dict[str, dict[str, dict[str, Any]]] = {
        role.value: {
            "hosts": {
                each.name: {"ansible_host": each.address, **_bmc(record, each)}
                for each in record.machines
                if each.role is role
            }
        }
        for role in LabRole
    }
    gpu: dict[str, dict[str, str]] = {each.name: {} for each in record.machines if each.boards}
    if gpu:
        groups["gpu"] = {"hosts": gpu, "vars": {"gpunodes_pool": "gpu"}}
    connection = {
        "ansible_user": USER,
        "ansible_ssh_private_key_file": str(layout.ssh_key),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    hosts = {"all": {"children": groups, "vars": connection}}
    variables = dict(settings)
    if record.virtual_address:
        variables["gpunodes_control_plane_vip"] = record.virtual_address
    if record.accelerator != "kvm":
        variables |= _slow(several=record.virtual_address is not None)
    return {
        "hosts.yml": mark + yaml.safe_dump(hosts, sort_keys=False),
        "group_vars/all.yml": mark + yaml.safe_dump(variables, sort_keys=False),
    }


def _bmc(record: LabRecord, machine: LabMachine) -> dict[str, str]:
    """Variables for access to its BMC; the password is random and valid in this lab only."""
    return {
        "gpunodes_bmc_type": "redfish",
        "gpunodes_bmc_address": bmc.url(record, machine),
        "gpunodes_bmc_user": bmc.USER,
        "gpunodes_bmc_password": machine.bmc_password,
    }


def write(folder: Path, files: Mapping[str, str], owner: Owner) -> dict[str, str]:
    """Write the files as ``owner``'s; return each path and the hash of its content, for :func:`remove`."""
    written = {}
    for name, text in files.items():
        path = folder / name
        for parent in reversed(path.relative_to(folder.parent).parents):
            directory = folder.parent / parent
            if not directory.is_dir():
                directory.mkdir()
                owner.give(directory)
        # It holds the BMCs' passwords.
        path.touch(mode=0o600)
        path.write_text(text)
        owner.give(path)
        written[str(path)] = _hash(text)
    return written


def remove(written: Mapping[str, str]) -> list[Path]:
    """Remove what :func:`write` made; return the files that are kept because they were changed."""
    kept = []
    for name, expected in written.items():
        path = Path(name)
        if not path.exists():
            continue
        if _hash(path.read_text()) != expected:
            kept.append(path)
            continue
        path.unlink()
    for folder in sorted({Path(name).parent for name in written}, key=lambda path: -len(path.parts)):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return kept


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
