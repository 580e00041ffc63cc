"""A cluster that kubeadm made by hand is adopted and upgraded to the next minor of Kubernetes."""

from __future__ import annotations

import json
import stat

from . import by_hand, unhealthy
from .by_hand import ADOPTED, BY_HAND, connection, lab_hosts, wait_ready, write
from .conftest import LONG, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=0, gpu_workers=1, kubernetes="1.35", up_options=("--kubernetes-version", "1.36"))
# What an upgrade leaves as it is. Its own source has another name than that of the administrator. apt may release the
# holds of what it replaces.
THEIRS = r"""
apt-mark showhold
sha256sum /etc/containerd/config.toml /etc/apt/sources.list.d/kubernetes.sources
ls -A /etc/systemd/system/kubelet.service.d; ls -d /etc/gpunodes 2>/dev/null
grep -c -e audit -e encryption-provider /etc/kubernetes/manifests/kube-apiserver.yaml 2>/dev/null; true
"""


def versions(operator: Operator) -> dict[str, str]:
    """The version of each node's kubelet."""
    shown = r"""jsonpath={range .items[*]}{.metadata.name} {.status.nodeInfo.kubeletVersion}{"\n"}{end}"""
    pairs = (line.partition(" ") for line in lines(operator.kubectl("get", "nodes", "-o", shown)))
    return {name: version for name, _, version in pairs}


def test_a_cluster_that_kubeadm_made_by_hand_is_adopted(operator: Operator) -> None:
    by_hand.make(operator)
    write(operator, ADOPTED)
    address = lab_hosts(operator)["control-1"]["ansible_host"]
    operator.gpunodes("adopt", address, "--yes", *connection(operator), "-i", ADOPTED)
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
