"""`gpunodes up` on Debian 12 with containerd 2.x and the Kubernetes minor before the default one."""

from __future__ import annotations

import json

from .conftest import STATE, LabSpec, Operator

LAB = LabSpec("debian12", workers=1, kubernetes="1.35")
MACHINES = ("control-1", "worker-1")
BOOT = "cat /proc/sys/kernel/random/boot_id"


def test_up_makes_a_cluster(operator: Operator) -> None:
    settings = operator.folder / "inventory" / "group_vars" / "control_plane.yml"
    settings.write_text("gpunodes_serving_certificates: true\n")
    document = operator.document("up", "--kubernetes-version", "1.35")
    assert document["schema"] == "gpunodes.run/1"
    assert {machine["name"]: machine["outcome"] for machine in document["machines"]} == dict.fromkeys(
        MACHINES, "changed"
    )
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]} == dict.fromkeys(MACHINES, True)
    assert {node["version"].rpartition(".")[0] for node in status["nodes"]} == {"v1.35"}
    assert operator.ssh("worker-1", "containerd --version").split()[2].startswith("v2.")
    assert operator.tokens() == []


def test_kubelets_serve_with_certificates_of_the_cluster(operator: Operator) -> None:
    """The service on the control plane approves each node's own request; the API server verifies the certificates."""
    requests = json.loads(operator.kubectl("get", "certificatesigningrequests", "-o", "json"))["items"]
    serving = [one for one in requests if one["spec"]["signerName"] == "kubernetes.io/kubelet-serving"]
    decided = {(one["spec"]["username"], one["status"]["conditions"][0]["type"]) for one in serving}
    assert decided == {(f"system:node:{machine}", "Approved") for machine in MACHINES}
    for machine in MACHINES:
        assert operator.ssh(machine, "ls /var/lib/kubelet/pki/kubelet-server-current.pem")
    # The API server reads logs from the kubelets, and accepts only these certificates.
    pods = operator.kubectl("-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-proxy", "-o", "name").split()
    assert len(pods) == len(MACHINES)
    for pod in pods:
        assert operator.kubectl("-n", "kube-system", "logs", "--tail=1", pod)


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in MACHINES}
    document = operator.document("up", "--kubernetes-version", "1.35")
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged", "unchanged"]
    assert {machine: operator.ssh(machine, STATE) for machine in MACHINES} == before


def test_a_join_upgrades_nothing(operator: Operator) -> None:
    # The default version is newer than the cluster's, which applies here.
    document = operator.document("join", "worker-1")
    assert document["machines"][0]["outcome"] == "unchanged"
    assert operator.ssh("worker-1", "dpkg-query -W -f '${Version}' kubelet").startswith("1.35.")


def test_a_machine_is_switched_off_and_on_with_its_node(operator: Operator) -> None:
    """By hand: its pods leave, its system shuts down, no repair switches it on, and it serves again when it is well."""
    before = operator.ssh("worker-1", BOOT)
    operator.gpunodes("power", "worker-1", "off", "--drain", "--yes")
    machines = json.loads(operator.lab("status", "--json").stdout)["machines"]
    assert {each["name"]: each["power"] for each in machines} == {"control-1": "on", "worker-1": "off"}
    assert "switched off by" in operator.gpunodes("maintenance", "list").stdout
    repaired = operator.gpunodes("health", "worker-1", "--reboot-hung", "--yes", code=None)
    assert "switched off by" in repaired.stdout + repaired.stderr
    assert operator.document("power", "worker-1", "status")["state"] == "off"
    node = ("get", "node", "worker-1", "-o", "jsonpath={.spec.unschedulable}")
    assert operator.kubectl(*node).strip() == "true"
    # Once more changes nothing.
    operator.gpunodes("power", "worker-1", "off", "--drain", "--yes")
    operator.gpunodes("power", "worker-1", "on", "--wait", "--yes")
    assert operator.ssh("worker-1", BOOT) != before
    assert operator.kubectl(*node).strip() == ""
    assert "worker-1" not in operator.gpunodes("maintenance", "list").stdout
    # Its shutdown was an orderly one: the journal of that boot ends with it.
    ended = operator.ssh("worker-1", "journalctl -b -1 -n 60 --no-pager -o cat")
    assert "Reached target" in ended, ended
