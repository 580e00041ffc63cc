"""Preflight of ranges, ports and firewalls, and what a node's firewall lets through."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from gpunodes.ansible.filter import general as filters
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import firewall, networks, ports, reports
from gpunodes.planner.candidates import ClusterRequirements, ControlPlanes, MachineFacts
from gpunodes.planner.endpoint import EndpointSettings
from gpunodes.planner.networks import NetworkSettings
from gpunodes.planner.preflight import judge
from gpunodes.settings import defaults

from tests.stand_ins import facts, filtered, given, gpu_machine, listener

SETTINGS = NetworkSettings(pods="10.244.0.0/16", services="10.96.0.0/12")
NODE = {"role": "worker", "ca_hash": "sha256:aa", "server": None}
INTERRUPTED = {"role": None, "ca_hash": None, "server": None, "unfinished": True}


def network(
    *addresses: tuple[str, str], routes: tuple[tuple[str, str, str], ...] = (), bridge: str = ""
) -> dict[str, Any]:
    return {
        "devices": [{"name": name, "addresses": [address], "udp_port": None} for name, address in addresses],
        "routes": [{"to": to, "device": device, "gateway": gateway} for to, device, gateway in routes],
        "docker_bridge": bridge,
    }


def found(
    changes: Mapping[str, Any],
    settings: NetworkSettings = SETTINGS,
    role: Role = Role.WORKER,
    ca_hash: str | None = None,
    nodes: tuple[Mapping[str, Any], ...] = (),
    controls: Mapping[str, str] | None = None,
    vip: str = "",
) -> list[tuple[str, Severity, str, str]]:
    machine = MachineFacts("worker-1", role, facts(**changes), network=settings, endpoint=EndpointSettings(vip=vip))
    requirements = ClusterRequirements("1.36", ca_hash, nodes, control_planes=ControlPlanes(controls or {}))
    return of_the_network(judge([machine], requirements))


def of_the_network(findings: Sequence[PreflightFinding]) -> list[tuple[str, Severity, str, str]]:
    own = {"ranges", "ports", "firewall", "network"}
    return [
        (each.check, each.severity, each.problem.fact, each.problem.remedy) for each in findings if each.check in own
    ]


def test_a_good_network_passes() -> None:
    assert found({}) == []
    assert found({}, role=Role.CONTROL_PLANE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"network": network(("eth1", "10.244.3.7/24"))},
            "gpunodes_pod_subnet 10.244.0.0/16 overlaps the address 10.244.3.7/24 of eth1",
        ),
        (
            {"network": network(("eth0", "10.0.0.5/8"))},
            "gpunodes_service_subnet 10.96.0.0/12 overlaps the address 10.0.0.5/8",
        ),
        (
            {"network": network(routes=(("10.100.1.0/24", "eth0", "10.0.0.1"),))},
            "the route to 10.100.1.0/24 through 10.0.0.1 of eth0",
        ),
        ({"network": network(routes=(("10.244.0.0/16", "wg0", ""),))}, "the route to 10.244.0.0/16 of wg0"),
    ],
)
def test_an_address_or_route_in_a_range_is_refused_with_its_device(changes: dict[str, Any], words: str) -> None:
    ((check, severity, fact, remedy),) = found(changes)
    assert (check, severity) == ("ranges", Severity.ERROR)
    assert words in fact
    assert "set gpunodes_" in remedy


def test_a_route_of_another_table_is_named_with_its_table() -> None:
    changed = network(("eth0", "10.0.0.11/24"))
    changed["routes"] = [{"to": "10.244.7.0/24", "device": "eth1", "gateway": "10.9.0.1", "table": "100"}]
    assert reports.machine_problem(facts(gpu={"functions": []}, network=changed)) == ""
    ((_, severity, fact, _),) = found({"network": changed})
    assert severity is Severity.ERROR
    assert "overlaps the route to 10.244.7.0/24 through 10.9.0.1 of eth1 (table 100)" in fact


def test_one_sentence_names_all_overlaps_of_a_machine() -> None:
    many = network(*((f"eth{number}", f"10.244.{number}.1/24") for number in range(7)))
    ((_, _, fact, _),) = found({"network": many})
    assert "eth0" in fact
    assert "and 3 more" in fact


def test_the_network_of_an_address_is_not_reported_again_as_its_route() -> None:
    both = network(("eth1", "10.244.3.7/24"), routes=(("10.244.3.0/24", "eth1", ""),))
    ((_, _, fact, _),) = found({"network": both})
    assert "route" not in fact


def test_a_route_to_a_larger_network_is_a_warning_and_a_default_route_is_none() -> None:
    wide = network(("eth0", "10.0.0.11/24"), routes=(("10.0.0.0/8", "eth0", "10.0.0.1"),))
    ((check, severity, fact, _),) = found({"network": wide})
    assert (check, severity) == ("ranges", Severity.WARNING)
    assert "10.0.0.0/8" in fact


OWN = network(
    ("cni0", "10.244.1.1/24"), ("flannel.1", "10.244.1.0/32"), ("kube-ipvs0", "10.96.0.1/32"),
    ("docker0", "10.244.9.1/24"),
    routes=(("10.244.2.0/24", "flannel.1", "10.244.2.0"), ("10.244.1.0/24", "cni0", "")),
)  # fmt: skip


@pytest.mark.parametrize("kubernetes", [NODE, INTERRUPTED])
def test_what_the_cluster_made_on_a_node_does_not_count(kubernetes: dict[str, Any]) -> None:
    assert found({"network": OWN, "kubernetes": kubernetes}) == []


def test_what_an_earlier_cluster_left_behind_counts_and_the_remedy_removes_it() -> None:
    ((_, severity, _, remedy),) = found({"network": OWN})
    assert severity is Severity.ERROR
    assert "`ip link delete cni0; ip link delete flannel.1;" in remedy


def test_an_overlap_on_a_node_is_a_warning_and_a_cluster_s_ranges_stay() -> None:
    changes = {"network": network(("eth1", "10.244.3.7/24"))}
    ((_, severity, _, _),) = found({**changes, "kubernetes": NODE})
    assert severity is Severity.WARNING
    ((_, severity, _, remedy),) = found(changes, ca_hash="sha256:aa")
    assert severity is Severity.ERROR
    assert "cannot be changed" in remedy


def test_ranges_that_overlap_each_other_are_refused() -> None:
    docker = NetworkSettings(pods="172.16.0.0/12", services="10.96.0.0/12", runtime="docker")
    ((check, severity, fact, _),) = found({}, docker)
    assert (check, severity) == ("ranges", Severity.ERROR)
    assert "172.16.0.0/12 overlaps the range of Docker's bridge 172.17.0.0/16" in fact
    assert found({"network": network(bridge="192.168.200.1/24")}, docker) == []
    assert found({}, NetworkSettings(pods="172.16.0.0/12", services="10.96.0.0/12")) == []
    assert "10.97.0.0/16" in found({}, NetworkSettings(pods="10.97.0.0/16", services="10.96.0.0/12"))[0][2]


def test_docker_s_bridge_must_not_take_the_address_of_another_machine() -> None:
    nodes = ({"name": "control-1", "address": "172.17.3.4"},)
    docker = NetworkSettings("10.244.0.0/16", "10.96.0.0/12", runtime="docker")
    ((_, _, fact, remedy),) = found({}, docker, nodes=nodes)
    assert "172.17.3.4 of control-1" in fact
    assert "daemon.json" in remedy
    assert found({"network": network(("docker0", "192.168.7.1/24"))}, docker, nodes=nodes) == []
    assert found({}, nodes=nodes) == []


def test_ipv6_ranges_are_compared_too() -> None:
    both = NetworkSettings(pods="10.244.0.0/16,fd00:244::/56", services="10.96.0.0/12")
    ((_, _, fact, _),) = found({"network": network(("eth0", "fd00:244::5/64"))}, both)
    assert "fd00:244::/56" in fact


# Ports


@pytest.mark.parametrize(
    ("socket", "role", "words"),
    [
        (listener(10250, "nginx", "nginx.service"), Role.WORKER, "nginx (pid 812, nginx.service)"),
        (listener(10256, "python3", "session-4.scope"), Role.WORKER, "tcp 10256 is in use by python3"),
        (listener(10250, "kubelet", "k3s.service"), Role.WORKER, "kubelet (pid 812, k3s.service)"),
        (listener(10250, "k3s-agent", "k3s-agent.service"), Role.WORKER, "k3s-agent"),
        (listener(6443, "kube-apiserver", None), Role.CONTROL_PLANE, "kube-apiserver (pid 812)"),
        (listener(2379, "etcd", "etcd.service"), Role.CONTROL_PLANE, "etcd.service"),
        (listener(8472, None, protocol="udp", interface="vxlan7"), Role.WORKER, "the network interface vxlan7"),
        (listener(8472, None, protocol="udp"), Role.WORKER, "in use by the kernel"),
    ],
)
@pytest.mark.parametrize("kubernetes", [{"role": None, "ca_hash": None, "server": None}, NODE])
def test_a_port_that_something_else_holds_is_refused_on_nodes_too(
    kubernetes: dict[str, Any], socket: dict[str, Any], role: Role, words: str
) -> None:
    ((check, severity, fact, remedy),) = found({"sockets": [socket], "kubernetes": kubernetes}, role=role)
    assert (check, severity) == ("ports", Severity.ERROR)
    assert words in fact
    assert remedy


def test_the_cluster_s_own_listeners_do_not_count_wherever_they_run() -> None:
    own = [
        listener(
            port.first, port.listener or None, port.unit or None, protocol=port.protocol, interface=port.device or None
        )
        for port in ports.of(Role.CONTROL_PLANE)
        if port.from_ != "clients" and port.protocol != "vrrp"
    ]
    assert found({"sockets": own}, role=Role.CONTROL_PLANE) == []


def test_ports_of_the_other_protocol_or_role_are_free() -> None:
    assert (
        found({"sockets": [listener(10250, "x", protocol="udp"), listener(6443, "haproxy"), listener(8472, "x")]}) == []
    )


def test_a_holder_of_several_sockets_is_named_once() -> None:
    both = [listener(10250, "nginx", "nginx.service"), listener(10250, "nginx", "nginx.service", address="::")]
    ((_, _, fact, _),) = found({"sockets": both})
    assert fact.count("nginx (") == 1


def test_a_program_among_the_node_ports_is_a_warning() -> None:
    ((check, severity, fact, _),) = found({"sockets": [listener(31000, "java", "app.service")]})
    assert (check, severity) == ("ports", Severity.WARNING)
    assert "tcp 31000 is in use by java" in fact
    assert found({"sockets": [listener(31000, "java", "pods"), listener(32768, "java")]}) == []


def test_each_row_of_the_table_is_complete() -> None:
    for port in ports.all_ports():
        assert port.protocol in {"tcp", "udp"} or port.text == "vrrp 112"
        assert port.on in {"node", "control_plane", "storage"}
        assert port.from_ in firewall.WHO
        assert 0 < port.first <= port.last < 1 << 16
        assert port.purpose
        assert not port.listener or port.unit or port.listener == "sshd"


# Firewalls


def test_what_a_node_s_firewall_lets_through() -> None:
    rules = firewall.wanted(Role.CONTROL_PLANE, ["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"], "10.244.0.0/16")
    machines = ["10.0.0.1", "10.0.0.2", "fd00::1"]
    assert rules.ports == {"tcp 6443": [], "tcp 10250": [*machines, "10.244.0.0/16"], "udp 8472": machines}
    assert list(rules.devices) == ["cni0", "flannel.1"]
    assert "tcp 6443" not in firewall.wanted(Role.WORKER, machines, "10.244.0.0/16").ports


def test_several_control_planes_reach_each_others_etcd() -> None:
    machines, controls = ["10.0.0.1", "10.0.0.2", "10.0.0.9"], ["10.0.0.2", "cp-1", "10.0.0.1"]
    ports = firewall.wanted(Role.CONTROL_PLANE, machines, "", controls).ports
    assert ports["tcp 2379"] == ports["tcp 2380"] == ["10.0.0.1", "10.0.0.2"]
    assert not {"tcp 2379", "tcp 2380"} & set(firewall.wanted(Role.WORKER, machines, "", controls).ports)
    assert "tcp 2380" not in firewall.wanted(Role.CONTROL_PLANE, machines, "", ["cp-1"]).ports


def test_no_port_of_the_nodes_is_opened_to_everyone() -> None:
    """A rule without sources has no restriction."""
    hostile = [
        str(ipaddress.IPv4Address(0)),
        "::",
        "0.0.0.0/0",
        "x; accept",
        "",
        "gpu-1.example",
        "127.0.0.1",
        "169.254.1.1",
        "ff02::1",
    ]
    rules = firewall.wanted(Role.WORKER, hostile, "")
    assert rules.ports == {}
    assert rules.sources == []
    assert {
        port for port, sources in firewall.wanted(Role.CONTROL_PLANE, hostile, "").ports.items() if not sources
    } == {"tcp 6443"}


def active(name: str, *, open_: tuple[str, ...] = ("22/tcp",), writable: bool = True) -> dict[str, Any]:
    chains = ["inet filter input", "inet filter forward"] if name == "nftables" else []
    return {"firewalls": [{"name": name, "open": list(open_), "writable": writable, "chains": chains}]}


@pytest.mark.parametrize("name", ["ufw", "firewalld", "nftables"])
def test_a_firewall_that_gpunodes_opens_is_no_finding(name: str) -> None:
    assert found(active(name)) == []


def test_a_firewall_whose_rules_would_not_last_is_refused_with_the_commands() -> None:
    nodes = ({"name": "control-1", "address": "10.0.0.1"},)
    ((check, severity, fact, remedy),) = found(active("nftables", writable=False), nodes=nodes)
    assert (check, severity) == ("firewall", Severity.ERROR)
    assert "inet filter input" in fact
    assert "`nft insert rule inet filter input ip saddr { 10.0.0.1 } udp dport 8472 accept`" in remedy
    assert "filter forward" not in remedy
    ((_, _, _, remedy),) = found(active("iptables", writable=False), nodes=nodes)
    assert "`iptables -I INPUT -p udp -s 10.0.0.1 --dport 8472 -j ACCEPT`" in remedy


def test_a_firewall_in_which_the_ports_are_open_already_is_no_finding() -> None:
    assert found(active("iptables", open_=("10000-11000/tcp", "8472"), writable=False)) == []
    assert found(active("iptables", open_=("*",), writable=False)) == []
    assert found({**active("iptables", writable=False), "kubernetes": NODE}) == []


def test_with_leave_preflight_names_the_ports_that_seem_closed() -> None:
    leave = NetworkSettings("10.244.0.0/16", "10.96.0.0/12", firewall="leave")
    ((check, severity, fact, _),) = found(active("ufw", open_=("6443/tcp", "10250/udp")), leave, Role.CONTROL_PLANE)
    assert (check, severity) == ("firewall", Severity.WARNING)
    assert "tcp 10250 (from all machines of the cluster, and pods), udp 8472" in fact
    # It is the only control plane: nobody else reaches its etcd.
    assert not any(port in fact for port in ("6443", "2379", "2380", "vrrp", "2049"))
    assert found(active("ufw", open_=("10250/tcp", "8472/udp")), leave) == []
    assert found(active("iptables", writable=False), leave)[0][1] is Severity.WARNING


MEMBERS = {"control-1": "10.0.0.1", "worker-1": "10.0.0.11"}
USUAL = ("6443/tcp", "10250/tcp", "8472/udp")


def test_ports_between_control_planes_are_in_the_findings_of_firewalls() -> None:
    closed = active("iptables", open_=USUAL, writable=False)
    ((_, severity, fact, remedy),) = found(closed, role=Role.CONTROL_PLANE, controls=MEMBERS)
    assert severity is Severity.ERROR
    assert "it opens no tcp 2379, tcp 2380" in fact
    assert "`iptables -I INPUT -p tcp -s 10.0.0.1 --dport 2379 -j ACCEPT`" in remedy
    nodes = tuple({"name": f"control-{each}", "address": f"10.0.0.{each}", "role": "control_plane"} for each in (1, 2))
    ((_, _, _, remedy),) = found(closed, role=Role.CONTROL_PLANE, nodes=nodes, ca_hash="sha256:aa")
    assert "-s 10.0.0.1,10.0.0.2 --dport 2380" in remedy
    leave = NetworkSettings("10.244.0.0/16", "10.96.0.0/12", firewall="leave")
    ((_, severity, fact, _),) = found(active("ufw", open_=USUAL), leave, Role.CONTROL_PLANE, controls=MEMBERS)
    assert severity is Severity.WARNING
    assert "mentions tcp 2379 (from the other control planes), tcp 2380" in fact
    assert found(active("ufw", open_=(*USUAL, "2379-2380")), leave, Role.CONTROL_PLANE, controls=MEMBERS) == []
    assert found(closed, controls=MEMBERS) == []  # a worker has no etcd


def test_vrrp_is_in_the_findings_of_firewalls_with_a_virtual_address() -> None:
    usual = (*USUAL, "2379-2380")
    closed = active("iptables", open_=usual, writable=False)
    ((_, _, fact, remedy),) = found(closed, role=Role.CONTROL_PLANE, controls=MEMBERS, vip="10.0.0.100")
    assert "it opens no vrrp 112" in fact
    assert "`iptables -I INPUT -p vrrp -s 10.0.0.1 -j ACCEPT`" in remedy
    for opened, count in (("112/vrrp", 0), ("*", 0), ("112", 1)):
        rules = active("iptables", open_=(*usual, opened), writable=False)
        assert len(found(rules, role=Role.CONTROL_PLANE, controls=MEMBERS, vip="10.0.0.100")) == count
    assert found(closed, role=Role.CONTROL_PLANE, controls=MEMBERS) == []


def test_the_port_of_shares_is_in_the_findings_of_the_firewall_of_their_server() -> None:
    serves = NetworkSettings("10.244.0.0/16", "10.96.0.0/12", firewall="leave", storage=True)
    ((_, _, fact, _),) = found(active("ufw", open_=USUAL), serves)
    assert "mentions tcp 2049 (from all machines of the cluster)" in fact
    assert found(active("ufw", open_=(*USUAL, "2049/tcp")), serves) == []


def test_a_machine_alone_is_told_the_ports_without_commands() -> None:
    ((_, _, _, remedy),) = found(active("iptables", open_=("10250/tcp",), writable=False))
    assert remedy == "open these ports where these rules are kept, then set gpunodes_firewall to leave"


def second_network(name: str, last: int, **changes: Any) -> MachineFacts:
    """A machine with its default route in one network, and its address in the cluster in another."""
    own = facts(
        hostname=name,
        machine_id=name,
        product_uuid=name,
        default_address=f"192.168.0.{last}",
        addresses=[f"192.168.0.{last}", f"10.10.0.{last}"],
        **changes,
    )
    return MachineFacts(
        name, Role.WORKER, own, address=f"192.168.0.{last}", node_address="10.10.0.0/16", network=SETTINGS
    )


def test_commands_for_a_firewall_name_the_addresses_in_the_cluster() -> None:
    closed = active("nftables", open_=("10250/tcp",), writable=False)
    machines = [second_network("gpu-1", 11, **closed), second_network("gpu-2", 12)]
    ((_, _, _, remedy),) = of_the_network(judge(machines, ClusterRequirements("1.36")))
    assert "`nft insert rule inet filter input ip saddr { 10.10.0.12 } udp dport 8472 accept`" in remedy
    # gpu-2 is a node, which keeps its address, and has another name in the cluster.
    node = {"name": "gpu-2.example", "address": "10.10.0.12", "role": "worker", "machine_id": "gpu-2", "boot_id": "b",
            "product_uuid": "gpu-2"}  # fmt: skip
    there = {"role": "worker", "ca_hash": "sha256:aa", "server": None}
    machines[1] = second_network("gpu-2", 12, kubernetes=there)
    ((_, _, _, remedy),) = of_the_network(judge(machines, ClusterRequirements("1.36", "sha256:aa", [node])))
    assert "ip saddr { 10.10.0.12 } udp" in remedy


def test_docker_s_bridge_must_not_take_an_address_of_the_second_network() -> None:
    docker = NetworkSettings("10.244.0.0/16", "10.96.0.0/12", runtime="docker")
    bridge = network(("eth0", "192.168.0.11/24"), bridge="10.10.0.1/24")
    machines = [replace(second_network("gpu-1", 11, network=bridge), network=docker), second_network("gpu-2", 12)]
    ((_, _, fact, _),) = of_the_network(judge(machines, ClusterRequirements("1.36")))
    assert "overlaps the address 10.10.0.12 of gpu-2" in fact


def test_a_new_cluster_s_ranges_leave_out_the_machines_that_join_later() -> None:
    """The ranges of a cluster cannot be changed: the join would be refused."""
    listed = {"gpu-1": "10.244.0.11", "gpu-2": "10.244.1.12", "gpu-3": "gpu-3.example", "gpu-4": "192.168.0.14"}
    machines = [replace(second_network("gpu-1", 11), node_address="")]
    requirements = ClusterRequirements("1.36", listed=listed)
    ((_, _, fact, _),) = of_the_network(judge(machines, requirements))
    assert fact.startswith("gpunodes_pod_subnet 10.244.0.0/16 overlaps the address 10.244.1.12 of gpu-2;")
    assert of_the_network(judge(machines, replace(requirements, ca_hash="sha256:aa"))) == []


def test_the_port_of_another_network_add_on_is_its_own() -> None:
    """Cilium's VXLAN has flannel's port, on a device of its own."""
    theirs = listener(8472, None, protocol="udp", interface="cilium_vxlan")
    assert [check for check, *_ in found({"sockets": [theirs], "kubernetes": NODE})] == ["ports"]
    none = NetworkSettings(pods="10.244.0.0/16", services="10.96.0.0/12", network="none")
    assert found({"sockets": [theirs], "kubernetes": NODE}, none) == []
    leave = NetworkSettings("10.244.0.0/16", "10.96.0.0/12", firewall="leave", network="none")
    assert found(active("ufw", open_=("10250/tcp",)), leave) == []
    machine = gpu_machine(**active("ufw"), default_address="10.0.0.11")
    state = filtered(given(machine, gpunodes_network="none", addresses=["10.0.0.1"], joins=True))
    assert "tcp 10250" in state["wanted"]["node"]["firewall"]["ports"]
    assert "udp 8472" not in state["wanted"]["node"]["firewall"]["ports"]


# The desired state, and the shape of reports


def test_the_desired_state_opens_ports_and_labels_the_node() -> None:
    machine = gpu_machine(**active("ufw"), default_address="10.0.0.11")
    state = filtered(given(machine, addresses=["10.0.0.1", "control-1"], joins=True))
    assert state["wanted"]["node"]["firewall"]["ports"]["udp 8472"] == ["10.0.0.1", "10.0.0.11"]
    assert state["labels"][firewall.LABEL] == "ufw"
    left = filtered(given(machine, gpunodes_firewall="leave"))
    assert left["wanted"]["node"]["firewall"] is None
    assert firewall.LABEL not in left["labels"]
    assert firewall.LABEL not in filtered(given(gpu_machine()))["labels"]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("unit", "x.service; reboot"),
        ("interface", "$(reboot)"),
        ("protocol", "sctp"),
        ("address", "10.0.0.1 or any"),
    ],
)
def test_a_socket_that_would_be_a_command_is_refused(where: str, value: str) -> None:
    good = facts(gpu={"functions": []}, packages={}, sources=[])
    assert reports.machine_problem(good) == ""
    assert where in reports.machine_problem({**good, "sockets": [listener(22, "sshd", **{where: value})]})


@pytest.mark.parametrize("chain", ["inet filter input; flush ruleset", "inet filter `reboot`"])
def test_a_chain_that_would_be_a_command_is_refused(chain: str) -> None:
    one = {"name": "nftables", "open": [], "writable": False, "chains": [chain]}
    assert "chain" in reports.machine_problem(facts(gpu={"functions": []}, firewalls=[one]))


def test_settings_that_are_no_networks_are_left_to_their_own_check() -> None:
    assert networks.ranges_of("10.244.0.0/16, x, fd00::/64") == [*networks.ranges_of("10.244.0.0/16,fd00::/64")]


def test_plain_ansible_judges_the_ports_of_the_settings() -> None:
    def lines(opened: Sequence[str], controls: Mapping[str, str] | None = None, **more: Any) -> list[str]:
        machine = facts(gpu={"functions": []}, **active("iptables", open_=(*opened, "6443/tcp"), writable=False))
        known = {"machines": controls or {}, "endpoint": "10.0.0.9", "arguments": {}, "growth": "up"}
        settings = {**defaults(), "gpunodes_network": "none"}
        arguments = ({"worker-1": "control_plane"}, None, "1.36", {"worker-1": settings})
        found = filters.preflight(
            {"worker-1": machine}, *arguments, {"worker-1": "10.0.0.11"}, joins=True, control_planes=known, **more
        )
        return [line for line in found if "firewall" in line]

    assert lines(["10250/tcp"]) == []
    (line,) = lines(["10250/tcp"], storage=["worker-1"])
    assert "it opens no tcp 2049" in line
    (line,) = lines(["10250/tcp"], MEMBERS)
    assert "it opens no tcp 2379, tcp 2380" in line
    assert "-s 10.0.0.1 --dport 2379" in line
