"""A small client of the Kubernetes API over the administrator's kubeconfig, for the control-plane machine itself."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from typing import Any
from urllib.parse import urlencode, urlsplit

from . import kubeconfig
from .problem import MachineProblem

_CALL_LIMIT_S = 30
_PATIENCE_S = 60
NOT_FOUND = 404
_CONFLICT = 409
# A busy or starting API server: 403 before it has read its own roles (the administrator is never forbidden anything),
# 429 too many requests, 500 etcd timed out, 503 and 504.
_PASSING = frozenset({0, 403, 429, 500, 503, 504})
_ERRORS_FROM = 400
# No empty segment, none of dots only, nothing that another server may decode.
_PATH = re.compile(r"(?:/(?!\.+(?:/|\?|$))[A-Za-z0-9._:~-]+)+(?:\?[^\s#]*)?")
MANAGER = "gpunodes"
"""Our name as a field manager in server-side apply."""


class ApiError(MachineProblem):
    """The API answered with an error, or not at all (``status`` 0)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(
            f"the Kubernetes API says: {reason}" if status else f"the Kubernetes API does not answer: {reason}"
        )
        self.status = status


class Client:
    """One connection, opened at the first call and kept.

    A call that fails as calls to a busy API server do is repeated for ``patience_s``.
    """

    def __init__(self, config: kubeconfig.Kubeconfig, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        address = urlsplit(config.server)
        self._host = address.hostname or ""
        self._port = address.port or 443
        context = ssl.create_default_context(cadata=config.ca)
        if config.certificate and config.key:
            _load_pair(context, config.certificate, config.key)
        self._context = context
        self._connection: http.client.HTTPSConnection | None = None

    def get(self, path: str, **query: str) -> Any:
        return self.call("GET", path, query=query)

    def find(self, path: str) -> Any | None:
        """Like get; None for what is not there."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def delete(self, path: str, **query: str) -> bool:
        """Delete; False for what was not there."""
        try:
            self.call("DELETE", path, query=query)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def call(
        self,
        method: str,
        path: str,
        body: Any | None = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """One request, repeated while it may yet succeed; the answer's JSON. Raises ApiError."""
        if not _PATH.fullmatch(path):
            # A name out of a machine's mouth must not become another path.
            raise ApiError(0, f"{path!r} is no path of the API")
        deadline = time.monotonic() + self._patience_s
        repeated = False
        while True:
            try:
                return self._call(method, path, body, query, content_type)
            except ApiError as error:
                if error.status == _CONFLICT and method == "POST" and repeated:
                    return {}  # the first try had come through
                if error.status not in _PASSING or time.monotonic() > deadline:
                    raise
            repeated = True
            time.sleep(1)

    def _call(self, method: str, path: str, body: Any | None, query: dict[str, str] | None, content_type: str) -> Any:
        target = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body)
        headers = {"Accept": "application/json", "Content-Type": content_type}
        for last in (False, True):
            fresh = self._connection is None
            connection = self._connect()
            try:
                connection.request(method, target, data, headers)
                answer = connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A kept connection may have been closed by the other side meanwhile.
                if last or fresh:
                    raise ApiError(0, f"{self._host}:{self._port}: {error}") from error
        try:
            document = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            document = {"message": text.decode("utf-8", "replace").strip()}
        if answer.status >= _ERRORS_FROM:
            raise ApiError(answer.status, str(document.get("message") or answer.reason))
        return document

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> http.client.HTTPSConnection:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=_CALL_LIMIT_S, context=self._context
            )
        return self._connection


def admin(patience_s: float = _PATIENCE_S) -> Client:
    """The administrator's client on a control-plane machine; raises MachineProblem where there is none."""
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        raise MachineProblem(
            f"there is no {kubeconfig.ADMIN} on this machine", "a control plane", "make one first: gpunodes init-master"
        )
    return Client(config, patience_s)


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """ssl takes certificates from files only: this one is in memory and never on a disk."""
    descriptor = os.memfd_create("gpunodes-client")
    try:
        os.write(descriptor, (certificate + "\n" + key).encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
