"""The lab's Wake-on-LAN listener: real UDP packets, on the loopback and over a bridge between two namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpunodes.engine.power import Access, Order, kinds, wol
from gpunodes.errors import GpunodesError
from gpunodes.lab import daemons, wake
from gpunodes.lab.layout import LabMachine, LabRecord, LabRole, Layout, Link, System

MAC, OTHER = "52:54:00:00:00:01", "52:54:00:00:00:02"
MACHINES = {bytes.fromhex(mac.replace(":", "")): name for mac, name in ((MAC, "gpu-1"), (OTHER, "gpu-2"))}
PACKET = wol.packet(bytes.fromhex(MAC.replace(":", "")))


def machine(name: str, mac: str, second: Link | None = None) -> LabMachine:
    return LabMachine(name, LabRole.WORKER, "10.213.0.21", mac, "1", 2048, 1, 8001, "secret", second_link=second)


@pytest.mark.parametrize(
    ("packet", "wakes"),
    [
        (PACKET, "gpu-1"),
        (b"before" + PACKET + b"SecureOn", "gpu-1"),
        (wol.packet(bytes.fromhex(OTHER.replace(":", ""))), "gpu-2"),
        (wol.packet(b"\x52\x54\x00\x00\x00\x03"), None),
        (PACKET[:-1], None),
        (PACKET[6:], None),
        (b"", None),
        (b"\xff" * 9000, None),
    ],
)
def test_which_machine_a_packet_wakes(packet: bytes, wakes: str | None) -> None:
    assert wake.machine_of(packet, MACHINES) == wakes


@pytest.fixture
def loopback() -> tuple[int, list[str]]:
    """A listener, its port, and what it started; the first start of gpu-2 fails."""
    started: list[str] = []

    def start(name: str) -> None:
        started.append(name)
        if started == ["gpu-2"]:
            raise GpunodesError("the lab's libvirt reports: no connection")

    channels = wake.listen([0], "127.0.0.1")
    # It ends with the test's process: nobody closes sockets below a selector.
    threading.Thread(target=wake.serve, args=(channels, MACHINES, start), daemon=True).start()
    return channels[0].getsockname()[1], started


def test_what_gpunodes_sends_starts_the_machine(loopback: tuple[int, list[str]]) -> None:
    port, started = loopback
    access = Access("wol", f"127.0.0.1:{port}", "", "", macs=(MAC,), reached=("127.0.0.1", 1))
    kinds.connect("gpu-1", access).order(Order.ON)
    until(lambda: started == ["gpu-1"] * 3)


def test_a_failed_start_and_other_packets_do_not_end_it(loopback: tuple[int, list[str]]) -> None:
    port, started = loopback
    other = wol.packet(bytes.fromhex(OTHER.replace(":", "")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        for packet in (other, b"x", b"\xff" * 9000, b"", PACKET):
            sending.sendto(packet, ("127.0.0.1", port))
    until(lambda: started == ["gpu-2", "gpu-1"])


def test_the_daemon_knows_all_links_of_all_machines(tmp_path: Path) -> None:
    machines = (machine("gpu-1", MAC, Link("10.214.0.21", "52:54:00:00:01:01")), machine("gpu-2", OTHER))
    argv = [str(word) for word in wake.command(Layout("lab", tmp_path), machines)]
    assert [argv[index + 1] for index, word in enumerate(argv) if word == "--machine"] == [
        f"{MAC}=gpu-1",
        "52:54:00:00:01:01=gpu-1",
        f"{OTHER}=gpu-2",
    ]
    record = LabRecord("lab", System.DEBIAN13, "10.213.0.0/24", "tcg", machines, "/somewhere", None)
    assert "wake" in daemons.expected(record)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip (package iproute2)")
@pytest.mark.parametrize("address", ["10.213.99.255", "255.255.255.255"])
def test_a_broadcast_of_another_machine_reaches_it_over_the_bridge(tmp_path: Path, address: str) -> None:
    """As in the lab: the listener is at the bridge, the control plane sends from one of its ports."""
    here, there = (f"wake{os.getpid()}{side}" for side in "ab")
    with namespaces(here, there):
        ip("-n", here, "link", "add", "lab0", "type", "bridge", "forward_delay", "0")
        ip("-n", here, "addr", "add", "10.213.99.1/24", "dev", "lab0")
        ip("-n", here, "link", "add", "port", "type", "veth", "peer", "name", "eth0", "netns", there)
        ip("-n", here, "link", "set", "port", "master", "lab0", "up")
        ip("-n", here, "link", "set", "lab0", "up")
        ip("-n", there, "addr", "add", "10.213.99.11/24", "dev", "eth0")
        ip("-n", there, "link", "set", "eth0", "up")
        ip("-n", there, "route", "add", "default", "via", "10.213.99.1")
        started = tmp_path / "started"
        listen = (
            "from pathlib import Path; from gpunodes.lab import wake; "
            f"wake.serve(wake.listen(), {MACHINES!r}, lambda name: Path({str(started)!r}).write_text(name))"
        )
        send = (
            "from gpunodes.engine.power import Access, Order, wol; "
            f"wol.WakeOnLan('gpu-2', Access('wol', {address!r}, '', '', macs=({OTHER!r},))).order(Order.ON)"
        )
        with subprocess.Popen(["ip", "netns", "exec", here, sys.executable, "-c", listen]) as listener:
            try:

                def woken() -> bool:
                    # The first packets may come before the listener, or while the bridge learns.
                    subprocess.run(["ip", "netns", "exec", there, sys.executable, "-c", send], check=True)
                    return started.exists() and started.read_text() == "gpu-2"

                until(woken, 60)
            finally:
                listener.terminate()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Network namespaces of these names, removed afterwards."""
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        yield
    finally:
        for name in made:
            ip("netns", "delete", name)


def until(seen: Callable[[], object], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)
