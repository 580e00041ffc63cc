"""The internals of paramiko that engine/remote/packetizer.py relies on."""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Iterator

import paramiko
import pytest
from gpunodes.engine.remote import packetizer
from paramiko.packet import Packetizer


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    near, far = socket.socketpair()
    with near, far:
        yield near


def timers() -> int:
    return sum(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_paramiko_starts_a_thread_for_the_handshake_and_the_override_does_not(connection: socket.socket) -> None:
    """If paramiko no longer has the timer or its method, the override can go."""
    before = timers()
    timed = Packetizer(connection)
    timed.start_handshake(30)
    assert timers() == before + 1
    timed.complete_handshake()
    untimed = packetizer.UntimedPacketizer(connection)
    untimed.start_handshake(30)
    assert timers() <= before + 1
    assert not untimed.handshake_timed_out()
    untimed.complete_handshake()


def test_a_transport_uses_the_override_and_starts_the_handshake_by_it(connection: socket.socket) -> None:
    transport = paramiko.Transport(connection, packetizer_class=packetizer.UntimedPacketizer)
    assert type(transport.packetizer) is packetizer.UntimedPacketizer
    assert "self.packetizer.start_handshake(" in inspect.getsource(paramiko.Transport)


def test_a_transport_has_the_key_types_that_it_can_verify(connection: socket.socket) -> None:
    transport = paramiko.Transport(connection)
    kinds = ("ssh-ed25519", "ssh-ed25519-cert-v01@openssh.com", "rsa-sha2-512-cert-v01@openssh.com")
    assert all(packetizer.can_verify(transport, kind) for kind in kinds)
    assert not packetizer.can_verify(transport, "ssh-unknown-cert-v01@openssh.com")
