"""Locks in the cluster: Lease objects, renewed while they are held, that expire when their holder dies.

All times are the control plane's: two operators' own clocks need not agree.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpunodes.engine.cluster import Cluster, NoAnswer, Refused
from gpunodes.errors import GpunodesError

DURATION_S = 60.0
"""Seconds without renewal after which somebody else may take a lock."""
_NAMESPACE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_LABEL = ("app.kubernetes.io/managed-by", "gpunodes")
_RECORD = "gpunodes.dev/record"
_PREFIX = "gpunodes-repair-"
_ALL = "gpunodes-repairs"
"""The lock that is held for the moment in which it is decided who is repaired."""
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_CONFLICT = 409
_NOT_FOUND = 404


class Held(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """Somebody else holds a lock."""

    def __init__(self, what: str, who: str) -> None:
        super().__init__(f"{what} is being repaired by {who}", "one at a time", "wait for it to end")
        self.who = who


class Lost(GpunodesError):  # noqa: N818 - as above
    """A lock of ours was taken by somebody else, or could not be renewed in time."""


def identity() -> str:
    """Who we are, in a lock: user@host for people, and what tells whether this process still lives."""
    me = f"{getpass.getuser()}@{socket.gethostname()}"
    return f"{me}/{_boot()}/{os.getpid()}/{_started(os.getpid())}/{secrets.token_hex(4)}"


def who(holder: str) -> str:
    """The person in a holder's identity."""
    return holder.partition("/")[0] or "somebody"


def dead_here(holder: str) -> bool:
    """Whether the holder was a process of this machine that has ended: then its lock need not expire first."""
    parts = holder.split("/")
    if len(parts) != 5 or not parts[2].isdigit():  # noqa: PLR2004 - the parts of an identity
        return False
    name, boot, pid, started, _ = parts
    if name.rpartition("@")[2] != socket.gethostname():
        return False
    return boot != _boot() or _started(int(pid)) != started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks (proc(5), stat, field 22); "" when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock as it stands in the cluster."""

    node: str
    holder: str
    live: bool
    record: str
    """The text of the repair's record."""


@dataclass(slots=True)
class _Own:
    lease: Mapping[str, Any]
    record: str
    renewed: float
    guard: threading.Lock = field(default_factory=threading.Lock)


class Leases:
    """The locks of this command. A thread renews them; close() ends it and leaves what is still held to expire."""

    def __init__(self, cluster: Cluster, duration_s: float = DURATION_S) -> None:
        self._cluster = cluster
        self._duration_s = duration_s
        self._me = identity()
        self._own: dict[str, _Own] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def seen(self) -> list[Seen]:
        """All locks on nodes, by one request."""
        query = f"?labelSelector={quote('='.join(_LABEL), safe='')}"
        answer = self._cluster.call_once("GET", _NAMESPACE + query)
        found = []
        for item in answer.body["items"]:
            name = item["metadata"]["name"]
            if name.startswith(_PREFIX):
                holder = item["spec"].get("holderIdentity") or ""
                record = (item["metadata"].get("annotations") or {}).get(_RECORD, "")
                found.append(Seen(name.removeprefix(_PREFIX), holder, self._live(item, answer.time), record))
        return found

    def take(self, node: str, record: str) -> str:
        """Lock a node; the record that a dead holder left there, "" for none. Raises Held."""
        name = _PREFIX + node
        left = self._take(name, record, node)
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_all, daemon=True)
            self._thread.start()
        return left

    def write(self, node: str, record: str) -> None:
        """Put a record into a lock of ours, and renew it. Raises Lost when it is ours no more."""
        own = self._own.get(_PREFIX + node)
        if own is None:
            raise Lost(f"the lock on {node} is not ours", "a lock that is held", "run the command again to go on")
        with own.guard:
            own.record = record
            self._renew(_PREFIX + node, own)

    def confirm(self, node: str) -> None:
        """Raise Lost unless the lock is surely still ours; for the moment before something is done to a machine."""
        own = self._own.get(_PREFIX + node)
        if own is None or time.monotonic() - own.renewed > self._duration_s / 2:
            self.write(node, own.record if own else "")

    def release(self, node: str) -> None:
        """Let a lock go; one that is not ours any more stays."""
        self._release(_PREFIX + node)

    def holds(self, node: str) -> bool:
        """Whether we took this lock and have not let it go."""
        return _PREFIX + node in self._own

    @contextlib.contextmanager
    def deciding(self, patience_s: float = 60.0) -> Iterator[None]:
        """Hold the lock of the decision while inside: two commands never decide at once. Raises Held."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._take(_ALL, "", "it is decided what")
                break
            except Held:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        try:
            yield
        finally:
            with contextlib.suppress(NoAnswer, Refused):
                self._release(_ALL)

    def close(self) -> None:
        """Renew nothing any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _live(self, item: Mapping[str, Any], now: float) -> bool:
        spec = item["spec"]
        holder = spec.get("holderIdentity") or ""
        if not holder or dead_here(holder):
            return False
        renewed = dt.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=dt.UTC).timestamp()
        return bool(renewed + spec["leaseDurationSeconds"] > now)

    def _body(self, name: str, record: str, now: float, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        stamp = dt.datetime.fromtimestamp(now, dt.UTC).strftime(_TIME)
        before = (base or {}).get("spec", {})
        ours = before.get("holderIdentity") == self._me
        metadata: dict[str, Any] = {"name": name, "labels": dict([_LABEL]), "annotations": {_RECORD: record}}
        if base is not None:
            metadata["resourceVersion"] = base["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._me,
                "leaseDurationSeconds": round(self._duration_s),
                "acquireTime": before.get("acquireTime", stamp) if ours else stamp,
                "renewTime": stamp,
                "leaseTransitions": before.get("leaseTransitions", 0) + (0 if ours or base is None else 1),
            },
        }

    def _take(self, name: str, record: str, what: str) -> str:
        # The control plane's clock, as any answer tells it.
        for _ in range(5):
            try:
                found = self._cluster.call_once("GET", f"{_NAMESPACE}/{name}")
            except Refused as error:
                if error.status != _NOT_FOUND:
                    raise
                found = None
            try:
                if found is None:
                    answer = self._cluster.call_once("POST", _NAMESPACE, self._body(name, record, self._now()))
                else:
                    holder = found.body["spec"].get("holderIdentity") or ""
                    if holder != self._me and self._live(found.body, found.time):
                        raise Held(what, who(holder))
                    body = self._body(name, record, found.time, found.body)
                    answer = self._cluster.call_once("PUT", f"{_NAMESPACE}/{name}", body)
            except Refused as error:
                if error.status not in (_CONFLICT, _NOT_FOUND):
                    raise
                continue  # somebody was quicker: look who
            self._own[name] = _Own(answer.body, record, time.monotonic())
            if found is None:
                return ""
            return str((found.body["metadata"].get("annotations") or {}).get(_RECORD, ""))
        raise Held(what, "others who were quicker")

    def _now(self) -> float:
        # A Lease that is made needs a time before any answer about it brought one.
        return self._cluster.session.ask("GET", "/version").time

    def _renew_all(self) -> None:
        while not self._stop.wait(self._duration_s / 4):
            for name, own in list(self._own.items()):
                # What cannot be renewed now is confirmed before the next step, or lost there.
                with contextlib.suppress(GpunodesError), own.guard:
                    if name in self._own:
                        self._renew(name, own)

    def _renew(self, name: str, own: _Own) -> None:
        deadline = time.monotonic() + self._duration_s
        while True:
            try:
                found = self._cluster.call_once("GET", f"{_NAMESPACE}/{name}")
                if found.body["spec"].get("holderIdentity") != self._me:
                    break
                body = self._body(name, own.record, found.time, found.body)
                own.lease = self._cluster.call_once("PUT", f"{_NAMESPACE}/{name}", body).body
            except NoAnswer:
                # Nobody else can take it either while nobody answers.
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
                continue
            except Refused as error:
                if error.status == _NOT_FOUND:
                    break
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                continue
            own.renewed = time.monotonic()
            return
        self._own.pop(name, None)
        raise Lost(
            f"the lock {name} was taken by somebody else",
            "a lock that is held to the end",
            "see `gpunodes repair --resume`",
        )

    def _release(self, name: str) -> None:
        own = self._own.pop(name, None)
        if own is None:
            return
        with own.guard:
            body = {"preconditions": {"uid": own.lease["metadata"]["uid"]}}
            try:
                holder = self._cluster.call_once("GET", f"{_NAMESPACE}/{name}").body["spec"].get("holderIdentity")
                if holder == self._me:
                    self._cluster.call_once("DELETE", f"{_NAMESPACE}/{name}", body)
            except Refused as error:
                if error.status not in (_NOT_FOUND, _CONFLICT):
                    raise
