"""The API of a cluster that others made, with a kubeconfig file of the user: HTTPS from the controller, without SSH.

The Kubernetes client library reads the file (contexts, certificates, tokens, exec plugins) and makes the connections,
through a proxy too. Requests and responses are those of ``connection``: everything above is the same for both.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes.ansible.module_utils.kube_api import is_path
from gpunodes.ansible.module_utils.session import pruned
from gpunodes.engine.cluster import exec_plugin, kubeconfig_file
from gpunodes.engine.cluster.connection import CALL_S, INVALID, OTHER_API, TOO_LARGE, Response
from gpunodes.engine.cluster.kubeconfig_file import Selected
from gpunodes.errors import GpunodesError, WrongInput

LIBRARY = "gpunodes[kubeconfig]"
"""The extra with the client library."""
_CONNECT_S = 10.0
_READ_S = 30.0
_MAX_BYTES = 32 << 20
"""Maximum size of a response."""
_MUCH_BYTES = 1 << 20
"""An API server that has sent more when a time limit ends is up: less can be requested of it."""
_RELOAD_S = 10.0
"""Seconds after which the credentials are read again if the API refuses them."""
_LATEST = 32503680000.0
"""The year 3000, in seconds since 1970: times that follow from it are still in a calendar."""
_LONGEST = 1000
"""Characters of an error's message."""
_UNAUTHORIZED = 401
_FIRST_REDIRECT, _FIRST_ERROR = 300, 400
_SYSTEM = "/api/v1/namespaces/kube-system"


@dataclass(frozen=True, slots=True)
class ByKubeconfig:
    """How a session reaches the API: a kubeconfig file, and a context in it ("": the current one).

    ``is_known`` gets the uid of the cluster's namespace kube-system, which no other cluster has and a renewed CA does
    not change, and returns whether it is the cluster that is meant.
    """

    path: Path
    context: str = ""
    is_known: Callable[[str], bool] = lambda _: True

    @property
    def machine(self) -> str:
        """For messages."""
        return f"the API of {self.path}"

    def connect(self) -> DirectConnection:
        """The connection; it opens at its first request."""
        return DirectConnection(self)


class DirectConnection:
    """Requests by HTTPS, over connections that are kept. Thread-safe."""

    def __init__(self, by: ByKubeconfig) -> None:
        self.machine = by.machine
        self._by = by
        self._mutex = threading.Lock()
        self._clients: list[_Client] = []
        """The last one is in use; requests of other threads may still use the others."""
        self._loaded = 0.0
        self._reloading = threading.Lock()
        self._uid = ""
        """That of the cluster, once it is confirmed: later credentials of the file must lead to the same one."""

    def request(self, fields: Mapping[str, Any], limit_s: float = CALL_S) -> Response:
        """Send a request; the status is 0 or less when there is no response. Raises WrongInput for a wrong file.

        The cluster is confirmed first: a wrong context must not lead to nodes of the same names. Nothing can hold the
        lock over SSH (LOCK): it is on control planes of the inventory, which has none.
        """
        if fields["method"] == "LOCK":
            return Response(200, None, "", time.time())
        if not is_path(str(fields["path"])):
            return Response(0, None, f"{fields['path']!r} is not a path of the API", time.time())
        limit_s = min(limit_s, _READ_S)
        with self._mutex:
            if not self._uid:
                if not self._clients:
                    self._clients.append(self._load(""))
                uid = self._confirm(self._clients[-1], limit_s)
                if isinstance(uid, Response):
                    if uid.status == _UNAUTHORIZED and self._is_old():
                        # The next request reads them again.
                        self._clients.pop().close()
                    return uid
                self._uid = uid
        return self._send(fields, limit_s)

    def close(self) -> None:
        """End the connections."""
        for each in self._clients:
            each.close()

    def _confirm(self, client: _Client, limit_s: float) -> str | Response:
        """The uid of the cluster if it is the one that is meant, else the response that says why not."""
        found = client.send({"method": "GET", "path": _SYSTEM, "body": None, "type": "", "keep": []}, limit_s)
        if found.status != 200:  # noqa: PLR2004 - as the program on a control plane has it
            return found
        metadata = found.body.get("metadata") if isinstance(found.body, Mapping) else None
        uid = metadata.get("uid") if isinstance(metadata, Mapping) else None
        if not isinstance(uid, str) or not uid.isascii() or not 0 < len(uid) <= 100:  # noqa: PLR2004 - a uid has 36
            return Response(INVALID, None, "its namespace kube-system has no uid", found.time)
        if self._by.is_known(uid) if not self._uid else uid == self._uid:
            return uid
        return Response(OTHER_API, None, f"{self.machine} is that of another cluster", found.time)

    def _is_old(self) -> bool:
        return time.monotonic() - self._loaded >= _RELOAD_S

    def _send(self, fields: Mapping[str, Any], limit_s: float) -> Response:
        """One response; with fresh credentials if the API does not accept those at hand: a token may have ended."""
        client = self._clients[-1]
        response = client.send(fields, limit_s)
        if response.status != _UNAUTHORIZED:
            return response
        with self._reloading:
            if self._clients[-1] is client:
                if not self._is_old():
                    return response
                refusal = self._reload(client, limit_s)
                if refusal is not None:
                    return refusal
        return self._clients[-1].send(fields, limit_s)

    def _reload(self, client: _Client, limit_s: float) -> Response | None:
        """Read the credentials of the same context again; the response that says why they are not used, or None.

        The file may have been changed since, to another cluster with nodes of the same names.
        """
        try:
            fresh = self._load(client.context, asks=False)
        except GpunodesError as error:
            # The threads that renew locks go on: the file may be being replaced.
            return Response(_UNAUTHORIZED, None, f"its credentials have ended; {error.problem.found}", time.time())
        found = self._confirm(fresh, limit_s)
        if isinstance(found, Response):
            fresh.close()
            return found
        self._clients.append(fresh)
        return None

    def _load(self, context: str, *, asks: bool = True) -> _Client:
        self._loaded = time.monotonic()
        return _Client(self._by, context or self._by.context, asks=asks)


class _Client:
    """The client library with one context of a kubeconfig file."""

    def __init__(self, by: ByKubeconfig, context: str, *, asks: bool) -> None:
        """Raises WrongInput without the library, and as ``kubeconfig_file.selected``."""
        try:
            from kubernetes import client
            from kubernetes.config import kube_config
            from kubernetes.config.config_exception import ConfigException

            from gpunodes.engine.cluster import deadline
        except ImportError as error:
            raise WrongInput(
                f"the Python package {error.name or 'kubernetes'} is not installed, and {by.path} needs it",
                f"gpunodes with its extra, {LIBRARY}",
                f"install it where gpunodes is: pip install '{LIBRARY}'",
            ) from error
        try:
            self._selected: Selected = kubeconfig_file.selected(by.path, context, asks=asks)
        except exec_plugin.Failed as error:
            raise _unusable(by, str(error)) from None
        self.context = self._selected.context
        # Its types differ between versions of the library.
        load: Any = kube_config.load_kube_config_from_dict
        self._configuration: Any = client.Configuration()
        try:
            load(self._selected.document, client_configuration=self._configuration, persist_config=False)
            self._pool = client.rest.RESTClientObject(self._configuration).pool_manager
            self._pool.pool_classes_by_scheme = {"https": deadline.Pool}
            if self._selected.folder:
                self._read_files()
        except (ConfigException, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            self._selected.close()
            # Its text may quote a credential.
            raise _unusable(by, type(error).__name__) from error
        if not self._configuration.auth_settings() and not self._configuration.cert_file:
            # The library would go on without credentials.
            self._selected.close()
            raise _unusable(by, "none of them is a token or a certificate with its key")

    def _read_files(self) -> None:
        """Read certificates and keys now, and end their files: those on a disk must not wait for a connection."""
        given = self._pool.connection_pool_kw
        names = ("ca_certs", "cert_file", "key_file")
        ca, certificate, key = (given.pop(each, None) for each in names)
        context = ssl.create_default_context(cafile=ca)
        if certificate:
            context.load_cert_chain(certificate, key)
        given["ssl_context"] = context
        self._selected.close()

    def close(self) -> None:
        """End the connections, and forget the credentials."""
        self._pool.clear()
        self._selected.close()

    def send(self, fields: Mapping[str, Any], limit_s: float) -> Response:
        """One response; redirections are not followed: a cluster must not choose what the controller requests."""
        import urllib3

        from gpunodes.engine.cluster import deadline

        headers = {"Accept": "application/json", "Content-Type": fields["type"] or "application/json"}
        headers |= {each["key"]: each["value"] for each in self._configuration.auth_settings().values()}
        body = None if fields["body"] is None else json.dumps(fields["body"])
        data = bytearray()
        try:
            with deadline.within(limit_s):
                response = self._pool.request(
                    str(fields["method"]),
                    f"{self._selected.server}{fields['path']}",
                    body=body,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=_CONNECT_S, read=limit_s),
                    redirect=False,
                    retries=False,
                    preload_content=False,
                )
                with contextlib.closing(response):
                    for chunk in response.stream(1 << 16):
                        data += chunk
                        if len(data) > _MAX_BYTES:
                            return Response(TOO_LARGE, None, "the response is too large", time.time())
                    response.release_conn()
        except (TimeoutError, urllib3.exceptions.ReadTimeoutError):
            why = f"{self._selected.server}: no complete response in {limit_s:.0f} s"
            return Response(TOO_LARGE if len(data) > _MUCH_BYTES else 0, None, why, time.time())
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            # A server responds, with a certificate of another CA: that is not an API that is down.
            is_other = any(isinstance(each, ssl.SSLCertVerificationError) for each in (error, *error.args))
            return Response(OTHER_API if is_other else 0, None, f"{self._selected.server}: {why}", time.time())
        return _response(int(response.status), data, response.headers.get("Date", ""), fields["keep"])


def _unusable(by: ByKubeconfig, why: str) -> WrongInput:
    return WrongInput(
        f"the credentials in {by.path} cannot be used: {why}",
        "a kubeconfig with which kubectl works",
        f"try `kubectl --kubeconfig {by.path} get nodes`",
    )


def _response(status: int, data: bytearray, date: str, keep: list[str]) -> Response:
    """The response as ``connection`` has it; an API server names its time in each one."""
    try:
        moment = email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        moment = 0.0
    if not 0 < moment < _LATEST:
        return Response(INVALID, None, "the response names no time", time.time())
    if _FIRST_REDIRECT <= status < _FIRST_ERROR:
        return Response(INVALID, None, f"it redirects to another address (status {status})", moment)
    try:
        document = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        document = {"message": data.decode("utf-8", "replace").strip()}
    if status >= _FIRST_ERROR:
        message = str(document.get("message") or "") if isinstance(document, Mapping) else ""
        return Response(status, None, f"the Kubernetes API reports: {message[:_LONGEST] or status}", moment)
    if keep and isinstance(document, Mapping) and isinstance(document.get("items"), list):
        items = [pruned(each, keep) if isinstance(each, Mapping) else each for each in document["items"]]
        document = {**document, "items": items}
    return Response(200, document, "", moment)
