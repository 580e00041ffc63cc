"""A small client of the Kubernetes API with the administrator's kubeconfig; it runs on the control-plane machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode, urlsplit

from . import disk, kubeconfig
from .problem import MachineProblem

PORT = 6443
"""The port of the API servers on control-plane machines."""
_CONNECT_S = 5
"""Time limit in seconds for a connection while there is another address to try."""
_PATIENCE_S = 60
FORBIDDEN = 403
NOT_FOUND = 404
_CONFLICT = 409
_GONE = 410
_AT_ONCE = 50
"""Objects of one page, of a list that is too large for one response."""
_STARTS = 3
"""How often such a list is begun: the API server forgets its moment after some minutes."""
# Statuses of a busy or starting API server: 403 before it has loaded its roles (the administrator may do everything),
# 429 too many requests, 500 etcd timed out, 503 and 504.
_TEMPORARY = frozenset({0, 403, 429, 500, 503, 504})
_FIRST_ERROR = 400
# No empty segment, no segment of dots only, and no percent-encoding that a server may decode.
_PATH = re.compile(r"(?:/(?!\.+(?:/|\?|$))[A-Za-z0-9._:~-]+)+(?:\?[^\s#]*)?")
SYSTEM = "/api/v1/namespaces/kube-system"
MERGE = "application/merge-patch+json"
"""Content type of a patch whose null values remove fields (RFC 7386)."""
MANAGER = "gpunodes"
"""The field manager of gpunodes in server-side apply."""


def is_path(path: str) -> bool:
    """Whether ``path``, with its query, is one of the API: a name that a machine reports must not lead elsewhere."""
    return _PATH.fullmatch(path) is not None


class ApiError(MachineProblem):
    """The API returned an error, or did not respond (``status`` 0)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(
            f"the Kubernetes API reports: {reason}" if status else f"the Kubernetes API does not respond: {reason}"
        )
        self.status = status

    @property
    def is_too_large(self) -> bool:
        """Whether the response is larger than the limit: the API responds."""
        return isinstance(self.__cause__, TooLarge)


@dataclass(frozen=True)
class Limits:
    """The limits of one call. The API server passes on what a node sends: a byte now and then, or without an end."""

    call_s: float = 30
    """Seconds for a connection, and without a byte of the response."""
    whole_s: float = 40
    """Seconds for the body of a response."""
    most: int = 256 << 20
    """Bytes of a response: lists of a large cluster have tens of megabytes."""


class TooLarge(TimeoutError):  # noqa: N818 - reads as the sentence it makes
    """A response beyond ``Limits.most``."""


_LOG = re.compile(r"/api/v1/namespaces/[^/]+/pods/[^/]+/log")
_OF_LOG = Limits(call_s=10, whole_s=10, most=1 << 20)
"""A log is what a kubelet sends, whatever limits it was asked to keep; ``whole_s`` is for all of its response."""


def is_log(path: str) -> bool:
    """Whether ``path`` is that of a pod's log."""
    return _LOG.fullmatch(path.partition("?")[0]) is not None


class Client:
    """One connection, opened at the first call and kept.

    A call that fails with a temporary error is repeated for ``patience_s``. The API server of this machine itself is
    used if it accepts connections, else the endpoint of the cluster: the endpoint may be another machine's address.
    """

    def __init__(
        self, config: kubeconfig.Kubeconfig, patience_s: float = _PATIENCE_S, limits: Limits | None = None
    ) -> None:
        self._patience_s = patience_s
        self._limits = limits or Limits()
        self._servers = [*([config.own] if config.own else []), config.server]
        context = ssl.create_default_context(cadata=config.ca)
        if config.certificate and config.key:
            _load_pair(context, config.certificate, config.key)
        self._context = context
        self._token_file = config.token_file
        self._connection: http.client.HTTPSConnection | None = None
        self._where = ""
        """The server of the connection, for messages."""

    def get(self, path: str, **query: str) -> Any:
        """Read an object, or a list, in pages if it is too large for one response. Raises ApiError."""
        try:
            return self.call("GET", path, query=query)
        except ApiError as error:
            if not error.is_too_large:
                raise
        return self._in_pages(path, query)

    def _in_pages(self, path: str, query: dict[str, str]) -> Any:
        """A list whose objects users of a namespace made so large; read again if the API server forgot its moment."""
        items: list[Any] = []
        at_once, token, starts = _AT_ONCE, "", 1
        while True:
            page_query = {**query, "limit": str(at_once), **({"continue": token} if token else {})}
            try:
                page = self.call("GET", path, query=page_query)
            except ApiError as error:
                if error.status == _GONE and starts < _STARTS:
                    items, token, starts = [], "", starts + 1
                    continue
                if not error.is_too_large or at_once == 1:
                    raise
                at_once = max(1, at_once // 4)
                continue
            items += page["items"]
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return {**page, "items": items}

    def find(self, path: str) -> Any | None:
        """Like get; None for a missing object."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def delete(self, path: str, **query: str) -> bool:
        """Delete; False for a missing object."""
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
        user: str = "",
    ) -> Any:
        """Send one request, repeated after temporary errors; returns the JSON response. Raises ApiError.

        ``user``: the name of a node's user, in whose name the administrator sends it.

        A pod's log is the ``message`` of the response. It ends where the limits for logs end it, and is not requested
        again from a kubelet that sends nothing.
        """
        if not is_path(path):
            raise ApiError(0, f"{path!r} is not a path of the API")
        deadline = time.monotonic() + self._patience_s
        repeated = False
        while True:
            try:
                return self._call(method, path, body, query, content_type, user)
            except ApiError as error:
                if error.status == _CONFLICT and method == "POST" and repeated:
                    return {}  # the first attempt had succeeded
                sends_nothing = is_log(path) and isinstance(error.__cause__, TimeoutError)
                if sends_nothing or error.is_too_large or error.status not in _TEMPORARY or time.monotonic() > deadline:
                    raise
            repeated = True
            time.sleep(1)

    def _call(
        self, method: str, path: str, body: Any | None, query: dict[str, str] | None, content_type: str, user: str
    ) -> Any:
        target = f"{path}{'&' if '?' in path else '?'}{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body)
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if user:
            headers |= {"Impersonate-User": user, "Impersonate-Group": "system:nodes"}
        if self._token_file:
            headers["Authorization"] = f"Bearer {(disk.read(self._token_file) or '').strip()}"
        for is_last_attempt in (False, True):
            is_new = self._connection is None
            try:
                connection = self._connect()
                connection.request(method, target, data, headers)
                if is_log(path):
                    response, text = _log(connection)
                    self.close()
                else:
                    response = connection.getresponse()
                    text = _content(response, self._limits)
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # The server may have closed a connection that was kept open. A server that hangs has the request.
                if is_last_attempt or is_new or isinstance(error, TimeoutError):
                    raise ApiError(0, f"{self._where}: {error}") from error
        document: Any = {"message": text.decode("utf-8", "replace").strip()}
        # A log may look like JSON.
        if not is_log(path) or response.status >= _FIRST_ERROR:
            with contextlib.suppress(ValueError, RecursionError):
                document = json.loads(text) if text else {}
        if response.status >= _FIRST_ERROR:
            # A node may send anything.
            message = document.get("message") if isinstance(document, dict) else None
            raise ApiError(response.status, (message if isinstance(message, str) else "") or response.reason)
        return document

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> http.client.HTTPSConnection:
        """The connection, opened to the first server that accepts it; raises as that to the last one."""
        if self._connection is not None:
            return self._connection
        for server in self._servers:
            address = urlsplit(server)
            host, port = address.hostname or "", address.port or 443
            self._where = f"{host}:{port}"
            is_last = server == self._servers[-1]
            limit = self._limits.call_s if is_last else min(self._limits.call_s, _CONNECT_S)
            connection = http.client.HTTPSConnection(host, port, timeout=limit, context=self._context)
            try:
                connection.connect()
            except (OSError, http.client.HTTPException):
                connection.close()
                if is_last:
                    raise
                continue
            connection.sock.settimeout(self._limits.call_s)
            break
        self._connection = connection
        return connection


def _content(response: http.client.HTTPResponse, limits: Limits) -> bytes:
    """The body of a response; raises TimeoutError for one beyond the limits, and HTTPException."""
    deadline = time.monotonic() + limits.whole_s
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(1 << 20):
        pieces.append(piece)
        size += len(piece)
        if size > limits.most:
            raise TooLarge("a response that does not end")
        if time.monotonic() > deadline:
            raise TimeoutError("a response that does not end")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    # Nothing is left: this lets the connection take the next request.
    response.read()
    return b"".join(pieces)


def _log(connection: http.client.HTTPSConnection) -> tuple[http.client.HTTPResponse, bytes]:
    """The response to a request for a log, and what arrives of the log within its limits.

    Raises TimeoutError if no response begins, and HTTPException. The connection can take no other request then.
    """
    deadline = time.monotonic() + _OF_LOG.whole_s
    # The response may take it away from the connection.
    channel = connection.sock
    channel.settimeout(_OF_LOG.call_s)
    response = connection.getresponse()
    log = bytearray()
    with contextlib.suppress(TimeoutError):
        while len(log) < _OF_LOG.most and (left := deadline - time.monotonic()) > 0:
            channel.settimeout(left)
            piece = response.read1(1 << 16)
            if not piece:
                break
            log += piece
    return response, bytes(log[: _OF_LOG.most])


def admin(patience_s: float = _PATIENCE_S) -> Client:
    """The administrator's client on a control-plane machine; raises MachineProblem on another machine."""
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        raise MachineProblem(
            f"{kubeconfig.ADMIN} does not exist on this machine",
            "a control plane",
            "create one first: gpunodes init-master",
        )
    return Client(config, patience_s)


def local(address: str, patience_s: float = 0.0) -> Client:
    """The administrator's client of the API server on this machine, wherever the cluster's endpoint leads."""
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        raise MachineProblem(f"{kubeconfig.ADMIN} does not exist on this machine", "a control plane")
    return Client(replace(config, server=f"https://{address}:{PORT}"), patience_s)


def local_problem(address: str) -> str:
    """Why the API server on this machine is not ready, "" if it is."""
    client = local(address)
    try:
        client.get("/readyz")
    except ApiError as error:
        return str(error.problem.found)
    finally:
        client.close()
    return ""


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a client certificate. ssl reads certificates from files only: this file is in memory, never on a disk."""
    descriptor = os.memfd_create("gpunodes-client")
    try:
        os.write(descriptor, (certificate + "\n" + key).encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
