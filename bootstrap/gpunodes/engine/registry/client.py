"""Pushes and deletes images by a registry's own API, at a loopback port that leads to it.

Its certificate is verified for the address that nodes use. What the registry sends is data: of an upload's address only
the path is used. Source: OCI distribution-spec, "Push" and "Content Management".
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from gpunodes.engine.deadline import Channel
from gpunodes.errors import GpunodesError
from gpunodes.model import printable

_CALL_S = 60.0
"""Time limit in seconds for a request with its whole response: the other end may be a pod that an attacker controls."""
_MOST = 1 << 16
_UPLOAD = re.compile(r"/v2/[a-z0-9/_.-]+/blobs/uploads/[A-Za-z0-9_.=-]+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_QUERY = re.compile(r"[A-Za-z0-9_.~%&=+-]*")


@dataclass(frozen=True, slots=True)
class _Answer:
    path: str
    """What was requested, for messages."""
    status: int
    headers: Message
    content: bytes
    """At most _MOST bytes of it."""


class Client:
    """A registry with a login. ``address`` is its HOST:PORT, ``port`` the loopback port that leads there.

    All methods raise GpunodesError.
    """

    def __init__(self, address: str, port: int, ca: str, user: str, password: str) -> None:
        self.address = address
        self._port = port
        self._ca = ca
        self._login = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")

    def check(self) -> None:
        """Check that it is a registry that wants a login, and accepts this one."""
        anonymous = self._call("GET", "/v2/", login=False)
        if anonymous.status != http.client.UNAUTHORIZED:
            raise self._failed(f"without a login it responds {anonymous.status}, not 401")
        self._wanted(self._call("GET", "/v2/"), http.client.OK)

    def push_blob(self, name: str, digest: str, content: bytes) -> None:
        """Push a blob in one piece."""
        begun = self._wanted(self._call("POST", f"/v2/{name}/blobs/uploads/"), http.client.ACCEPTED)
        place = urlsplit(begun.headers.get("Location", ""))
        if not _UPLOAD.fullmatch(place.path) or not _QUERY.fullmatch(place.query):
            raise self._failed("the address of an upload is not valid")
        path = f"{place.path}?{place.query}{'&' if place.query else ''}digest={digest}"
        more = {"Content-Type": "application/octet-stream"}
        self._wanted(self._call("PUT", path, content, more), http.client.CREATED)

    def push_manifest(self, name: str, tag: str, kind: str, content: bytes) -> None:
        """Push the manifest of an image whose blobs are there."""
        answer = self._call("PUT", f"/v2/{name}/manifests/{tag}", content, {"Content-Type": kind})
        self._wanted(answer, http.client.CREATED)

    def delete_manifest(self, name: str, digest: str) -> None:
        """Delete an image; one that is not there is no error."""
        answer = self._call("DELETE", f"/v2/{name}/manifests/{digest}")
        if answer.status != http.client.NOT_FOUND:
            self._wanted(answer, http.client.ACCEPTED)

    def digest_of(self, name: str, tag: str, kind: str) -> str:
        """The digest of an image that is there; "" without it."""
        answer = self._call("HEAD", f"/v2/{name}/manifests/{tag}", None, {"Accept": kind})
        digest = answer.headers.get("Docker-Content-Digest", "") if answer.status == http.client.OK else ""
        return digest if _DIGEST.fullmatch(digest) else ""

    def tags(self, name: str) -> list[str]:
        """The tags of an image, those of a valid form; none for one that is not there."""
        answer = self._call("GET", f"/v2/{name}/tags/list")
        if answer.status == http.client.NOT_FOUND:
            return []
        try:
            found = json.loads(self._wanted(answer, http.client.OK).content)
        except (ValueError, RecursionError):
            found = None
        listed = found.get("tags") if isinstance(found, dict) else None
        return [
            each
            for each in (listed if isinstance(listed, list) else ())
            if isinstance(each, str) and _TAG.fullmatch(each)
        ]

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        more: Mapping[str, str] | None = None,
        *,
        login: bool = True,
    ) -> _Answer:
        headers = {"Host": self.address, **({"Authorization": self._login} if login else {}), **(more or {})}
        try:
            connection = _Connection(self._port, self.address.partition(":")[0], self._ca)
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                return _Answer(path, response.status, response.headers, response.read(_MOST))
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._failed(f"{method} {path.partition('?')[0]}: {str(error) or type(error).__name__}") from error

    def _wanted(self, answer: _Answer, status: int) -> _Answer:
        if answer.status != status:
            reason = http.client.responses.get(answer.status, "")
            raise self._failed(f"{answer.path.partition('?')[0]}: {answer.status} {reason}".strip())
        return answer

    def _failed(self, found: str) -> GpunodesError:
        return GpunodesError(
            f"the registry {self.address}: {printable(found)[:400]}",
            "a registry that takes and gives images",
            "see `gpunodes registry status`, and `kubectl -n gpunodes-registry logs deployment/registry`",
        )


class _Connection(http.client.HTTPSConnection):
    """A connection to a loopback port, with the certificate of the server at its other end."""

    def __init__(self, port: int, host: str, ca: str) -> None:
        self._context = ssl.create_default_context(cadata=ca)
        super().__init__("127.0.0.1", port, timeout=_CALL_S, context=self._context)
        self._name = host
        self._end = time.monotonic() + _CALL_S

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), self.timeout)
        try:
            self.sock: Any = Channel(self._context.wrap_socket(plain, server_hostname=self._name), lambda: self._end)
        except BaseException:
            plain.close()
            raise
