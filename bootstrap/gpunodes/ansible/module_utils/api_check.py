"""Whether this control plane may have the cluster's virtual address: exit code 0 if it may.

keepalived runs this program as an unprivileged user, every few seconds: it needs only what loads fast of the standard
library, and not the authorities of the system. A machine may have the address while its API server is ready. The
machine with the argument ``first`` may also have it while no API server is ready: kubeadm reaches the API server that
it creates there at this address.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
import threading
from collections.abc import Sequence

PEERS = "/etc/keepalived/gpunodes-peers.conf"
LOCAL = "127.0.0.1"
PORT = 6443
_LIMIT_S = 4
_READY = (200, 401)
"""401: the API server runs, and its settings refuse anonymous requests."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_LONGEST = 100
"""Bytes of the first line of a response."""


def is_ready(host: str, port: int = PORT) -> bool:
    """Whether the API server on a machine is ready."""
    # The response decides nothing but the place of an address: its clients verify the server's certificate.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    request = f"GET /readyz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((host, port), _LIMIT_S) as plain, context.wrap_socket(plain) as connection:
            connection.sendall(request.encode("ascii"))
            status = _STATUS.match(connection.makefile("rb").readline(_LONGEST))
    except OSError:
        return False
    return status is not None and int(status[1]) in _READY


def peers(text: str) -> list[str]:
    """The addresses in the file of the other control planes."""
    return re.findall(r"^([0-9.]+)$", text, re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    if is_ready(LOCAL):
        return 0
    if "first" not in arguments:
        return 1
    with open(PEERS, encoding="ascii") as file:
        others = peers(file.read())
    found: list[bool] = []

    def ask(host: str) -> None:
        found.append(is_ready(host))

    threads = [threading.Thread(target=ask, args=[each]) for each in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(any(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
