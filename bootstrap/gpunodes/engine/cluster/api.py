"""Requests to the Kubernetes API: sent until a valid response arrives, or an error is certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunodes.engine.cluster import pages, shapes
from gpunodes.engine.cluster.connection import NO_CLUSTER, NO_SESSION, OTHER_API, OTHER_CLUSTER, TOO_LARGE, Response
from gpunodes.engine.cluster.errors import NoCluster, NoResponse, NoSession, OtherCluster, Refused, TooLarge, invalid
from gpunodes.engine.cluster.session import Session
from gpunodes.errors import GpunodesError

OnWait = Callable[[str], None]
"""Takes the reason when a request begins to wait for a response."""
PATIENCE_S = 60.0
OK = 200
NOT_FOUND = 404
CONFLICT = 409
TOO_MANY_REQUESTS = 429
# No response; 403 from an API server that has not loaded its RBAC roles yet; overloaded; etcd timed out.
_TRANSIENT = frozenset({0, NO_SESSION, 403, TOO_MANY_REQUESTS, 500, 503, 504})


class Api:
    """The cluster's API, over one session.

    Every method raises NoResponse when the control plane does not respond for ``patience_s``, and Refused for other
    errors of the API.
    """

    def __init__(self, session: Session, patience_s: float = PATIENCE_S, on_wait: OnWait = lambda _: None) -> None:
        self.session = session
        self._patience_s = patience_s
        self._on_wait = on_wait

    def call_once(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Response:
        """Send a request once; raises NoResponse or Refused without a retry."""
        response = self.session.request(method, path, body, kind)
        if response.status != OK:
            raise _error(method, path, response)
        return _checked(method, path, response)

    def list_once(self, path: str) -> pages.Listed:
        """All objects of a list; each request is sent as by ``call_once``."""
        return pages.read_all(lambda page: self.call_once("GET", page), path)

    def lock_holder(self) -> Mapping[str, Any] | None:
        """The holder of the lock over SSH (engine/locks.py), as recorded in the lock file; None when it is free."""
        body = self.call_once("LOCK", "").body
        return body if isinstance(body, Mapping) else None

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        keep: Sequence[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> Response:
        """Send a request until a response arrives; ``check`` is called before each attempt, and may raise to stop."""
        deadline = time.monotonic() + self._patience_s
        waiting = False
        while True:
            check()
            response = self.session.request(method, path, body, kind, keep)
            if response.status == OK:
                return _checked(method, path, response)
            if response.status not in _TRANSIENT or time.monotonic() > deadline:
                break
            if not waiting:
                self._on_wait(f"{response.error}; waiting up to {self._patience_s:.0f} seconds for the control plane")
                waiting = True
            time.sleep(1)
        raise _error(method, path, response)

    def _list(self, path: str, keep: Sequence[str] = (), at_once: int = pages.AT_ONCE) -> list[dict[str, Any]]:
        """All objects of a list, with the fields of ``keep``; all lists are read by this, or by ``list_once``."""
        return pages.read_all(lambda page: self._call("GET", page, keep=keep), path, at_once).items

    def _find(self, path: str, *, wait: bool = True) -> Any | None:
        try:
            return (self._call if wait else self.call_once)("GET", path).body
        except Refused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _delete(self, path: str) -> None:
        """Delete an object; one that is gone is no error."""
        try:
            self._call("DELETE", path)
        except Refused as error:
            if error.status != NOT_FOUND:
                raise


def _checked(method: str, path: str, response: Response) -> Response:
    """The response, after a check that its body fits the request; raises NoResponse."""
    if violation := shapes.violation(method, path, response.body):
        raise invalid(
            f"the response of the control plane to {method} {path.partition('?')[0]} is not valid: {violation}"
        )
    return response


def _error(method: str, path: str, response: Response) -> GpunodesError:
    """The error for any other response than a good one."""
    if response.status == TOO_LARGE:
        return TooLarge(f"the response of the control plane to {method} {path.partition('?')[0]} is too large")
    return _no_response(response) if response.status <= 0 else Refused(response.status, response.error)


def _no_response(response: Response) -> NoResponse:
    if response.status == OTHER_API:
        return OtherCluster(
            response.error,
            "the cluster that this inventory had before",
            "correct the kubeconfig or its context; a new cluster needs an inventory file of its own",
        )
    if response.status == OTHER_CLUSTER:
        return OtherCluster(
            f"the control planes of the inventory are not of one cluster: {response.error}",
            "machines of the cluster that this inventory had before",
            "remove the others from the group control_plane, or reset them",
        )
    kind = {NO_CLUSTER: NoCluster, NO_SESSION: NoSession}.get(response.status, NoResponse)
    return kind(
        f"the control plane does not respond: {response.error}",
        "a Kubernetes API that responds",
        "restore the control plane first",
    )
