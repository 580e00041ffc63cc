"""The address of a machine in its cluster: which one it is, and the sentences for those that it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from gpunodes.ansible.filter import general as filters
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import node_address
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.preflight import judge

from tests.stand_ins import facts, filtered, given, gpu_machine

TWO = ["192.168.7.11", "10.0.0.11"]
"""A machine with a management network, on which the default route is, and a fast one."""


def two_networks(role: str | None = None, **changes: Any) -> dict[str, Any]:
    kubernetes = {"role": role, "ca_hash": None, "server": None}
    return facts(**{"default_address": TWO[0], "addresses": TWO, "kubernetes": kubernetes, **changes})


def address(requested: str = "", reached: str = "gpu-1", node: str = "", **changes: Any) -> str | Problem:
    found = two_networks(**changes)
    return node_address.chosen(
        node_address.Addresses("gpu-1", requested, reached, found, {"address": node} if node else {})
    )


@pytest.mark.parametrize(
    ("requested", "reached", "expected"),
    [
        ("", "gpu-1", TWO[0]),
        ("", "10.0.0.11", "10.0.0.11"),
        ("", "192.168.7.11", "192.168.7.11"),
        # A floating address, a forwarded port, and SSH over IPv6.
        ("", "203.0.113.5", TWO[0]),
        ("", "127.0.0.1", TWO[0]),
        ("", "2001:db8::11", TWO[0]),
        ("10.0.0.11", "192.168.7.11", "10.0.0.11"),
        (" 10.0.0.11 ", "gpu-1", "10.0.0.11"),
        ("10.0.0.0/24", "gpu-1", "10.0.0.11"),
        ("10.0.0.99/24", "gpu-1", "10.0.0.11"),
        ("192.168.0.0/16", "10.0.0.11", "192.168.7.11"),
    ],
)
def test_the_address_of_a_new_machine(requested: str, reached: str, expected: str) -> None:
    assert address(requested, reached) == expected


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        (
            "10.0.0.12",
            (
                "it does not have the address 10.0.0.12 of gpunodes_node_address (it has 192.168.7.11, 10.0.0.11); "
                "wanted: one of its addresses, or a network that contains one of them; correct "
                "gpunodes_node_address in the inventory"
            ),
        ),
        ("172.16.0.0/12", "it does not have an address in the network 172.16.0.0/12 of gpunodes_node_address"),
        (
            "0.0.0.0/0",
            (
                "it has 2 addresses in the network 0.0.0.0/0 of gpunodes_node_address (192.168.7.11, 10.0.0.11); "
                "wanted: one address in it; set gpunodes_node_address to one of them, or to a smaller network"
            ),
        ),
        ("fd00::/64", "gpunodes_node_address is 'fd00::/64'; wanted: an IPv4 address of the machine"),
        ("{{ later }}", "gpunodes_node_address is '{{ later }}'; wanted: an IPv4 address of the machine"),
        ("10.0.0.11\nfoo", "gpunodes_node_address is '10.0.0.11\\nfoo'"),
    ],
)
def test_an_address_that_it_cannot_have(requested: str, sentence: str) -> None:
    found = address(requested)
    assert isinstance(found, Problem)
    assert str(found).startswith(sentence)


@pytest.mark.parametrize("default", [None, "", "fd00::11", "dead:beef"])
def test_a_machine_without_an_ipv4_address(default: str | None) -> None:
    found = address(reached="2001:db8::11", default_address=default, addresses=[])
    assert isinstance(found, Problem)
    assert "it has no IPv4 default route" in found.found
    assert "clusters with IPv6 are not supported" in found.wanted


@pytest.mark.parametrize("role", ["worker", "control_plane"])
def test_a_node_keeps_its_address(role: str) -> None:
    """Nodes that joined before this setting existed have the address that the kubelet chose."""
    joined: dict[str, Any] = {"role": role, "node": "192.168.7.11"}
    assert address(reached="10.0.0.11", **joined) == "192.168.7.11"
    assert address("192.168.7.11", **joined) == "192.168.7.11"
    assert address("192.168.7.0/24", **joined) == "192.168.7.11"
    # A second address of the network, such as a floating one, does not matter to a node that has joined.
    assert address("0.0.0.0/0", **joined) == "192.168.7.11"


def test_the_address_of_a_node_cannot_be_changed() -> None:
    found = address("10.0.0.0/24", role="worker", node="192.168.7.11")
    assert str(found) == (
        "gpunodes_node_address selects 10.0.0.11, but it joined with the address 192.168.7.11; wanted: the address "
        "with which it joined: an address cannot be changed in a cluster; correct gpunodes_node_address, or run "
        "`gpunodes remove gpu-1`, then join it again"
    )
    control = address("10.0.0.11", role="control_plane", node="192.168.7.11")
    assert isinstance(control, Problem)
    assert "run `gpunodes remove gpu-1`, then join it again; if it is the only control plane, make a" in control.remedy
    assert "`gpunodes reset gpu-1`, which destroys" in control.remedy


def test_a_control_plane_is_recognised_without_its_api() -> None:
    """A stopped API server is started again at its own address; its certificate has no other."""
    kubernetes = {"role": "control_plane", "ca_hash": None, "server": None, "advertised": "192.168.7.11"}
    assert address(reached="10.0.0.11", kubernetes=kubernetes) == "192.168.7.11"
    assert isinstance(address("10.0.0.11", kubernetes=kubernetes), Problem)
    # The API and the kubelet have different addresses: either is refused, neither is moved.
    assert isinstance(address("192.168.7.11", kubernetes=kubernetes, node="10.0.0.11"), Problem)
    assert address(kubernetes=kubernetes, node="10.0.0.11") == "192.168.7.11"


def test_the_node_of_an_interrupted_join_does_not_count() -> None:
    assert address("10.0.0.11", node="192.168.7.11") == "10.0.0.11"


def judged(
    requested: str, found: Mapping[str, Any], *, reached: str = "gpu-1", joins: bool = True, **node: Any
) -> list[PreflightFinding]:
    nodes = [{"name": "worker-1", "machine_id": "0a", "product_uuid": "1a", "role": "worker", **node}] if node else []
    machine = MachineFacts("gpu-1", Role.WORKER, found, address=reached, node_address=requested)
    return judge([machine], ClusterRequirements("1.36", nodes=nodes, joins=joins))


def test_preflight_reports_it_before_anything_is_changed() -> None:
    [finding] = judged("10.0.0.12", two_networks())
    assert (finding.check, finding.severity) == ("address", Severity.ERROR)
    assert judged("10.0.0.11", two_networks()) == []
    # Software for GPUs needs no address in a cluster.
    assert judged("10.0.0.12", two_networks(), joins=False) == []
    assert judged("", facts(default_address=None), joins=False) == []


def test_preflight_finds_the_node_of_a_machine() -> None:
    worker = two_networks("worker", boot_id="b7", hostname="worker-1")
    node: dict[str, Any] = {"boot_id": "b7", "address": "192.168.7.11", "addresses": ["192.168.7.11"]}
    assert judged("192.168.7.0/24", worker, **node) == []
    [finding] = judged("10.0.0.11", worker, **node)
    assert (
        finding.problem.found == "gpunodes_node_address selects 10.0.0.11, but it joined with the address 192.168.7.11"
    )


def test_a_lost_address_is_a_warning() -> None:
    worker = two_networks("worker", boot_id="b7", hostname="worker-1", addresses=["192.168.7.12"], default_address=None)
    node: dict[str, Any] = {"boot_id": "b7", "address": "192.168.7.11", "addresses": ["192.168.7.11"]}
    [finding] = judged("", worker, **node)
    assert (finding.check, finding.severity) == ("address", Severity.WARNING)
    assert (
        finding.problem.found == "it joined with the address 192.168.7.11, which it no longer has (it has 192.168.7.12)"
    )


@pytest.mark.parametrize(("role", "refused"), [("control_plane", True), ("worker", False)])
def test_no_machine_joins_a_cluster_with_ipv6(role: str, refused: bool) -> None:
    """Only the control plane decides: a worker that reports an IPv6 address must not stop all joins."""
    node: dict[str, Any] = {"boot_id": "x", "machine_id": "ff", "product_uuid": "ff", "name": "other", "role": role}
    found = judged("", two_networks(), **node, address="10.0.0.1", addresses=["10.0.0.1", "fd00::1", "other"])
    assert [finding.problem.found for finding in found] == (
        ["the control plane of its cluster has the address fd00::1"] if refused else []
    )
    # A machine that is a node already stays as it is.
    assert judged("", two_networks("worker", hostname="w"), **node, addresses=["fd00::1"]) == []


def test_the_desired_state_has_the_address_of_a_node() -> None:
    machine = gpu_machine(addresses=TWO, default_address=TWO[0])
    assert filtered(given(machine, reached="10.0.0.11", joins=True))["node_address"] == "10.0.0.11"
    assert filtered(given(machine, reached="10.0.0.11"))["node_address"] == ""
    assert filtered(given(machine, joins=True, gpunodes_node_address="10.0.0.0/8"))["node_address"] == "10.0.0.11"
    with pytest.raises(AnsibleFilterError, match=r"gpu-1: it does not have the address 10\.9\.9\.9"):
        filtered(given(machine, joins=True, gpunodes_node_address="10.9.9.9"))
    # Without --skip-phase preflight, and with it: never a guess instead of what was requested.
    assert filtered(given(machine, gpunodes_node_address="10.9.9.9"))["node_address"] == ""


def test_plain_ansible_reports_the_same() -> None:
    requested: dict[str, Any] = {
        "gpunodes_driver_branch": "",
        "gpunodes_driver_source": "",
        "gpunodes_cuda_versions": [],
    }
    requested |= {"gpunodes_cudnn_version": "", "gpunodes_runtime": "containerd", "gpunodes_feature_gates": {}}
    requested["gpunodes_node_address"] = "10.0.0.12"
    arguments = ({"gpu-1": two_networks()}, {"gpu-1": "worker"}, None, "1.36", {"gpu-1": requested})
    [line] = filters.preflight(*arguments, {"gpu-1": "10.0.0.11"}, joins=True)
    assert line.startswith("gpu-1: address: it does not have the address 10.0.0.12")
    assert filters.preflight(*arguments, {"gpu-1": "10.0.0.11"}, joins=False) == []
