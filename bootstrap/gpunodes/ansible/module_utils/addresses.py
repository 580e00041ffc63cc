"""The IPv4 addresses of this machine. Changes nothing, and sends no packet."""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct

_SIOCGIFCONF = 0x8912  # linux/sockios.h
_IFREQ = struct.Struct("16s 4x 4s 16x")
"""``struct ifreq`` of 64-bit Linux: the interface, then a sockaddr_in in a union of 24 bytes (netdevice(7))."""
# Interfaces of container runtimes, network add-ons and hypervisors: each machine may have the same addresses there.
_VIRTUAL = re.compile(
    r"lo|docker.*|br-[0-9a-f]{12}|podman.*|cni.*|veth.*|virbr.*|lxc.*|lxdbr.*"
    r"|flannel.*|cali.*|tunl.*|cilium.*|weave.*|kube-.*|nodelocaldns"
)


def own() -> list[str]:
    """The addresses of its network interfaces, in their order; without loopback, link-local and containers' addresses.

    The ioctl reports also the further addresses of an interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        size = 64 * _IFREQ.size
        while True:
            buffer = array.array("B", bytes(size))
            request = struct.pack("iP", size, buffer.buffer_info()[0])
            used: int = struct.unpack_from("i", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
            # The kernel leaves out what does not fit.
            if used <= size - _IFREQ.size:
                return parse(buffer.tobytes()[:used])
            size *= 2


def parse(interfaces: bytes) -> list[str]:
    """The addresses in the result of SIOCGIFCONF."""
    found = []
    for name, packed in _IFREQ.iter_unpack(interfaces):
        interface = name.partition(b"\0")[0].decode("ascii", "replace").partition(":")[0]
        address = socket.inet_ntoa(packed)
        if not _VIRTUAL.fullmatch(interface) and not address.startswith(("127.", "169.254.", "0.")):
            found.append(address)
    return list(dict.fromkeys(found))
