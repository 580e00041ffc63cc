"""Whether this control plane may have the cluster's virtual address: exit code 0 if it may.

keepalived runs this program as an unprivileged user. It needs only the standard library. A machine may have the address
while its API server is ready. The machine with the argument ``first`` may also have it while no API server is ready:
kubeadm reaches the API server that it creates there at this address.
"""

from __future__ import annotations

import http.client
import re
import ssl
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

PEERS = "/etc/keepalived/gpunodes-peers.conf"
LOCAL = "127.0.0.1"
PORT = 6443
_LIMIT_S = 4
_READY = (200, 401)
"""401: the API server runs, and its settings refuse anonymous requests."""


def is_ready(host: str, port: int = PORT) -> bool:
    """Whether the API server on a machine is ready."""
    # The response decides nothing but the place of an address: its clients verify the server's certificate.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=_LIMIT_S, context=context)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status in _READY
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


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
    with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
        return int(any(pool.map(is_ready, others)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
