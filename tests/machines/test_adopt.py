"""A cluster that kubeadm made by hand: adopted, joined to, upgraded, and its GPU node repaired with its kubeconfig.

The packages, with the driver of the stand-in GPUs, are those of `prepare`, whose ledger and files of the kubelet are
deleted: nothing on the machines says that gpunodes was there. The network add-on is a bridge with routes, which
gpunodes does not know. The machine that joins is prepared with the others, which takes the least time.
"""

from __future__ import annotations

import dataclasses
import json
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from . import own_network, unhealthy
from .conftest import LONG, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=1, gpu_workers=1, kubernetes="1.35", up_options=("--kubernetes-version", "1.36"))
BY_HAND = ("control-1", "gpu-1")
ALONE, ADOPTED, API = "alone/hosts.yml", "adopted/hosts.yml", "api/hosts.yml"
PODS = "10.50.0.0/16"
STATE = r"""
find /etc /opt /usr/local /var/lib/kubelet/config.yaml -xdev -type f ! -path /etc/resolv.conf -printf '%p %m %s %T@\n' \
  | sort
ls -d /var/lib/gpunodes 2>/dev/null; systemctl show -p ActiveEnterTimestampMonotonic kubelet containerd
"""
# What an upgrade leaves as it is. Its own source has another name than that of the administrator.
THEIRS = r"""
sha256sum /etc/containerd/config.toml /etc/apt/sources.list.d/kubernetes.sources
ls -A /etc/systemd/system/kubelet.service.d; ls -d /etc/gpunodes 2>/dev/null
grep -c -e audit -e encryption-provider /etc/kubernetes/manifests/kube-apiserver.yaml 2>/dev/null; true
"""
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
BOOT = "cat /proc/sys/kernel/random/boot_id"


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


def versions(operator: Operator) -> dict[str, str]:
    """The version of each node's kubelet."""
    shown = r"""jsonpath={range .items[*]}{.metadata.name} {.status.nodeInfo.kubeletVersion}{"\n"}{end}"""
    pairs = (line.partition(" ") for line in lines(operator.kubectl("get", "nodes", "-o", shown)))
    return {name: version for name, _, version in pairs}


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


def test_kubeadm_makes_a_cluster_by_hand(operator: Operator) -> None:
    write(operator, ALONE, {"control_plane": ["control-1"], "workers": ["gpu-1", "worker-1"]})
    older = ("--kubernetes-version", "1.35")
    operator.gpunodes("prepare", *LAB.machines, "-i", ALONE, *older, *unhealthy.DRIVER, limit_s=3000)
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


def test_it_is_looked_at_and_not_changed(operator: Operator) -> None:
    before = operator.each(BY_HAND, STATE)
    write(operator, ADOPTED)
    address = lab_hosts(operator)["control-1"]["ansible_host"]
    found = operator.document("adopt", address, "--yes", *connection(operator), "-i", ADOPTED)
    assert operator.each(BY_HAND, STATE) == before
    rows = {(row["machine"], row["what"]): row for row in found["rows"]}
    assert rows[None, "network of pods"]["found"] == PODS
    assert rows[None, "network add-on"]["result"] == "differs"
    assert rows["gpu-1", "container runtime"]["result"] == "as gpunodes has it"
    # kubeadm alone makes no audit log, and encrypts no Secrets.
    settings = [row["found"] for row in found["rows"] if row["what"] == "settings" and row["machine"] == "control-1"]
    assert any("--audit-policy-file" in each for each in settings), found["rows"]
    assert not [row for row in found["rows"] if row["result"] == "must be changed"], found["rows"]
    document = yaml.safe_load((operator.folder / ADOPTED).read_text())
    assert document["all"]["vars"]["gpunodes_network"] == "none"
    assert set(document["control_plane"]["hosts"]) == {"control-1"}
    assert set(document["workers"]["hosts"]) == {"gpu-1"}
    again = operator.gpunodes("adopt", address, "--yes", *connection(operator), "-i", ADOPTED, code=2)
    assert "exists already" in again.stderr


def test_a_machine_joins_and_leaves(operator: Operator) -> None:
    address = lab_hosts(operator)["worker-1"]["ansible_host"]
    operator.gpunodes("join", address, *connection(operator), "-i", ADOPTED, "--skip-phase", "ready")
    assert "worker-1" in operator.kubectl("get", "nodes", "-o", "name")
    assert "flannel" not in operator.kubectl("get", "daemonsets", "-A", "-o", "name")
    operator.gpunodes("remove", "--yes", address, "-i", ADOPTED)
    assert "worker-1" not in operator.kubectl("get", "nodes", "-o", "name")
    # The join has added it to the inventory, where an upgrade would miss its node.
    path = operator.folder / ADOPTED
    document = yaml.safe_load(path.read_text())
    document["workers"]["hosts"] = {"gpu-1": document["workers"]["hosts"]["gpu-1"]}
    path.write_text(yaml.safe_dump(document))


def test_the_gpus_of_a_node_are_served(operator: Operator) -> None:
    """The first thing that it lacks: NVIDIA's device plugin. Its driver is there. The command verifies a pod's GPU."""
    operator.gpunodes("gpu", "install", "gpu-1", "-i", ADOPTED, *unhealthy.DRIVER, "--no-reboot")


def test_it_is_upgraded_and_stays_as_its_administrator_configured_it(operator: Operator) -> None:
    before = operator.each(BY_HAND, THEIRS)
    plan = operator.document("upgrade", "plan", "1.36", "-i", ADOPTED)
    assert [(step["machine"], step["part"]) for step in plan["steps"]] == [
        ("control-1", "control_plane"),
        ("control-1", "node"),
        ("gpu-1", "node"),
    ]
    found = json.loads(operator.gpunodes("upgrade", "1.36", "--yes", "--json", "-i", ADOPTED, limit_s=3 * LONG).stdout)
    outcomes = [{each["name"]: each["outcome"] for each in rollout["machines"]} for rollout in found["rollouts"]]
    # The last part, the add-ons, is no machine's.
    assert outcomes == [{"control-1": "done"}, {"control-1": "done", "gpu-1": "done"}, {}]
    wait_ready(operator, set(BY_HAND))
    assert versions(operator) == dict.fromkeys(BY_HAND, f"v{plan['target']}")
    server = json.loads(operator.kubectl("get", "--raw", "/version"))
    assert server["gitVersion"] == f"v{plan['target']}"
    # A backup of a control plane that gpunodes did not make.
    [backup] = operator.folder.glob("gpunodes-backup-*")
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert operator.each(BY_HAND, THEIRS) == before
    assert "flannel" not in operator.kubectl("get", "daemonsets", "-A", "-o", "name")
    # So that a reset goes on refusing them.
    ledgers = operator.each(BY_HAND, "cat /var/lib/gpunodes/ledger.json")
    assert {json.loads("".join(each))["kubeadm"] for each in ledgers.values()} == {""}
    [machine] = operator.document("gpu", "verify", "gpu-1", "-i", ADOPTED)["machines"]
    assert {level["level"]: level["state"] for level in machine["levels"]} == dict.fromkeys(
        ("host", "container", "kubelet", "pod"), "ok"
    )


def test_addresses_need_no_inventory(operator: Operator) -> None:
    """In a folder without one. The public package sources, which the lab does not reach, are no matter of a verdict."""
    address = lab_hosts(operator)["gpu-1"]["ansible_host"]
    empty = dataclasses.replace(operator, folder=operator.folder / "empty")
    empty.folder.mkdir()
    found = empty.document("health", address, *connection(operator))["machines"]
    assert [(each["name"], each["state"], each["gpus"]["seen"]) for each in found] == [(address, "healthy", 2)]
    [plan] = empty.document("gpu", "plan", address, *connection(operator), code=None)["machines"]
    assert plan["name"] == address
    assert not plan["unreachable"]
    checked = empty.document("preflight", address, *connection(operator), code=None)
    assert checked["findings"] is not None
    assert list(empty.folder.iterdir()) == []


def test_its_gpu_node_is_repaired_with_its_kubeconfig(operator: Operator) -> None:
    """The inventory has no control plane."""
    path = Path(operator.folder) / "cluster.conf"
    path.touch(mode=0o600)
    path.write_text(operator.ssh("control-1", "cat /etc/kubernetes/admin.conf"))
    write(operator, API, {"workers": BY_HAND})
    words = ["--yes", "--kubeconfig", str(path), "-i", API]
    before = operator.ssh("gpu-1", BOOT)
    unhealthy.hang(operator)
    unhealthy.wait_for(operator, "gpu-1", ["reboot"])
    unhealthy.repaired(operator.document("health", "gpu-1", "--reboot-hung", *words))
    assert operator.ssh("gpu-1", BOOT) != before
    wait_ready(operator, set(BY_HAND))
    assert {"RepairStarted", "RepairEnded"} <= unhealthy.events(operator)
    assert "SchedulingDisabled" not in operator.kubectl("get", "nodes")
    assert "gpunodes-machine" not in operator.kubectl("-n", "kube-system", "get", "leases", "-o", "name")


def test_the_node_that_kubeadm_joined_is_removed(operator: Operator) -> None:
    """The reset of a machine that gpunodes did not join, which the command `reset` refuses."""
    done = operator.gpunodes("reset", "--yes", "gpu-1", "-i", ADOPTED, code=1)
    assert "gpunodes did not create it" in done.stdout + done.stderr
    operator.gpunodes("remove", "--yes", "gpu-1", "-i", ADOPTED)
    assert lines(operator.kubectl("get", "nodes", "-o", "name")) == ["node/control-1"]
    left = "/etc/kubernetes/kubelet.conf /etc/kubernetes/pki /var/lib/kubelet/config.yaml /var/lib/gpunodes"
    assert operator.ssh("gpu-1", f"ls -d {left} 2>/dev/null", code=None) == ""
    kept = lines(operator.ssh("gpu-1", f"ls {SOURCE}; dpkg-query --show --showformat='${{Status}}' kubelet"))
    # As it was before the upgrade replaced it.
    assert kept == [SOURCE, "hold ok installed"]
