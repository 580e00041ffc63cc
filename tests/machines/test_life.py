"""A small cluster's whole life on Debian 13 with the default Kubernetes: up, up again, and back to bare machines."""

from __future__ import annotations

from .conftest import BARE, STATE, Kind, Operator, lines

LAB = Kind("debian13", workers=1)
MACHINES = ("control-1", "worker-1")

_bare: dict[str, list[str]] = {}


def test_up_makes_a_cluster_of_bare_machines(operator: Operator) -> None:
    for machine in MACHINES:
        _bare[machine] = list(lines(operator.ssh(machine, BARE)))
    document = operator.document("up")
    assert {each["name"]: each["outcome"] for each in document["machines"]} == dict.fromkeys(MACHINES, "changed")
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]} == dict.fromkeys(MACHINES, True)
    assert operator.tokens() == []


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in MACHINES}
    document = operator.document("up")
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged", "unchanged"]
    assert {machine: operator.ssh(machine, STATE) for machine in MACHINES} == before


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("reset", "worker-1", "control-1", "--yes")
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == _bare[machine]
