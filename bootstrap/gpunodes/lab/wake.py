"""The network cards of machines that are off: a listener in the lab's network that starts a machine by Wake-on-LAN.

QEMU's network cards do not wake a machine: they end with it. So this daemon receives the packets for them.
Source of the packet: AMD, "Magic Packet Technology" (white paper 20213): six bytes FF, then the address 16 times,
anywhere in a frame. Cards accept it in any protocol; this listener in UDP to the ports that senders use.
"""

from __future__ import annotations

import argparse
import logging
import selectors
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpunodes.errors import GpunodesError, sentence
from gpunodes.lab.layout import LabMachine, Layout

log = logging.getLogger(__name__)
PORTS = (7, 9)
"""The ports of the services echo and discard."""
_LONGEST = 9216
"""Bytes of a packet: as large as a frame."""


def command(layout: Layout, machines: Sequence[LabMachine]) -> list[str | Path]:
    """The command that starts the daemon, inside the lab's namespace."""
    argv: list[str | Path] = [sys.executable, "-m", "gpunodes.lab.wake", "--name", layout.name, "--cache", layout.cache]
    for machine in machines:
        links = [machine.mac, *([machine.second_link.mac] if machine.second_link else ())]
        argv += [part for mac in links for part in ("--machine", f"{mac}={machine.name}")]
    return argv


def machine_of(packet: bytes, machines: Mapping[bytes, str]) -> str | None:
    """The machine that a packet wakes; None for any other packet."""
    return next((name for mac, name in machines.items() if b"\xff" * 6 + mac * 16 in packet), None)


def listen(ports: Sequence[int] = PORTS, address: str = "") -> list[socket.socket]:
    """Sockets that receive packets to these ports, broadcasts too."""
    found = []
    for port in ports:
        channel = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        channel.bind((address, port))
        found.append(channel)
    return found


def serve(channels: Sequence[socket.socket], machines: Mapping[bytes, str], start: Callable[[str], None]) -> None:
    """Start the machine of each packet, for ever; ``start`` does nothing with one that is on."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ, channel)
        while True:
            for key, _ in selector.select():
                packet, sender = key.data.recvfrom(_LONGEST)
                if name := machine_of(packet, machines):
                    log.info("%s wakes %s", sender[0], name)
                    _try(start, name)


def _try(start: Callable[[str], None], name: str) -> None:
    try:
        start(name)
    except GpunodesError as error:
        # The next packet may find libvirt again.
        log.warning("%s: %s", name, sentence(error))


def main() -> None:
    """Serve until a signal ends the process; what wakes machines is logged to standard error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="the lab's name")
    parser.add_argument("--cache", required=True, type=Path)
    parser.add_argument("--machine", action="append", default=[], metavar="MAC=NAME")
    options = parser.parse_args()
    layout = Layout(options.name, options.cache)
    pairs = (each.partition("=") for each in options.machine)
    machines = {bytes.fromhex(mac.replace(":", "")): name for mac, _, name in pairs}

    def start(name: str) -> None:
        from gpunodes.lab import hypervisor

        with hypervisor.connect(layout) as found:
            if not found.running(name):
                found.start(name)

    serve(listen(), machines, start)


if __name__ == "__main__":
    main()
