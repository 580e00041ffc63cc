"""What relies on the internals of paramiko; tests/unit/test_packetizer.py checks that paramiko still has them."""

from __future__ import annotations

import paramiko
from paramiko.packet import Packetizer


class UntimedPacketizer(Packetizer):  # type: ignore[misc]  # paramiko has no types
    """No handshake timer, which costs a thread for each connection: the scan enforces the deadline of the session."""

    def start_handshake(self, timeout: float) -> None:
        pass


def can_verify(transport: paramiko.Transport, kind: str) -> bool:
    """Whether paramiko can verify host keys, or certificates, of this type."""
    return kind in transport._key_info
