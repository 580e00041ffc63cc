"""The addresses of a machine, of interfaces that really exist in a network namespace of this test."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys

import pytest
from gpunodes.ansible.module_utils import addresses

NAMESPACE = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]


def interface(name: str, address: str) -> bytes:
    """An entry of SIOCGIFCONF."""
    return struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, socket.inet_aton(address))


def test_virtual_interfaces_do_not_count() -> None:
    """All machines have the same addresses there: they identify nothing, and no other machine reaches them."""
    given = {"lo": "10.255.0.1", "docker0": "172.17.0.1", "br-0123456789ab": "172.18.0.1", "cni0": "10.244.1.1"}
    given |= {
        "flannel.1": "10.244.1.0",
        "virbr0": "192.168.122.1",
        "kube-ipvs0": "10.96.0.1",
        "nodelocaldns": "169.1.1.1",
    }
    kept = {
        "eth0": "10.0.0.1",
        "eth0:1": "10.0.0.2",
        "br-storage": "10.1.0.1",
        "bond0.7": "10.2.0.1",
        "ib0": "10.3.0.1",
    }
    entries = [interface(name, address) for name, address in (given | kept).items()]
    entries += [interface("eth1", "169.254.3.1"), interface("eth2", "127.0.1.1"), interface("eth3", "10.0.0.1")]
    assert addresses.parse(b"".join(entries)) == list(kept.values())
    assert addresses.parse(b"") == []


def test_real_interfaces() -> None:
    """More of them than fit into the first buffer, and several addresses of one interface."""
    script = """
ip tuntap add eth7 mode tap && ip link set eth7 up && ip tuntap add docker0 mode tap && ip link set lo up || exit 77
ip address add 172.17.0.1/16 dev docker0
ip address add 2001:db8::1/64 dev eth7
for number in $(seq 1 150); do ip address add 10.7.0.$number/24 dev eth7 || exit 1; done
ip address add 10.8.0.1/24 dev eth7 label eth7:x
exec "$0" -c 'from gpunodes.ansible.module_utils import addresses; print(*addresses.own())'
"""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs unshare and ip")
    done = subprocess.run([*NAMESPACE, "sh", "-c", script, sys.executable], capture_output=True, text=True, check=False)
    if done.returncode in {77, 127} or "unshare" in done.stderr:
        pytest.skip(f"no network namespace, or no interfaces in it: {done.stderr}")
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted([*(f"10.7.0.{number}" for number in range(1, 151)), "10.8.0.1"])


def test_a_machine_without_addresses() -> None:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a network namespace")
    code = "from gpunodes.ansible.module_utils import addresses; print(addresses.own())"
    assert subprocess.check_output([*NAMESPACE, sys.executable, "-c", code], text=True) == "[]\n"
