"""A cluster that kubeadm made by hand: adopted, joined to, and its GPU node repaired with its kubeconfig.

The machine that joins is prepared with the others, which takes the least time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from . import by_hand, unhealthy
from .by_hand import ADOPTED, API, BY_HAND, PODS, SOURCE, connection, lab_hosts, wait_ready, write
from .conftest import LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=1, gpu_workers=1, kubernetes="1.35")
STATE = r"""
find /etc /opt /usr/local /var/lib/kubelet/config.yaml -xdev -type f ! -path /etc/resolv.conf -printf '%p %m %s %T@\n' \
  | sort
ls -d /var/lib/gpunodes 2>/dev/null; systemctl show -p ActiveEnterTimestampMonotonic kubelet containerd
"""
BOOT = "cat /proc/sys/kernel/random/boot_id"


def test_kubeadm_makes_a_cluster_by_hand(operator: Operator) -> None:
    by_hand.make(operator, "worker-1")


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
    # As its administrator left it: the hold is none of gpunodes.
    assert kept == [SOURCE, "hold ok installed"]
