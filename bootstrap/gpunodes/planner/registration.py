"""How the kubelet of a machine whose pool scales registers its node: complete, as it is a new one at each start. Pure.

Sources: kubernetes.io, "Kubelet Configuration (v1beta1)" (providerID, registerWithTaints), "kubelet" (--node-labels),
"Admission Controllers" (NodeRestriction).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from gpunodes.ansible.module_utils.host.spec import File, Service, Spec
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import node_software

STARTING = {"key": "gpunodes.dev/starting", "effect": "NoSchedule"}
"""Taint of a node that has registered and is not verified yet."""
_CONFIG = f"{node_software.KUBELET_CONFIG}/20-registration.conf"
_UNIT = "/etc/systemd/system/kubelet.service.d/40-gpunodes-registration.conf"
_NAME = re.compile(r"[A-Za-z0-9./_-]{1,317}")
_VALUE = re.compile(r"[A-Za-z0-9._-]{0,63}")
# The kubelet does not start with others than a few of these, and NodeRestriction refuses them.
_RESERVED = re.compile(r"([^/]*\.)?(kubernetes\.io|k8s\.io)/")


def provider_id(node: str) -> str:
    """The providerID of a node."""
    return f"gpunodes://{node}"


def conflict(machine: str, node: Mapping[str, object]) -> Problem | None:
    """Why a machine cannot belong to a pool that scales: the cluster fixes a node's providerID."""
    found = node.get("provider_id")
    if not found or found == provider_id(str(node["name"])):
        return None
    return Problem(
        f"its node has the providerID {found}, and its pool scales",
        f"none, or {provider_id(str(node['name']))}: the API never changes it",
        f"take {machine} out of the pools with max in gpunodes_pools, or remove it from the cluster and join it again",
    )


def registered(node: str, labels: Mapping[str, str], taints: Sequence[Mapping[str, str]]) -> Spec:
    """The kubelet registers ``node`` with providerID, these labels and taints, and the starting taint.

    Labels that a kubelet may not set itself are left out: they are set through the API.
    """
    document = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "providerID": provider_id(node),
        # In this list the cluster needs a value, which may be empty.
        "registerWithTaints": [{"value": "", **taint} for taint in (*taints, STARTING)],
    }
    pairs = ",".join(f"{name}={value}" for name, value in sorted(own_labels(labels).items()))
    arguments = node_software.config_arguments(f" --node-labels={pairs}" if pairs else "")
    return Spec(
        files=(
            File(_CONFIG, json.dumps(document, sort_keys=True) + "\n"),
            File(_UNIT, f"# Managed by gpunodes.\n[Service]\n{arguments}"),
        ),
        services=_KUBELET,
    )


def unregistered() -> Spec:
    """The kubelet registers its node as kubeadm configures it."""
    return Spec(absent=(_CONFIG, _UNIT), services=_KUBELET)


_KUBELET = (Service("kubelet", when_exists="/var/lib/kubelet/config.yaml", proxied=True),)


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that a kubelet may set on its own node."""
    return {
        name: value
        for name, value in labels.items()
        if _NAME.fullmatch(name) and _VALUE.fullmatch(value) and not _RESERVED.match(name)
    }
