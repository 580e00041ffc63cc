"""The control planes with which a run would end: their number, their endpoint, and the election of leaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from gpunodes.model import Role, Severity
from gpunodes.planner import control_planes
from gpunodes.planner.candidates import MachineFacts, requirements_of

from tests.stand_ins import facts

PIN = "sha256:" + "0" * 64
VIP = "10.0.0.100:6443"


def machine(number: int, role: str | None = None, *, member: bool = False) -> MachineFacts:
    name = f"cp-{number}"
    kubernetes = {"role": role, "ca_hash": PIN if role else None, "server": None, "advertised": None}
    own = facts(hostname=name, kubernetes=kubernetes, addresses=[f"10.0.0.{number}", "10.0.0.100"])
    node = {"name": name} if member else {}
    return MachineFacts(name, Role.CONTROL_PLANE, own, address=f"10.0.0.{number}", node=node)


def member(number: int) -> MachineFacts:
    return machine(number, "control_plane", member=True)


def cluster(members: Sequence[int], endpoint: str = VIP) -> Mapping[str, Any]:
    nodes = [{"name": f"cp-{each}", "role": "control_plane", "address": f"10.0.0.{each}"} for each in members]
    worker = {"name": "worker-1", "role": "worker", "address": "10.0.0.50"}
    return {"version": "v1.36.3", "ca_hash": PIN, "endpoint": endpoint, "nodes": [*nodes, worker]}


def judged(
    candidates: Sequence[MachineFacts],
    known: Mapping[str, Any] | None = None,
    growth: str = "up",
    endpoint: str = VIP,
    **more: Any,
) -> list[tuple[str, Severity, str]]:
    machines = {each.name: each.address for each in candidates}
    arguments = more.pop("arguments", {})
    controls = control_planes.given(
        machines, (known or {}).get("endpoint", endpoint), arguments, growth, leader_election=more.pop("elects", True)
    )
    requirements = requirements_of(known, "1.36", control_planes=controls, **more)
    found = control_planes.judge(candidates, requirements)
    return [(each.machine, each.severity, str(each.problem)) for each in found]


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_odd_numbers(size: int) -> None:
    assert judged([machine(number) for number in range(1, size + 1)], endpoint="" if size == 1 else VIP) == []


@pytest.mark.parametrize(
    ("size", "severity", "message"),
    [
        (2, Severity.ERROR, "would have 2 control planes, of which it may lose none"),
        (4, Severity.WARNING, "may lose one, as with 3"),
        (6, Severity.WARNING, "may lose two, as with 5"),
        (8, Severity.ERROR, "would have 8 control planes; wanted: at most 7"),
    ],
)
def test_other_numbers(size: int, severity: Severity, message: str) -> None:
    ((name, found, text),) = judged([machine(number) for number in range(1, size + 1)])
    assert (name, found) == (f"cp-{size}", severity)
    assert message in text


def test_a_join_passes_through_two() -> None:
    """Growth from one to three, and the replacement of a machine, do."""
    ((_, severity, text),) = judged([machine(2)], cluster([1]), "join")
    assert severity is Severity.WARNING
    assert "would have 2" in text
    assert judged([machine(2), machine(3)], cluster([1]), "join") == []
    assert judged([machine(3)], cluster([1, 2]), "join") == []


def test_a_cluster_of_two_is_still_brought_up_to_date() -> None:
    ((_, severity, text),) = judged([member(1), member(2)], cluster([1, 2]))
    assert severity is Severity.WARNING
    assert "has 2 control planes" in text


def test_eight_are_not_refused_where_nothing_joins() -> None:
    every = list(range(1, 9))
    assert [severity for _, severity, __ in judged([member(each) for each in every], cluster(every))] == [
        Severity.WARNING
    ]


@pytest.mark.parametrize(
    ("endpoint", "refused"),
    [
        ("10.0.0.1:6443", "10.0.0.1 is that of the control plane cp-1 alone"),
        ("cp-1:6443", "cp-1 is that of the control plane cp-1 alone"),
        ("CP-1", "cp-1 is that of the control plane cp-1 alone"),
        ("10.0.0.2:6443", "10.0.0.2 is that of the control plane cp-2 alone"),
        ("", "would be the control plane cp-1"),
        # Also where one of them has it at the moment.
        ("10.0.0.100:6443", ""),
        ("10.0.0.100", ""),
        ("api.example:6443", ""),
    ],
)
def test_the_endpoint_outlives_each_machine(endpoint: str, refused: str) -> None:
    found = judged([machine(1), machine(2), machine(3)], endpoint=endpoint)
    assert [severity for _, severity, __ in found] == ([Severity.ERROR] if refused else [])
    if refused:
        assert refused in found[0][2]
        assert "gpunodes_control_plane_vip" in found[0][2]
        assert "`gpunodes endpoint set ADDRESS:6443`" in found[0][2]


def test_the_endpoint_of_an_existing_cluster() -> None:
    found = judged([machine(2), machine(3)], cluster([1], "10.0.0.1:6443"), "join")
    assert "10.0.0.1 is that of the control plane cp-1 alone" in found[0][2]
    # A cluster of one may have its own address; nothing joins.
    assert judged([member(1)], cluster([1], "10.0.0.1:6443")) == []


@pytest.mark.parametrize("component", ["controllerManager", "scheduler"])
@pytest.mark.parametrize("value", ["false", "False", False, "0"])
def test_leader_election_is_on(component: str, value: object) -> None:
    arguments = {component: {"leader-elect": value}}
    found = judged([machine(1), machine(2), machine(3)], arguments=arguments)
    assert "leader election is off" in found[0][2]
    assert judged([machine(1)], arguments=arguments, endpoint="") == []
    on = {component: {"leader-elect": "true"}, "apiServer": {"leader-elect": "false"}}
    assert judged([machine(1), machine(2), machine(3)], arguments=on) == []


def test_leader_election_of_the_running_cluster() -> None:
    assert "leader election is off" in judged([machine(2), machine(3)], cluster([1]), "join", elects=False)[0][2]
    assert judged([member(1)], cluster([1]), elects=False) == []


def test_no_second_cluster_beside_one_that_does_not_respond() -> None:
    """cp-1 was replaced; the others have the cluster."""
    found = judged([machine(1), machine(2, "control_plane"), machine(3, "control_plane")])
    assert [name for name, severity, text in found if "does not respond" in text] == ["cp-2", "cp-3"]
    assert judged([machine(1, "control_plane"), machine(2), machine(3)]) == []


def test_init_master_creates_no_second_cluster() -> None:
    ((name, severity, text),) = judged([machine(1)], cluster([2, 3]), "")
    assert (name, severity) == ("cp-1", Severity.ERROR)
    assert "`gpunodes join cp-1`" in text
    assert judged([machine(1, "control_plane")], cluster([]), "") == []


def test_other_runs_are_not_concerned() -> None:
    two = [machine(1), machine(2)]
    assert judged(two, joins=False) == []
    assert judged(two, prepares=True) == []
