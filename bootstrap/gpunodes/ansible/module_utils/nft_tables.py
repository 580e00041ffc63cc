"""Deletes tables of nftables without its program: a machine may lack it, and programs in pods bring their own."""

from __future__ import annotations

import errno
import os
import socket
import struct

FAMILIES = {"inet": 1, "ip": 2, "ip6": 10}
"""NFPROTO_*, linux/netfilter.h."""
# linux/netlink.h, linux/netfilter/nfnetlink.h and linux/netfilter/nf_tables.h.
_NETFILTER = 12
_REQUEST, _ACK = 0x1, 0x4
_SUBSYSTEM = 10
_BEGIN, _END, _DELETE = 0x10, 0x11, _SUBSYSTEM << 8 | 2
_NAME = 1
_ERROR = 2
_LIMIT_S = 10.0
# A missing table, family, or nftables altogether.
_ABSENT = (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)


def delete(family: str, name: str) -> bool:
    """Delete a table with all its chains; False if there is none. Raises OSError if the kernel refuses it."""
    try:
        code = _ask(_batch(_DELETE, _REQUEST | _ACK, family, name))
    except OSError as error:
        code = error.errno or errno.EIO
    if code and code not in _ABSENT:
        raise OSError(code, f"deleting the nftables table {family} {name}: {os.strerror(code)}")
    return not code


def _batch(kind: int, flags: int, family: str, name: str) -> bytes:
    """A batch of one message about a table."""
    text = name.encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(text), _NAME) + text + b"\0" * (-len(text) % 4)
    begin, end = (_message(each, _REQUEST, socket.AF_UNSPEC, _SUBSYSTEM) for each in (_BEGIN, _END))
    return begin + _message(kind, flags, FAMILIES[family], 0, attribute) + end


def _message(kind: int, flags: int, family: int, resource: int, attributes: bytes = b"") -> bytes:
    """A message with the header of nfnetlink; the number of the subsystem is in network byte order."""
    body = struct.pack("=BB", family, 0) + struct.pack("!H", resource) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


def _ask(request: bytes) -> int:
    """Send a batch; returns the first error, 0 if there is none."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as kernel:
        kernel.settimeout(_LIMIT_S)
        kernel.bind((0, 0))
        kernel.send(request)
        answer = kernel.recv(65536)
    kind, code = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    return -code if kind == _ERROR else errno.EPROTO
