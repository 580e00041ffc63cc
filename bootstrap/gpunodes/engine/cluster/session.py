"""A session with the Kubernetes API, over a control plane that answers.

It uses one control plane, the first in the inventory's order, until that does not respond: its machine is unreachable
or refuses the login, its program returns no valid response in time, it runs no cluster, or its API is down. Then it
goes on with another one, in the middle of a repair, too. A machine of another cluster is never used: requests name the
CA of the cluster, and the program refuses them where another CA is configured, before it contacts an API.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpunodes.engine.cluster import shapes
from gpunodes.engine.cluster.connection import (
    CALL_S,
    INVALID,
    NO_CLUSTER,
    NO_SESSION,
    OTHER_CLUSTER,
    TOO_LARGE,
    Connected,
    Connects,
    Response,
)

TURN_S = 15.0
"""Time limit in seconds for a response of one control plane while there are others to try.

A Lease is renewed every 15 s and counts as lost after 50: one control plane that hangs costs no lock.
"""
_OK = 200
_API_DOWN = 0
# An API server without its etcd, or for which the credentials on its machine have expired: another one may work.
_BROKEN = frozenset({401, 500, 503, 504})
_ONCE = re.compile(r"/(eviction|events)$")


class Session:
    """A session over one or several control planes; connections open at the first request. Thread-safe."""

    def __init__(
        self,
        transports: Connects | Sequence[Connects],
        ca: str = "",
        remember: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``ca`` is the hash of the CA that this cluster had last, "" if unknown; ``remember`` is told a new one.

        Both are for several control planes: a single one may have been created anew.
        """
        several = transports if isinstance(transports, Sequence) else [transports]
        self._connections = [each.connect() for each in several]
        self._current = self._connections[0]
        self._failed: dict[Connected, float] = {}
        """When a control plane last failed to respond, by the monotonic clock."""
        self._ca = ca
        self._confirmed = False
        """Whether a control plane of the cluster has responded in this session."""
        self._remember = remember
        self._mutex = threading.Lock()
        self.failures: dict[str, str] = {}
        """Why control planes, by the names of their machines, did not respond when they were last tried."""
        self.calls = 0
        """The number of requests; tests measure it."""

    @property
    def machine(self) -> str:
        """The control plane in use: that which responded last, or the first one."""
        return self._current.machine

    @property
    def responded(self) -> bool:
        """Whether a control plane has responded; always false for a single one."""
        return self._confirmed

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        """Send a request; the status is 0 or less when no control plane responds.

        Within one call every control plane is tried once, except for what must be sent at most once (``is_sent_once``).
        """
        fields = {"method": method, "path": path, "body": body, "type": kind, "keep": list(keep)}
        with self._mutex:
            self.calls += 1
        if method == "LOCK":
            return self._lock_holder(fields)
        response, found = self._try_each(fields)
        if response is None and self._accepts_new_ca(found):
            response, found = self._try_each(fields)
        return response or self._together(found)

    def check_others(self, path: str) -> None:
        """Read ``path`` over the control planes that are not in use, at once: ``failures`` then has all that fail."""
        fields: dict[str, Any] = {"method": "GET", "path": path, "body": None, "type": "application/json", "keep": []}
        current = self._current
        others = [each for each in self._connections if each is not current]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            list(pool.map(lambda each: self._ask(each, fields, TURN_S), others))
        with self._mutex:
            self._current = current

    def close(self) -> None:
        """End the session."""
        for each in self._connections:
            each.close()

    def _try_each(self, fields: Mapping[str, Any]) -> tuple[Response | None, Mapping[str, Response]]:
        """The response of the first control plane that has one; None, and why each that was tried has none."""
        found: dict[str, Response] = {}
        order = self._order()
        if is_sent_once(str(fields["method"]), str(fields["path"])):
            order = order[:1]
        for number, connection in enumerate(order, 1):
            response = self._ask(connection, fields, CALL_S if number == len(order) else TURN_S)
            if not _is_failure(response):
                return response, found
            found[connection.machine] = response
        return None, found

    def _ask(self, connection: Connected, fields: Mapping[str, Any], limit_s: float) -> Response:
        """The response of one control plane; from it follows which one is used next."""
        if len(self._connections) == 1:
            return connection.request({**fields, "ca": ""}, limit_s)
        response = self._checked(fields, connection.request({**fields, "ca": self._ca}, limit_s))
        new_ca = ""
        with self._mutex:
            if _is_failure(response):
                self._failed[connection] = time.monotonic()
                self.failures[connection.machine] = response.error
                if connection is self._current:
                    self._current = self._order_now()[0]
            elif fields["method"] != "LOCK":
                self._failed.pop(connection, None)
                self.failures.pop(connection.machine, None)
                self._current, self._confirmed = connection, True
                if not self._ca:
                    self._ca = new_ca = response.ca
        if new_ca:
            self._remember(new_ca)
        return response

    def _checked(self, fields: Mapping[str, Any], response: Response) -> Response:
        """A response, or why it is none: of another cluster, or not of a Kubernetes API."""
        if response.status <= 0 and response.status != TOO_LARGE:
            return response
        # The program refuses such a request itself, unless it was sent before the CA was known.
        no_cluster = fields["method"] == "LOCK" and not response.ca
        if self._ca not in ("", response.ca) and not no_cluster:
            return Response(OTHER_CLUSTER, None, "it belongs to another cluster", response.time, response.ca)
        if response.status == _OK and (
            wrong := shapes.violation(str(fields["method"]), str(fields["path"]), response.body)
        ):
            return Response(INVALID, None, wrong, response.time)
        return response

    def _order(self) -> list[Connected]:
        with self._mutex:
            return self._order_now()

    def _order_now(self) -> list[Connected]:
        """The control planes in the order in which they are tried: the one in use, then those that did not fail."""
        return sorted(self._connections, key=lambda each: (self._failed.get(each, 0.0), each is not self._current))

    def _accepts_new_ca(self, found: Mapping[str, Response]) -> bool:
        """Whether the cluster was created anew: a majority of its control planes responds, with one new CA or none.

        One machine of another cluster among them is not enough for that.
        """
        others = {response.ca for response in found.values() if response.status == OTHER_CLUSTER}
        responded = sum(response.status in (OTHER_CLUSTER, NO_CLUSTER) for response in found.values())
        with self._mutex:
            if self._confirmed or len(others) != 1 or responded <= len(self._connections) // 2:
                return False
            self._ca, self._failed = others.pop(), {}
            new = self._ca
        self._remember(new)
        return True

    def _together(self, found: Mapping[str, Response]) -> Response:
        """One response for several control planes without one."""
        if len(self._connections) == 1:
            return next(iter(found.values()))
        # What may pass comes first. Once the cluster has responded, a machine of another one only is missing.
        other = [] if self._confirmed else [OTHER_CLUSTER]
        ranks = [*other, *_BROKEN, _API_DOWN, *([NO_SESSION] if self._confirmed else []), INVALID, NO_CLUSTER]
        first = min(found.values(), key=lambda each: ranks.index(each.status) if each.status in ranks else len(ranks))
        error = "; ".join(f"{machine}: {response.error}" for machine, response in found.items())
        return Response(first.status, None, error, first.time)

    # The lock of commands that found no API

    def _lock_holder(self, fields: Mapping[str, Any]) -> Response:
        """The holder of the lock over SSH (engine/group_lock.py).

        Its holder has a majority of the control planes, possibly not the one in use: so many are read that one of every
        majority is among them.
        """
        needed = len(self._connections) - len(self._connections) // 2
        found: dict[str, Response] = {}
        last: Response | None = None
        for connection in self._order():
            response = self._ask(connection, fields, TURN_S if len(self._connections) > 1 else CALL_S)
            if response.status != _OK:
                found[connection.machine] = response
                continue
            last, needed = response, needed - 1
            if response.body is not None or not needed:
                return response
        together = self._together(found) if found else last
        assert together is not None  # noqa: S101 - for the type checker
        if len(self._connections) == 1:
            return together
        return Response(
            NO_SESSION,
            None,
            f"another command may hold a lock there: too few of the {len(self._connections)} control planes respond "
            f"({together.error})",
            together.time,
        )


def _is_failure(response: Response) -> bool:
    """Whether another control plane may respond where this one did not; what is too large is so on each of them."""
    return response.status in _BROKEN or (response.status <= 0 and response.status != TOO_LARGE)


def is_sent_once(method: str, path: str) -> bool:
    """Whether a request must not be repeated on another control plane when it is unknown whether it had an effect.

    An Event gets a new name each time: two would exist. A second eviction counts again against a disruption budget, and
    the drain repeats it itself. Everything else may be repeated: a change names the resource version or the uid of what
    it changes, and a new Lease has a fixed name, so a second attempt has no effect, and its sender reads what is there.
    """
    return method == "POST" and _ONCE.search(path.partition("?")[0]) is not None
