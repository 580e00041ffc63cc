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


def started_with(taints: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The taints with which a node registers; in this list the cluster needs a value, which may be empty."""
    return [{"value": "", **taint} for taint in (*taints, STARTING)]


def registered(
    node: str, labels: Mapping[str, str], taints: Sequence[Mapping[str, str]], *, without_bmc: bool = False
) -> Spec:
    """The kubelet registers ``node`` with providerID, these labels and taints, and the starting taint.

    Labels that a kubelet may not set itself are left out: they are set through the API. A machine ``without_bmc`` shuts
    itself down when its node is marked for that, with the rights of its kubelet: nobody needs to log in for it.
    """
    document = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "providerID": provider_id(node),
        "registerWithTaints": started_with(taints),
    }
    pairs = ",".join(f"{name}={value}" for name, value in sorted(own_labels(labels).items()))
    arguments = node_software.config_arguments(f" --node-labels={pairs}" if pairs else "")
    return Spec(
        files=(
            File(_CONFIG, json.dumps(document, sort_keys=True) + "\n"),
            File(_UNIT, f"# Managed by gpunodes.\n{_WANTS if without_bmc else ''}[Service]\n{arguments}"),
            *((File(_OFF_UNIT, _OFF_SERVICE), File(_OFF, _off_program(node), "0755")) if without_bmc else ()),
        ),
        absent=() if without_bmc else (_OFF_UNIT, _OFF),
        services=_KUBELET,
    )


def unregistered() -> Spec:
    """The kubelet registers its node as kubeadm configures it."""
    return Spec(absent=(_CONFIG, _UNIT, _OFF_UNIT, _OFF), services=_KUBELET)


_KUBELET = (Service("kubelet", when_exists="/var/lib/kubelet/config.yaml", proxied=True),)


_OFF = "/usr/local/sbin/gpunodes-power-off"
_OFF_UNIT = "/etc/systemd/system/gpunodes-power-off.service"
_WANTS = "[Unit]\nWants=gpunodes-power-off.service\n"
_OFF_SERVICE = f"""\
# Managed by gpunodes.
[Unit]
Description=Shuts this machine down when its node is marked for that
After=network-online.target
[Service]
ExecStart=/usr/bin/python3 {_OFF}
Restart=on-failure
RestartSec=30
MemoryMax=64M
Nice=10
"""


def _off_program(node: str) -> str:
    """The program of a machine without a BMC. It ends when its file is gone: nothing else stops it then."""
    return f"""\
# Managed by gpunodes. Shuts this machine down when its node has the id of this boot in gpunodes.dev/power-off.
import json
import os
import re
import ssl
import subprocess
import time
import urllib.request

NODE = {json.dumps(node)}
PKI = "/var/lib/kubelet/pki/kubelet-client-current.pem"


def marked():
    with open("/etc/kubernetes/kubelet.conf") as file:
        server = re.search("server: *(https://.*)", file.read())[1].strip()
    context = ssl.create_default_context(cafile="/etc/kubernetes/pki/ca.crt")
    context.load_cert_chain(PKI)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({{}}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(f"{{server}}/api/v1/nodes/{{NODE}}", timeout=20) as response:
        return json.load(response)["metadata"].get("annotations", {{}}).get("gpunodes.dev/power-off")


with open("/proc/sys/kernel/random/boot_id") as file:
    boot = file.read().strip()
while os.path.exists(__file__):
    try:
        if marked() == boot:
            subprocess.run(["systemctl", "poweroff"])
    except Exception as error:
        print(error, flush=True)
    time.sleep(10)
"""


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that a kubelet may set on its own node."""
    return {
        name: value
        for name, value in labels.items()
        if _NAME.fullmatch(name) and _VALUE.fullmatch(value) and not _RESERVED.match(name)
    }
