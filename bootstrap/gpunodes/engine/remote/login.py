"""From a connection to a login: the key exchange with the check of the host key, then the keys and the password."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import paramiko

from gpunodes.engine.remote.host_check import HostCheck
from gpunodes.engine.remote.keys import PrivateKeys
from gpunodes.engine.remote.packetizer import UntimedPacketizer
from gpunodes.engine.remote.reach import LostError, Reach
from gpunodes.engine.remote.targets import Target

HOP_S = 20.0
"""Time limit in seconds for the connection to a jump host, and for a connection through one."""
_POLL_S = 2.0
"""Seconds between two checks that a connection is still open, in case paramiko does not signal its end."""
_LOGIN_TRIES = 5
"""sshd closes a connection after six failures (MaxAuthTries)."""


class Stream:
    """A socket for paramiko that reads ahead: half the system calls, and no polling ten times a second."""

    _closed = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._ahead = b""

    def send(self, data: bytes) -> int:
        sent: int = self._connection.send(data)
        return sent

    def recv(self, size: int) -> bytes:
        ahead = self._ahead or self._connection.recv(1 << 16)
        self._ahead = ahead[size:]
        return bytes(ahead[:size])

    def settimeout(self, seconds: float | None) -> None:
        """Ignored: the scan closes the socket at the deadline of the session."""

    def close(self) -> None:
        self._closed = True
        # Only shutdown(2) wakes a thread that is reading.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def handshake(stream: Stream, target: Target, check: HostCheck) -> paramiko.Transport:
    """Exchange keys and check the machine's host key; raises LostError."""
    transport = paramiko.Transport(stream, packetizer_class=UntimedPacketizer)
    transport.banner_timeout = HOP_S
    security = transport.get_security_options()
    # GCM ciphers authenticate each packet while decrypting; for others paramiko does that in Python, byte by byte.
    security.ciphers = sorted(security.ciphers, key=lambda name: "gcm" not in name)
    check.prefer(transport, target)
    ended = threading.Event()
    transport.start_client(event=ended)
    ended.wait()
    if not transport.is_active():
        raise transport.get_exception() or EOFError
    try:
        check.verify(transport.get_remote_server_key(), target)
    except LostError:
        transport.close()
        raise
    return transport


def login(transport: paramiko.Transport, target: Target, keys: PrivateKeys) -> paramiko.Transport:
    """Log in with the keys, then with the password; raises LostError when all are refused."""
    tried = 0
    for key in keys.of(target):
        if tried == _LOGIN_TRIES:
            break
        tried += 1
        if _try_login(transport, functools.partial(transport.auth_publickey, target.user, key)):
            return transport
        if not transport.is_active():
            break
    if target.password and transport.is_active():
        by_password = functools.partial(transport.auth_password, target.user, target.password, fallback=False)
        if _try_login(transport, by_password):
            return transport
    how = f"{tried} key{'s' if tried != 1 else ''}" + (" and the password" if target.password else "")
    raise LostError(Reach.LOGIN_REFUSED, f"sshd refused the login of {target.user} with {how}")


def _try_login(transport: paramiko.Transport, authenticate: Callable[..., object]) -> bool:
    """Try one login method. It gets an event: without one, paramiko polls ten times a second."""
    done = threading.Event()
    try:
        authenticate(event=done)
    except paramiko.BadAuthenticationType:
        return False
    while not done.wait(_POLL_S) and transport.is_active():
        pass
    authenticated: bool = transport.is_authenticated()
    return authenticated


# paramiko raises an exception for everything that it logs.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False
logging.getLogger("paramiko").setLevel(logging.CRITICAL)
