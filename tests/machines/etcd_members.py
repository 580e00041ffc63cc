"""The members of etcd on machines of the lab, and inventories with some of its control planes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from .conftest import Operator, lines

FIRST, SECOND, THIRD = CONTROLS = ("cp-1", "cp-2", "cp-3")
# The programs' own limits, 2 and 5 seconds, are too short for an emulated machine that pulls images.
CRICTL = "crictl --runtime-endpoint=unix:///run/containerd/containerd.sock --timeout=30s"
PKI = "/etc/kubernetes/pki/etcd"
ETCDCTL = (
    f"{CRICTL} exec $({CRICTL} ps --quiet --label io.kubernetes.container.name=etcd) etcdctl "
    f"--cacert={PKI}/ca.crt --cert={PKI}/server.crt --key={PKI}/server.key --command-timeout=60s --write-out=json"
)
VIP = "gpunodes_control_plane_vip"
KUBECTL = "kubectl --kubeconfig /etc/kubernetes/admin.conf"
SECRETS = f"{KUBECTL} --namespace kube-system get secrets --output name"


def members(operator: Operator, machine: str = FIRST) -> dict[str, Mapping[str, Any]]:
    """The members of etcd by name; "" is one that has not started."""
    listed = json.loads(operator.ssh(machine, f"{ETCDCTL} member list"))["members"]
    return {each.get("name", ""): each for each in listed}


def voters(operator: Operator, machine: str = FIRST) -> set[str]:
    return {name for name, each in members(operator, machine).items() if not each.get("isLearner")}


def leftovers(operator: Operator, machine: str = FIRST) -> list[str]:
    """Uploaded certificates and bootstrap tokens."""
    found = lines(operator.ssh(machine, SECRETS))
    return [name for name in found if "kubeadm-certs" in name or "bootstrap-token" in name]


def regroup(operator: Operator, *controls: str) -> None:
    """Leave only these machines in the group control_plane."""
    path = operator.folder / "inventory/hosts.yml"
    saved = operator.folder / "all-hosts.yml"
    if not saved.exists():
        saved.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    found = yaml.safe_load(saved.read_text(encoding="utf-8"))
    group = found["all"]["children"]["control_plane"]
    group["hosts"] = {name: group["hosts"][name] for name in controls}
    path.write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


def with_vip(operator: Operator, address: str) -> str:
    """Set the virtual address in the inventory, "" removes it; returns the earlier one."""
    path = operator.folder / "inventory/group_vars/all.yml"
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    before = str(settings.pop(VIP, ""))
    path.write_text(yaml.safe_dump({**settings, **({VIP: address} if address else {})}), encoding="utf-8")
    return before


def leader(operator: Operator) -> str:
    """The member that leads, as the first control plane's member knows it."""
    status = json.loads(operator.ssh(FIRST, f"{ETCDCTL} endpoint status"))
    return next(name for name, each in members(operator).items() if each["ID"] == status[0]["Status"]["leader"])
