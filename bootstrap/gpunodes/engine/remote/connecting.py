"""TCP connections and proxy commands, up to the SSH banner."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import Any

from gpunodes.engine.remote.reach import LostError, Reach
from gpunodes.engine.remote.targets import Target

Address = tuple[socket.AddressFamily, Any]
"""Address family and address, as ``socket.connect`` takes them."""


class PendingConnection:
    """A connection that has not received an SSH banner yet."""

    def __init__(self, target: Target, addresses: Sequence[Address], deadline: float) -> None:
        """Start to connect to the first of ``addresses``, or start the ProxyCommand; raises LostError."""
        self.target = target
        self.deadline = deadline
        self.connected = False
        self._error = LostError(Reach.NO_ROUTE, f"no address for {target.address}")
        if target.proxy_command:
            self.connected = True
            self.socket = proxy_socket(target.proxy_command)
            return
        self._addresses = deque(addresses)
        self._connect()

    def advance(self, deadline: float) -> None:
        """Handle the end of connect(2); after a failure try the next address. Raises LostError after the last."""
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.socket.close()
            self._error = connection_error(OSError(code, os.strerror(code)))
            self._connect()
            return
        self.connected = True
        self.deadline = deadline
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def timeout_reason(self) -> tuple[Reach, str]:
        """How far the connection came when its deadline passed."""
        if self.connected:
            return Reach.SHELL_HANGS, "connected, but sshd sends no SSH banner"
        return Reach.NO_ROUTE, f"no response from {self.target.address} port {self.target.port}"

    def _connect(self) -> None:
        while self._addresses:
            family, address = self._addresses.popleft()
            self.socket = socket.socket(family, socket.SOCK_STREAM)
            self.socket.setblocking(False)
            code = self.socket.connect_ex(address)
            if code in {0, errno.EINPROGRESS}:
                return
            self.socket.close()
            self._error = connection_error(OSError(code, os.strerror(code)))
        raise self._error


def resolve(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LostError(Reach.NO_ROUTE, f"cannot resolve {host}: {error.strerror}") from error
    return [(family, address) for family, _, _, _, address in found]


def numeric_addresses(target: Target) -> list[Address]:
    """The address of a machine that is given as a number; an empty list for a name."""
    try:
        found = socket.getaddrinfo(
            target.address, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in found]


def proxy_socket(command: str) -> socket.socket:
    """Start a ProxyCommand and return the socket to it; the command ends when the socket is closed."""
    near, far = socket.socketpair()
    with far:
        subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=far.fileno(),
            stdout=far.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return near


def connection_error(error: OSError) -> LostError:
    reach = Reach.REFUSED if isinstance(error, ConnectionError) else Reach.NO_ROUTE
    return LostError(reach, error.strerror or type(error).__name__)
