"""The endpoint: keepalived's configuration, who its peers are, and what preflight refuses."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.operations import endpoint_set
from gpunodes.planner import endpoint, preflight
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.desired import Desired, desired

from tests.stand_ins import facts, given

VIP = "10.0.0.10"
NODE: dict[str, Any] = {
    **dict.fromkeys(("uid", "boot_id", "machine_id", "product_uuid", "version", "runtime"), ""),
    "name": "control-1",
    "role": "control_plane",
    "address": "10.0.0.12",
    "addresses": ["10.0.0.12"],
}
FREE = {"held": False, "managed": False, "foreign": False, "others": [], "mac": "52:54:00:00:00:01", "answers": []}


def found(
    settings: endpoint.EndpointSettings, cluster: ClusterRequirements | None = None, **changes: Any
) -> list[PreflightFinding]:
    own = {"addresses": ["10.0.0.11"], "virtual_address": FREE, "gpu": {"functions": []}, **changes}
    candidate = MachineFacts("control-2", Role.CONTROL_PLANE, facts(**own), address="10.0.0.11", endpoint=settings)
    listed = preflight.judge([candidate], cluster or ClusterRequirements("1.36"))
    return [each for each in listed if each.check == "endpoint"]


def texts(*arguments: Any, **changes: Any) -> list[str]:
    return [str(each.problem) for each in found(*arguments, **changes)]


WITH_VIP = endpoint.EndpointSettings(vip=VIP)


def state(**more: Any) -> Desired | tuple[Problem, ...]:
    settings = {"gpunodes_control_plane_vip": VIP, "joins": True, "reached": "10.0.0.11", "groups": ("control_plane",)}
    return desired(given(facts(addresses=["10.0.0.11"], gpu={"functions": []}), **{**settings, **more}))


def test_keepalived_of_a_control_plane() -> None:
    made = state(control_planes=["10.0.0.11", "10.0.0.12"], api_check="the program", gpunodes_firewall="open")
    assert isinstance(made, Desired)
    spec = made.endpoint["endpoint"]
    files = {file.path: file for file in spec.files}
    config = files[endpoint.CONFIG]
    assert config.mode == "0600"
    # Without it any pod may end the address, in messages of its node.
    assert "\n    check_unicast_src\n" in config.content
    # One without others: a router of the network with the same id is in VRRP's own group, 224.0.0.18.
    assert "\n    vrrp_mcast_group4 224.0.0.254\n" in config.content
    assert "state BACKUP\n    nopreempt\n    interface eth0\n    virtual_router_id 10\n" in config.content
    assert "10.0.0.10/32 dev eth0" in config.content
    assert "auth" not in config.content
    assert files[endpoint.PEERS].content.splitlines()[1:] == ["10.0.0.12"]
    assert files[endpoint.PROGRAM].content == "the program"
    assert made.wanted["node"].firewall is not None
    assert made.wanted["node"].firewall.ports["vrrp 112"] == ["10.0.0.11", "10.0.0.12"]


@pytest.mark.parametrize("changes", [{"groups": ("workers",)}, {"gpunodes_control_plane_vip": ""}, {"joins": False}])
def test_no_keepalived_elsewhere(changes: dict[str, Any]) -> None:
    made = state(control_planes=["10.0.0.11"], **changes)
    assert isinstance(made, Desired)
    assert not made.endpoint
    firewall = made.wanted["node"].firewall
    assert firewall is not None
    # A worker's firewall lets no VRRP in; a control plane without the setting does not either.
    assert ("vrrp 112" in firewall.ports) == (changes == {"joins": False})


def test_only_the_first_control_plane_has_the_address_without_an_api() -> None:
    for first in (True, False):
        made = state(is_first=first)
        assert isinstance(made, Desired)
        content = made.endpoint["endpoint"].files[-1].content
        assert (f'{endpoint.PROGRAM} first"' in content) is first


def test_an_address_outside_of_the_network_is_refused() -> None:
    made = state(gpunodes_control_plane_vip="10.0.1.10")
    assert not isinstance(made, Desired)
    assert "(10.0.0.11/24 on eth0) does not contain 10.0.1.10" in str(made[0])


def test_the_control_planes_are_those_of_the_cluster_and_of_this_run() -> None:
    own = {"control-2": facts(addresses=["10.0.0.9"]), "control-3": {}}
    settings = {"control-2": {"gpunodes_node_address": "10.0.0.0/24"}, "control-3": {"gpunodes_node_address": ""}}
    worker = {**NODE, "role": "worker", "address": "10.0.0.50"}
    nodes = [NODE, worker, {**NODE, "address": "10.0.0.9; rm -rf /"}]
    listed = endpoint.control_planes(["control-2", "control-3"], own, settings, {"control-2": "x"}, nodes)
    assert listed == ["10.0.0.9", "10.0.0.12"]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"endpoint": "api.example:6443"}, "gpunodes_control_plane_endpoint is api.example:6443, but"),
        ({"pods": "10.0.0.0/16"}, "is in gpunodes_pod_subnet"),
        ({"services": "10.0.0.0/28"}, "is in gpunodes_service_subnet"),
    ],
)
def test_settings_that_contradict_the_virtual_address(settings: dict[str, Any], part: str) -> None:
    assert part in str(next(endpoint.conflicts(endpoint.EndpointSettings(vip=VIP, **settings))))


def test_settings_that_fit() -> None:
    assert list(endpoint.conflicts(endpoint.EndpointSettings(vip=VIP, endpoint=f"{VIP}:6443"))) == []
    assert list(endpoint.conflicts(endpoint.EndpointSettings(vip="10.0.4.0", router_id=7))) == []
    assert "last byte is 0" in str(next(endpoint.conflicts(endpoint.EndpointSettings(vip="10.0.4.0"))))


def test_a_free_address_is_no_problem() -> None:
    assert texts(WITH_VIP) == []
    assert texts(endpoint.EndpointSettings()) == []


def test_who_has_the_address_is_named() -> None:
    used = {**FREE, "answers": ["52:54:00:aa:bb:cc"]}
    assert "the host with the MAC address 52:54:00:aa:bb:cc" in texts(WITH_VIP, virtual_address=used)[0]
    # Another control plane of this run, and those of a cluster with this endpoint.
    ours = {**FREE, "answers": [FREE["mac"]]}
    assert texts(WITH_VIP, virtual_address=ours) == []
    cluster = ClusterRequirements("1.36", "sha256:0", endpoint=f"{VIP}:6443")
    assert texts(WITH_VIP, cluster, virtual_address=used) == []
    held = {**FREE, "held": True}
    assert "it has the address 10.0.0.10 without keepalived" in texts(WITH_VIP, virtual_address=held)[0]
    assert texts(WITH_VIP, virtual_address={**held, "managed": True}) == []
    assert "gpunodes did not write it" in texts(WITH_VIP, virtual_address={**FREE, "foreign": True})[0]


def test_one_virtual_address_does_not_replace_another_that_nodes_use() -> None:
    """keepalived would have the new one alone, while all nodes use the earlier one."""
    there = {**FREE, "others": ["10.0.0.9"]}
    used = ClusterRequirements("1.36", "sha256:0", endpoint="10.0.0.9:6443")
    assert "10.0.0.10 would replace 10.0.0.9" in texts(WITH_VIP, used, virtual_address=there)[0]
    left = ClusterRequirements("1.36", "sha256:0", endpoint="10.0.0.10:6443")
    assert texts(WITH_VIP, left, virtual_address=there) == []


def test_a_cluster_with_another_endpoint_is_not_changed_silently() -> None:
    cluster = ClusterRequirements("1.36", "sha256:0", endpoint="10.0.0.11:6443")
    assert "run `gpunodes endpoint set 10.0.0.10:6443`" in texts(WITH_VIP, cluster)[0]
    assert texts(endpoint.EndpointSettings(endpoint="10.0.0.11"), cluster) == []


def test_a_given_endpoint() -> None:
    settings = endpoint.EndpointSettings(endpoint="api.example")
    cluster = ClusterRequirements("1.36", "sha256:0", endpoint="api.example:6443", nodes=[NODE])
    answer = {"endpoint": "api.example:6443", "resolved": ["10.0.0.5"], "error": "", "names": ["api.example"]}
    own = {"endpoint": "10.0.0.12:6443", "resolved": ["10.0.0.12"], "error": "", "names": []}
    assert texts(settings, cluster, endpoints=[answer, own]) == []
    assert "does not resolve" in texts(settings, endpoints=[{**answer, "resolved": [], "error": "unknown"}])[0]
    down = {**answer, "error": "Connection refused"}
    assert texts(settings, endpoints=[down]) == []  # there is no API server yet
    assert "does not reach the API" in texts(settings, cluster, endpoints=[down])[0]
    assert "is not for api.example" in texts(settings, cluster, endpoints=[{**answer, "names": ["kubernetes"]}])[0]
    peer = {**own, "error": "timed out"}
    warning = found(settings, cluster, endpoints=[answer, peer])
    assert [each.severity for each in warning] == [Severity.WARNING]
    assert "does not reach the control plane at 10.0.0.12:6443" in warning[0].problem.found


def test_selinux_that_keeps_keepalived_from_its_check_is_a_warning() -> None:
    [warning] = found(WITH_VIP, virtual_address={**FREE, "confined": True})
    assert warning.severity is Severity.WARNING
    assert "setsebool -P keepalived_connect_any on" in warning.problem.remedy
    assert texts(WITH_VIP, virtual_address={**FREE, "confined": False}) == []
    assert texts(endpoint.EndpointSettings(), virtual_address={**FREE, "confined": True}) == []


def test_a_control_plane_that_was_not_probed_is_reported() -> None:
    """With a management network, SSH has other addresses than the cluster: nothing was checked, and nothing said so."""
    cluster = ClusterRequirements("1.36", "sha256:0", endpoint=f"{VIP}:6443", nodes=[NODE])
    managed = {"endpoint": "192.168.7.12:6443", "resolved": ["192.168.7.12"], "error": "timed out", "names": []}
    assert "at 10.0.0.12 was not checked" in texts(WITH_VIP, cluster, endpoints=[managed])[0]
    own = {**managed, "endpoint": "10.0.0.12:6443", "resolved": ["10.0.0.12"]}
    [warning] = found(WITH_VIP, cluster, endpoints=[managed, own])
    assert warning.severity is Severity.WARNING
    assert "does not reach the control plane at 10.0.0.12:6443" in warning.problem.found


@pytest.mark.parametrize("text", ["", "a b", "[::1]:6443", "x:0", "x:70000", "-x", "x;y", "https://x"])
def test_an_argument_that_is_no_endpoint(text: str) -> None:
    with pytest.raises(Exception, match="is no endpoint"):
        endpoint_set.parse(text)


def test_an_argument_without_a_port_gets_the_usual_one() -> None:
    assert endpoint_set.parse("10.0.0.10") == "10.0.0.10:6443"
    assert endpoint_set.parse("api.example:443") == "api.example:443"
