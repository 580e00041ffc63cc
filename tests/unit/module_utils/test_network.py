"""Addresses, routes and sockets of a machine: recorded output, and real sockets of this process."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import network, sockets
from gpunodes.planner import ports

# ip -json -details address show (iproute2 6.1), shortened.
DEVICES: list[dict[str, Any]] = [
    {"ifname": "lo", "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8, "scope": "host"}]},
    {
        "ifname": "flannel.1",
        "linkinfo": {"info_kind": "vxlan", "info_data": {"id": 1, "port": 8472}},
        "addr_info": [
            {"family": "inet", "local": "10.244.1.0", "prefixlen": 32, "scope": "global"},
            {"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"},
        ],
    },
    {"ifname": "br0", "linkinfo": {"info_kind": "bridge", "info_data": {"port": "x"}}},
    {},
]


def test_devices() -> None:
    assert network.parse_devices(DEVICES) == [
        {"name": "lo", "addresses": ["127.0.0.1/8"], "udp_port": None},
        {"name": "flannel.1", "addresses": ["10.244.1.0/32"], "udp_port": 8472},
        {"name": "br0", "addresses": [], "udp_port": None},
    ]


def test_routes() -> None:
    listed: list[dict[str, Any]] = [
        {"dst": "default", "gateway": "10.0.0.1", "dev": "eth0"},
        {"dst": "10.0.0.0/24", "dev": "eth0", "scope": "link"},
        {"dst": "10.1.0.0/16", "gateway": "10.0.0.1", "dev": "eth0"},
        {
            "dst": "10.2.0.0/16",
            "nexthops": [{"via": {"family": "inet6", "host": "fe80::1"}, "dev": "eth1"}, {"dev": "eth2"}],
        },
        {"type": "blackhole", "dst": "10.3.0.0/16", "dev": ""},
        {"dst": "fe80::/64", "dev": "eth0"},
    ]
    assert network.parse_routes(listed) == [
        {"to": "10.0.0.0/24", "device": "eth0", "gateway": "", "table": ""},
        {"to": "10.1.0.0/16", "device": "eth0", "gateway": "10.0.0.1", "table": ""},
        {"to": "10.2.0.0/16", "device": "eth1", "gateway": "fe80::1", "table": ""},
        {"to": "10.3.0.0/16", "device": "blackhole", "gateway": "", "table": ""},
    ]


def test_routes_of_tables_for_policy_routing() -> None:
    """The first five are those of ``ip -json -4 route show table all`` (iproute2 6.1), shortened."""
    listed: list[dict[str, Any]] = [
        {"type": "throw", "dst": "10.1.0.0/16", "table": "52", "flags": []},
        {"type": "unreachable", "dst": "10.2.0.0/16", "table": "52", "flags": []},
        {"type": "local", "dst": "10.3.0.0/16", "dev": "lo", "table": "200", "scope": "host", "flags": []},
        {"type": "local", "dst": "127.0.0.0/8", "dev": "lo", "table": "local", "protocol": "kernel", "flags": []},
        {"type": "broadcast", "dst": "10.9.0.255", "dev": "eth1", "table": "local", "protocol": "kernel"},
        {"dst": "default", "gateway": "10.9.0.1", "dev": "eth1", "table": "100"},
        {"dst": "10.9.0.0/24", "dev": "eth1", "scope": "link", "table": "100"},
        {"dst": "10.9.0.0/24", "dev": "eth1", "scope": "link"},
        {"dst": "10.244.7.0/24", "gateway": "10.9.0.1", "dev": "eth1", "table": "100"},
        {"dst": "10.8.0.0/24", "dev": "eth1", "table": "x; reboot"},
    ]
    assert network.parse_routes(listed) == [
        {"to": "10.9.0.0/24", "device": "eth1", "gateway": "", "table": ""},
        {"to": "10.244.7.0/24", "device": "eth1", "gateway": "10.9.0.1", "table": "100"},
        {"to": "10.8.0.0/24", "device": "eth1", "gateway": "", "table": "?"},
    ]


def test_all_tables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def must(argv: list[str]) -> str:
        called.append(argv)
        return '[{"dst": "10.244.7.0/24", "dev": "wg0", "table": "100"}]' if "-4" in argv else "[]"

    monkeypatch.setattr(network, "must", must)
    read = network.read()
    assert read
    assert read["routes"] == [{"to": "10.244.7.0/24", "device": "wg0", "gateway": "", "table": "100"}]
    assert called[1:] == [["ip", "-json", family, "route", "show", "table", "all"] for family in ("-4", "-6")]


@pytest.mark.parametrize(
    ("text", "bridge"),
    [
        ("", ""),
        ('{"bip": "192.168.9.1/24"}', "192.168.9.1/24"),
        ("{", ""),
        ("[]", ""),
        ('{"bip": 5}', ""),
        ("[" * 5000, ""),
    ],
)
def test_docker_s_bridge(text: str, bridge: str) -> None:
    assert network.docker_bridge(text) == bridge


# /proc/net/tcp and udp (Linux 6.12), and a connection, a connected UDP socket and a short line beside them.
TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 00000000:280A 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 501 1\n"
    "   1: 0100007F:280A 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 502 1\n"
    "   2: 00000000000000000000000000000000:192B 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 503 1\n"
    "   3: short\n"
)
UDP = (
    " 1268: 00000000:2118 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 111057 2\n"
    " 1269: 0100007F:2119 0100007F:0035 01 00000000:00000000 00:00000000 00000000     0        0 111058 2\n"
)


def test_only_waiting_sockets_count() -> None:
    found = sockets.parse(TCP, "tcp")
    assert [(each["port"], each["address"], each["inode"]) for each in found] == [
        (10250, str(ipaddress.IPv4Address(0)), 501),
        (6443, "::", 503),
    ]
    assert [(each["port"], each["inode"]) for each in sockets.parse(UDP, "udp")] == [(8472, 111057)]


def test_a_loopback_address() -> None:
    (found,) = sockets.parse("   0: 0100007F:0016 00000000:0000 0A 0:0 00:0 0 0 0 5 1\n", "tcp")
    assert found["address"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/nginx.service", "nginx.service"),
        ("0::/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
        ("0::/user.slice/user-0.slice/session-4.scope", "session-4.scope"),
        ("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-2.scope", "pods"),
        ("0::/kubepods/besteffort/pod1/2", "pods"),
        ("12:cpu:/\n1:name=systemd:/system.slice/kubelet.service\n", "kubelet.service"),
        ("0::/system.slice/$(reboot).service", None),
        ("0::/", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process(cgroup: str, unit: str | None) -> None:
    assert sockets.unit_of(cgroup.splitlines()) == unit


def test_real_sockets_with_their_process() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing,
    ):
        outgoing.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        found = [each for each in sockets.read(()) if each["port"] == port and each["protocol"] == "tcp"]
        (own,) = found
        assert (own["pid"], own["address"], own["interface"]) == (os.getpid(), "127.0.0.1", None)
        assert own["program"] == Path("/proc/self/exe").readlink().name
        assert not [
            each for each in sockets.read(()) if (each["protocol"], each["port"]) == ("udp", outgoing.getsockname()[1])
        ]


def made_proc(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "net").mkdir()
    (root / "net/udp").write_text(UDP)
    (root / "net/tcp").write_text(TCP)
    for pid, name in ((7, "nginx"), (31, "worker"), (4, "kthread")):
        (root / f"{pid}/fd").mkdir(parents=True)
        (root / f"{pid}/comm").write_text(f"{name}\n")
        (root / f"{pid}/cgroup").write_text("0::/system.slice/nginx.service\n")
    (root / "7/fd/5").symlink_to("socket:[501]")
    (root / "31/fd/5").symlink_to("socket:[501]")
    (root / "7/exe").symlink_to("/usr/sbin/nginx (deleted)")
    monkeypatch.setattr(sockets, "PROC", str(root))


def test_the_holder_of_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest process counts; a port without a process is the kernel's, for the device with that port."""
    made_proc(tmp_path, monkeypatch)
    found = {each["port"]: each for each in sockets.read(network.parse_devices(DEVICES))}
    assert {key: found[10250][key] for key in ("pid", "program", "unit", "interface")} == {
        "pid": 7,
        "program": "nginx",
        "unit": "nginx.service",
        "interface": None,
    }
    assert (found[8472]["pid"], found[8472]["program"], found[8472]["interface"]) == (None, None, "flannel.1")
    assert {each["port"]: each["interface"] for each in sockets.read(())}[8472] is None


# 8472, 31337 and 45000.
WAITING = "".join(
    f" 1: 00000000:{port:04X} 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 {port} 2\n"
    for port in (8472, 31337, 45000)
)


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ("", [8472, 31337]),
        ("32768\t60999\n", [8472, 31337]),
        ("1024\t65535\n", [8472]),
        ("1024\t20000\n", [8472, 31337, 45000]),
        ("9000\t40000\n", [8472, 45000]),
    ],
)
def test_the_cluster_s_udp_ports_count_also_among_those_of_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, found: list[int]
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/udp").write_text(WAITING)
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text(limits)
    monkeypatch.setattr(sockets, "PROC", str(tmp_path))
    assert [each["port"] for each in sockets.read(())] == found


def test_the_port_of_a_tunnel_is_no_outgoing_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/udp").write_text(WAITING)
    monkeypatch.setattr(sockets, "PROC", str(tmp_path))
    tunnel = {"name": "vxlan7", "addresses": [], "udp_port": 45000}
    assert {each["port"]: each["interface"] for each in sockets.read([tunnel])}[45000] == "vxlan7"


def test_the_cluster_s_udp_ports_are_those_of_the_table() -> None:
    fixed = {port.first for port in ports.all_ports() if port.protocol == "udp" and port.from_ != "clients"}
    assert fixed == sockets.UDP
