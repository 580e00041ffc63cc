"""`gpunodes up` on Debian 12 with containerd 2.x and the Kubernetes minor before the default one."""

from __future__ import annotations

from .conftest import STATE, Kind, Operator

LAB = Kind("debian12", workers=1, kubernetes="1.35")
MACHINES = ("control-1", "worker-1")


def test_up_makes_a_cluster(operator: Operator) -> None:
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


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in MACHINES}
    document = operator.document("up", "--kubernetes-version", "1.35")
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged", "unchanged"]
    assert {machine: operator.ssh(machine, STATE) for machine in MACHINES} == before


def test_a_join_upgrades_nothing(operator: Operator) -> None:
    # The default version is newer than this cluster's: the cluster's own counts.
    document = operator.document("join", "worker-1")
    assert document["machines"][0]["outcome"] == "unchanged"
    assert operator.ssh("worker-1", "dpkg-query -W -f '${Version}' kubelet").startswith("1.35.")
