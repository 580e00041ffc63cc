"""Whether this machine reaches an API server at an address, and which names its certificate has. Changes nothing."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import certificate

_LIMIT_S = 5.0
_MOST = 100
"""Addresses and names that are reported."""
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})?")


def read(listed: Sequence[str]) -> list[dict[str, Any]]:
    """Each ``endpoint`` (HOST:PORT) with the IPv4 addresses of its host (``resolved``), why no TLS connection to it was
    made (``error``, "" if one was), and the ``names`` in the certificate that it presented, which is not verified.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(len(listed), _MOST))) as pool:
        return list(pool.map(_read, listed[:_MOST]))


def _read(endpoint: str) -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    found: dict[str, Any] = {"endpoint": endpoint, "resolved": [], "error": "", "names": []}
    try:
        listed = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        found["resolved"] = list(dict.fromkeys(str(each[4][0]) for each in listed))[:_MOST]
        names = certificate.names(presented(host, int(port)))
        found["names"] = [name for name in names if _NAME.fullmatch(name)][:_MOST]
    except (OSError, ValueError) as error:
        found["error"] = str(getattr(error, "strerror", None) or error)[:200]
    return found


def presented(host: str, port: int, ca: str = "", limit_s: float = _LIMIT_S) -> bytes:
    """The certificate, in DER, that the server at this address presents; raises OSError if there is none.

    With ``ca``, a PEM text, it must be signed by that CA; the name is not compared.
    """
    context = ssl.create_default_context(cadata=ca or None)
    context.check_hostname = False
    if not ca:
        # Only the names are read; the clients of the endpoint verify the certificate.
        context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((host, port), timeout=limit_s) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""
