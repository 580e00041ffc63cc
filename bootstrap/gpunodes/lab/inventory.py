"""The ordinary Ansible inventory that a lab leaves in the current folder."""

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
# Their only control plane needs no election either: it would lose its leases to any load, and restart for it. Two
# seconds for etcd to answer a health check, and 50 for a node's next word, are too short for it as well: the API server
# was killed, and the control plane's own node called lost, while workers installed packages.
_SLOW = {
    "gpunodes_kubeadm_timeouts": {"kubernetesAPICall": "5m0s", "controlPlaneComponentHealthCheck": "10m0s"},
    "gpunodes_component_arguments": {
        "apiServer": {"etcd-healthcheck-timeout": "10s", "etcd-readycheck-timeout": "10s"},
        "controllerManager": {"leader-elect": "false", "node-monitor-grace-period": "2m0s"},
        "scheduler": {"leader-elect": "false"},
    },
    # kubeadm has the control plane's pods asked every second whether they are ready, each time with a TLS handshake:
    # a fifth of what an idle one takes here.
    "gpunodes_kubeadm_patches": {
        f"{pod}0+strategic": {"spec": {"containers": [{"name": pod, "readinessProbe": {"periodSeconds": 15}}]}}
        for pod in ("etcd", "kube-apiserver", "kube-scheduler")
    },
}


def check_free(folder: Path, lab: str) -> None:
    """Refuse a folder whose inventory is not that of the lab called ``lab``.

    Raises:
        WrongInput: names the file.
    """
    for path in (folder / "hosts.yml", folder / "group_vars" / "all.yml"):
        if path.exists() and not path.read_text().startswith(_mark(lab)):
            raise WrongInput(
                f"{path} is there and lab {lab!r} did not make it",
                "a folder without an inventory",
                "change to another folder",
            )


def _mark(lab: str) -> str:
    return f"# Made by `gpunodes lab up` (lab {lab});"


def texts(layout: Layout, record: LabRecord, settings: Mapping[str, Any]) -> dict[str, str]:
    """The inventory's files, by path below its folder."""
    mark = f"{_mark(record.name)} `gpunodes lab down` removes it as long as nobody has changed it.\n"
    groups: dict[str, dict[str, dict[str, dict[str, str]]]] = {
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
        groups["gpu"] = {"hosts": gpu}
    connection = {
        "ansible_user": USER,
        "ansible_ssh_private_key_file": str(layout.ssh_key),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    hosts = {"all": {"children": groups, "vars": connection}}
    variables = {**settings, **({} if record.accelerator == "kvm" else _SLOW)}
    return {
        "hosts.yml": mark + yaml.safe_dump(hosts, sort_keys=False),
        "group_vars/all.yml": mark + yaml.safe_dump(variables, sort_keys=False),
    }


def _bmc(record: LabRecord, machine: LabMachine) -> dict[str, str]:
    """How its BMC is reached; the password is one of this lab's own."""
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
        # The BMCs' passwords are in it.
        path.touch(mode=0o600)
        path.write_text(text)
        owner.give(path)
        written[str(path)] = _hash(text)
    return written


def remove(written: Mapping[str, str]) -> list[Path]:
    """Remove what :func:`write` made; return the files that stay because somebody has changed them."""
    kept = []
    for name, known in written.items():
        path = Path(name)
        if not path.exists():
            continue
        if _hash(path.read_text()) != known:
            kept.append(path)
            continue
        path.unlink()
    for folder in sorted({Path(name).parent for name in written}, key=lambda path: -len(path.parts)):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return kept


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
