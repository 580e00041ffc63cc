"""Connections to jump hosts: opened by the first session that needs them, and shared by all machines behind them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import paramiko

from gpunodes.engine.remote.connecting import connection_error, proxy_socket
from gpunodes.engine.remote.host_check import HostCheck
from gpunodes.engine.remote.keys import PrivateKeys
from gpunodes.engine.remote.login import HOP_S, Stream, handshake, login
from gpunodes.engine.remote.reach import LostError, Reach
from gpunodes.engine.remote.targets import Target


class JumpHosts:
    """The connections of one scan. Thread-safe."""

    def __init__(self, check: HostCheck, keys: PrivateKeys) -> None:
        self._check = check
        self._keys = keys
        self._mutex = threading.Lock()
        self._hops: dict[tuple[Target, ...], _Hop] = {}

    def tunnel(self, target: Target) -> paramiko.Channel:
        """A connection to a machine through its jump hosts; raises LostError."""
        return _tunnel(self._hop(target.jump), target)

    def close(self) -> None:
        """Close the connections."""
        for hop in self._hops.values():
            if hop.transport is not None:
                hop.transport.close()

    def _hop(self, jump: tuple[Target, ...]) -> paramiko.Transport:
        """The connection to the last of these jump hosts; raises LostError."""
        with self._mutex:
            hop = self._hops.setdefault(jump, _Hop())
        with hop.mutex:
            if hop.lost is None and hop.transport is None:
                try:
                    hop.transport = self._connect_hop(jump)
                except LostError as lost:
                    hop.lost = LostError(lost.reach, f"{jump[-1].name}: {lost.message}")
            if hop.transport is None:
                raise hop.lost or LostError(Reach.NO_ROUTE, f"{jump[-1].name} is not connected")
            return hop.transport

    def _connect_hop(self, jump: tuple[Target, ...]) -> paramiko.Transport:
        *before, last = jump
        if before:
            connection: Any = _tunnel(self._hop(tuple(before)), last)
        elif last.proxy_command:
            connection = proxy_socket(last.proxy_command)
        else:
            try:
                connection = socket.create_connection((last.address, last.port), timeout=HOP_S)
            except OSError as error:
                raise connection_error(error) from error
        connection.settimeout(None)
        stream = Stream(connection)
        timer = threading.Timer(HOP_S, stream.close)
        timer.daemon = True
        timer.start()
        try:
            return login(handshake(stream, last, self._check), last, self._keys)
        finally:
            timer.cancel()


class _Hop:
    """The connection to one jump host."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.transport: paramiko.Transport | None = None
        self.lost: LostError | None = None


def _tunnel(transport: paramiko.Transport, target: Target) -> paramiko.Channel:
    """A connection to ``target`` through the jump host that ``transport`` is connected to."""
    try:
        return transport.open_channel("direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=HOP_S)
    except paramiko.ChannelException as error:
        # The jump host sends a reason, which paramiko does not pass on.
        raise LostError(Reach.NO_ROUTE, f"from the jump host: {error.text}") from error
    except (paramiko.SSHException, EOFError) as error:
        raise LostError(Reach.NO_ROUTE, f"from the jump host: {error or 'no response'}") from error
