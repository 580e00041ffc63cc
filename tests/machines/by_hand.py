"""A cluster that kubeadm made by hand, for tests of clusters that others made.

The packages, with the driver of the stand-in GPUs, are those of `prepare`, whose ledger and files of the kubelet are
deleted: nothing on the machines says that gpunodes was there. The network add-on is a bridge with routes, which
gpunodes does not know.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from . import own_network, unhealthy
from .conftest import LONG, Operator

BY_HAND = ("control-1", "gpu-1")
ALONE, ADOPTED, API = "alone/hosts.yml", "adopted/hosts.yml", "api/hosts.yml"
PODS = "10.50.0.0/16"
FOLDER = "/root/by-hand"
SOURCE = "/etc/apt/sources.list.d/kubernetes.sources"
# kubeadm gives a runtime two seconds, which are too few under load, and has changed nothing then. docs/lab.md has the
# other error of a slow machine.
KUBEADM = f"""
set -e
rm -rf /var/lib/gpunodes /etc/gpunodes /etc/systemd/system/kubelet.service.d/*gpunodes*
sed -i '1s/.*/# By hand./' /etc/containerd/config.toml
cd /etc/apt
mv keyrings/gpunodes-kubernetes.asc keyrings/kubernetes.asc
mv sources.list.d/gpunodes-kubernetes.sources sources.list.d/kubernetes.sources
sed -i 's/gpunodes-kubernetes/kubernetes/' sources.list.d/kubernetes.sources
systemctl daemon-reload
systemctl enable kubelet
left=5
until kubeadm %s --config={FOLDER}/kubeadm.yaml >{FOLDER}/log 2>&1; do
    left=$((left - 1))
    if grep -q 'could not bootstrap the admin user' {FOLDER}/log; then kubeadm reset --force >/dev/null 2>&1
    elif ! grep -q 'ERROR CRI' {FOLDER}/log; then left=0; fi
    if [ $left -eq 0 ]; then tail -n 50 {FOLDER}/log >&2; exit 1; fi
    sleep 5
done
"""


def of_lab(operator: Operator) -> dict[str, Any]:
    """The group `all` of the lab's inventory."""
    found: dict[str, Any] = yaml.safe_load((operator.folder / "inventory/hosts.yml").read_text())["all"]
    return found


def lab_hosts(operator: Operator) -> dict[str, dict[str, Any]]:
    """The machines of the lab with their variables."""
    groups = of_lab(operator)["children"].values()
    return {name: host for group in groups for name, host in (group.get("hosts") or {}).items() if host}


def lab_settings(operator: Operator) -> dict[str, Any]:
    """The settings of all machines in the lab's inventory."""
    found: dict[str, Any] = yaml.safe_load((operator.folder / "inventory/group_vars/all.yml").read_text())
    return found


def write(operator: Operator, name: str, groups: Mapping[str, Sequence[str]] | None = None) -> None:
    """A folder for an inventory, with the lab's settings; with ``groups``, the inventory of these and nothing else."""
    path = operator.folder / name
    (path.parent / "group_vars").mkdir(parents=True, exist_ok=True)
    # A kubelet of another minor starts its static pods again, all at once. The controllers end while there is no API
    # server, and the kubelet waits up to 5 minutes before it starts them again.
    patience = {"gpunodes_ready_timeout": 1800}
    settings = {**lab_settings(operator), **unhealthy.SINGLE_MACHINE_SETTINGS, **patience}
    (path.parent / "group_vars/all.yml").write_text(yaml.safe_dump(settings))
    if groups:
        hosts = lab_hosts(operator)
        found = {group: {"hosts": {each: hosts[each] for each in names}} for group, names in groups.items()}
        path.write_text(yaml.safe_dump({**found, "all": {"vars": of_lab(operator)["vars"]}}))


def connection(operator: Operator) -> list[str]:
    found = of_lab(operator)["vars"]
    return ["--user", found["ansible_user"], "--key", found["ansible_ssh_private_key_file"]]


def wait_ready(operator: Operator, names: set[str], limit_s: float = 900.0) -> None:
    ready = r"""jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}"""
    deadline = time.monotonic() + limit_s
    while True:
        found = operator.kubectl("get", "nodes", "-o", ready, code=None)
        if names <= {line.split()[0] for line in found.splitlines() if line.endswith(" True")}:
            return
        assert time.monotonic() < deadline, found
        time.sleep(5)


def kubeadm(operator: Operator, machine: str, verb: str, *documents: dict[str, Any]) -> None:
    """Run kubeadm on a machine, with the limits and patches of the lab's settings: emulated machines are slow."""
    slow = lab_settings(operator)
    first = {**documents[0], "timeouts": slow.get("gpunodes_kubeadm_timeouts", {})}
    files = {}
    if verb == "init":
        first["patches"] = {"directory": f"{FOLDER}/patches"}
        patches = slow.get("gpunodes_kubeadm_patches", {})
        files = {f"patches/{name}.json": json.dumps(each) for name, each in patches.items()}
    api = {"apiVersion": "kubeadm.k8s.io/v1beta4"}
    files["kubeadm.yaml"] = "\n---\n".join(json.dumps({**api, **each}) for each in (first, *documents[1:]))
    script = "".join(f"cat >{FOLDER}/{name} <<'END'\n{text}\nEND\n" for name, text in files.items())
    operator.ssh(machine, f"mkdir -m 700 {FOLDER} && mkdir {FOLDER}/patches\n{script}")
    operator.ssh(machine, KUBEADM % verb, limit_s=LONG)


def cluster(operator: Operator) -> dict[str, Any]:
    """kubeadm's ClusterConfiguration: its defaults, and the arguments for slow machines."""
    arguments = lab_settings(operator).get("gpunodes_component_arguments", {})
    components = {
        component: {"extraArgs": [{"name": name, "value": value} for name, value in given.items()]}
        for component, given in arguments.items()
    }
    version = operator.ssh("control-1", "kubeadm version -o short").strip()
    return {
        "kind": "ClusterConfiguration",
        "kubernetesVersion": version,
        "networking": {"podSubnet": PODS},
        **components,
    }


def make(operator: Operator, *others: str) -> None:
    """Make a cluster of the machines BY_HAND with kubeadm; ``others`` are prepared with them."""
    write(operator, ALONE, {"control_plane": ["control-1"], "workers": ["gpu-1", *others]})
    older = ("--kubernetes-version", "1.35")
    operator.gpunodes("prepare", *BY_HAND, *others, "-i", ALONE, *older, *unhealthy.DRIVER, limit_s=3000)
    kubeadm(operator, "control-1", "init", {"kind": "InitConfiguration"}, cluster(operator))
    words = operator.ssh("control-1", "kubeadm token create --print-join-command").split()
    assert words[:2] == ["kubeadm", "join"]
    token, ca = (words[words.index(each) + 1] for each in ("--token", "--discovery-token-ca-cert-hash"))
    found = {"token": token, "apiServerEndpoint": words[2], "caCertHashes": [ca]}
    kubeadm(operator, "gpu-1", "join", {"kind": "JoinConfiguration", "discovery": {"bootstrapToken": found}})
    addresses = {name: lab_hosts(operator)[name]["ansible_host"] for name in BY_HAND}
    for name in BY_HAND:
        own_network.bridge(operator, name, addresses)
    wait_ready(operator, set(BY_HAND))
