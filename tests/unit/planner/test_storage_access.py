"""What keeps pods from shares but by a claim: the files of a node, and the kernel with its rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from gpunodes.ansible.filter import storage as filters
from gpunodes.planner import storage, storage_access

PODS = "10.244.0.0/16"
SHARE = {"name": "training", "server": "nas.example", "path": "/export/training", "size": "900Gi"}
SETTINGS = {"gpunodes_storage": [SHARE], "gpunodes_pod_subnet": PODS}
NFT = shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin")


def test_every_node_that_mounts_shares_keeps_its_pods_from_the_servers() -> None:
    spec = storage.clients(SETTINGS, "apt")["nfs_client"]
    files = {file.path: file.content for file in spec.files}
    assert [package.name for package in spec.packages] == ["nfs-common", "nftables"]
    started = {service.name: service.started for service in spec.services}
    assert started == {"gpunodes-storage": True, "gpunodes-storage-nftables": False}
    assert spec.section == "nfs_client", "`storage down` and a reset of the machine undo it"
    rules = files[storage_access.RULES]
    assert "hook forward" in rules
    assert "tcp dport { 2049 } counter drop" in rules
    assert "udp dport { 2049 } counter drop" in rules
    assert "hook output" not in rules, "mounts of the kubelet are the machine's own packets"
    assert "nas.example" not in rules, "a server may have other names and addresses"
    unit, again = (files[f"/etc/systemd/system/{name}.service"] for name in started)
    assert "Before=kubelet.service" in unit
    assert "WantedBy=multi-user.target" in unit
    # A ruleset that flushes all others is loaded by that service's start or reload.
    assert "ReloadPropagatedFrom=nftables.service" in unit
    assert "WantedBy=nftables.service" in again
    assert "RemainAfterExit" not in again, "it starts each time"
    for verb in ("Start", "Reload"):
        assert f"Exec{verb}=/usr/sbin/nft -f {storage_access.RULES}" in unit


def test_ports_that_mount_options_name_are_closed_too() -> None:
    odd = {**SHARE, "options": ["hard", "port=2050", "port=0", "port=99999", "mountport=635", "nfsvers=4.2"]}
    settings = {**SETTINGS, "gpunodes_storage": [SHARE, {**odd, "name": "odd"}]}
    [rules, *_] = storage.clients(settings, "dnf")["nfs_client"].files
    assert "tcp dport { 2049, 2050 } counter drop" in rules.content


def test_servers_among_the_pods_stay_reachable() -> None:
    rules = storage_access.rules("10.244.0.0/16,fd00:10::/56", [2049])
    kept = [line.strip() for line in rules.splitlines() if line.endswith(" accept")]
    assert kept == ["ip daddr 10.244.0.0/16 accept", "ip6 daddr fd00:10::/56 accept"]
    assert rules.index("accept\n") < rules.index("drop\n")


def test_the_policy_is_applied_first_and_only_with_shares() -> None:
    kinds = [each["kind"] for each in filters.storage_objects([SHARE], "")]
    assert kinds[:2] == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    assert filters.storage_objects([], "") == []
    made = [(each["kind"], each["metadata"]["name"]) for each in storage_access.policy(storage.LABELS)]
    assert [(each["kind"], each["metadata"]["name"]) for each in storage_access.names()] == made


# The kernel with the rules

SERVER, SERVER_POD = "192.0.2.9", "10.244.9.9"


@pytest.fixture
def node() -> Iterator[str]:
    """A network namespace that forwards for `pod` and masquerades as a node does, with a server behind it."""
    if os.geteuid() != 0 or shutil.which("ip") is None or NFT is None:
        pytest.skip("needs root for network namespaces, ip and nft")
    prefix = f"gps{os.getpid()}"
    names = {name: f"{prefix}-{name}" for name in ("pod", "node", "server")}

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    made = []
    try:
        for name in names.values():
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        for end, network, own in (("pod", "10.244.1", "2"), ("server", "192.0.2", "9")):
            ip("-n", names["node"], "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", names[end])
            ip("-n", names["node"], "addr", "add", f"{network}.1/24", "dev", end)
            ip("-n", names["node"], "link", "set", end, "up")
            ip("-n", names[end], "addr", "add", f"{network}.{own}/24", "dev", "eth0")
            ip("-n", names[end], "link", "set", "eth0", "up")
            ip("-n", names[end], "route", "add", "default", "via", f"{network}.1")
        ip("-n", names["server"], "addr", "add", f"{SERVER_POD}/32", "dev", "lo")
        ip("-n", names["node"], "route", "add", f"{SERVER_POD}/32", "via", SERVER)
        inside(names["node"], "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        load(names["node"], chain("postrouting priority 100", f"ip saddr {PODS} ip daddr != {PODS} masquerade"))
        yield prefix
    finally:
        for name in made:
            ip("netns", "delete", name)


def inside(name: str, *argv: str, text: str = "") -> str:
    return subprocess.run(
        ["ip", "netns", "exec", name, *argv], check=True, capture_output=True, text=True, input=text
    ).stdout


def load(name: str, rules: str) -> None:
    inside(name, str(NFT), "-f", "-", text=rules)


def chain(hook: str, rule: str) -> str:
    """A table that changes addresses, as those of flannel and kube-proxy do."""
    return f"table ip {hook.split(maxsplit=1)[0]} {{\n chain c {{\n type nat hook {hook};\n {rule}\n }}\n}}\n"


def connected(name: str, address: str, port: int) -> str:
    """Whom the server takes a connection from this namespace for, "" if it gets none."""
    connect = "import socket, sys; print(socket.create_connection(sys.argv[1:], 1).recv(100).decode())"
    argv = ["ip", "netns", "exec", name, sys.executable, "-c", connect, address, str(port)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert not done.returncode or "timed out" in done.stderr, done.stderr
    return done.stdout.strip()


LISTEN = """
import selectors, socket
found = selectors.DefaultSelector()
for port in (2049, 2050):
    found.register(socket.create_server(("", port)), selectors.EVENT_READ)
print("listening", flush=True)
while True:
    for key, _ in found.select():
        taken, (address, _) = key.fileobj.accept()
        taken.sendall(address.encode())
        taken.close()
"""


def test_a_pod_reaches_no_server_and_its_node_does(node: str) -> None:
    pod, machine = f"{node}-pod", f"{node}-node"
    argv = ["ip", "netns", "exec", f"{node}-server", sys.executable, "-c", LISTEN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as listening:
        try:
            assert listening.stdout
            assert listening.stdout.readline().strip() == b"listening"
            assert connected(pod, SERVER, 2049) == "192.0.2.1", "the server takes the pod for its node"
            for _ in range(2):  # again, as at a reload
                load(machine, storage_access.rules(PODS, [2049]))
            assert connected(pod, SERVER, 2049) == ""
            assert connected(pod, SERVER, 2050) == "192.0.2.1"
            assert connected(machine, SERVER, 2049) == "192.0.2.1", "the kubelet's mounts"
            assert connected(pod, SERVER_POD, 2049) == "10.244.1.2", "a server in a pod"
            # A Service that leads to the server, by any node's port.
            load(machine, chain("prerouting priority -100", f"tcp dport 32049 dnat to {SERVER}:2049"))
            assert connected(pod, "10.244.1.1", 32049) == ""
            stop = re.search(r"^ExecStop=-/usr/sbin/nft (.*)$", unit(), re.MULTILINE)
            assert stop
            inside(machine, str(NFT), *stop[1].split())
            assert "gpunodes" not in inside(machine, str(NFT), "list", "ruleset")
            assert connected(pod, "10.244.1.1", 32049) == "192.0.2.1"
        finally:
            listening.kill()


def unit() -> str:
    spec = storage.clients(SETTINGS, "apt")["nfs_client"]
    return next(file.content for file in spec.files if file.path.endswith("/gpunodes-storage.service"))
