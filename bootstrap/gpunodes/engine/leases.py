"""Locks on machines: Lease objects in the cluster, renewed while they are held, that expire when their holder dies.

A lock fences its holder: before each step :meth:`Leases.confirm` renews the lock or raises, because another command may
hold a lock that was not renewed in time. The times in a Lease are those of the control plane, because the clocks of two
controllers may differ. The age of an own lock is measured by a clock that cannot be set and that runs while the
controller is suspended.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import hashlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.cluster.session import Response
from gpunodes.engine.locks import Taken, clock
from gpunodes.errors import GpunodesError

DURATION_S = 60.0
"""Seconds without renewal after which another command may take a lock."""
_MARGIN = 1 / 6
"""The last part of that time, in which an own lock already counts as lost."""
_NAMESPACE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_LABEL = ("app.kubernetes.io/managed-by", "gpunodes")
_RECORD = "gpunodes.dev/record"
_MACHINE = "gpunodes.dev/machine"
"""Annotation: the name of the machine that the holder uses."""
_ALONE = "gpunodes.dev/alone"
"""Annotation: the holder works on the control plane, so no other command may work on any machine."""
_PREFIX = "gpunodes-machine-"
_DECISION_LOCK = "gpunodes-decision"
"""The lock that a command holds while it decides which machines are repaired."""
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_CONFLICT = 409
_NOT_FOUND = 404
_MAX_NAME_LENGTH = 253
"""Maximum length of an object's name (Kubernetes, DNS subdomain names)."""
_RENEW_THREADS = 8
"""Maximum number of locks that are renewed in parallel."""


class Held(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """Another command holds a lock."""

    def __init__(self, what: str, holder: str, since: str = "") -> None:
        by = described(holder) + (f", since {since}" if since else "")
        super().__init__(f"{what} is locked by {by}", "one command or repair at a time", "wait for it to end")


class Lost(GpunodesError):  # noqa: N818 - as above
    """Another command took a lock of this command."""


class Unsure(Lost):
    """A lock of this command could not be renewed in time: another command may hold it now."""


def lock_name(machine: str, node: str = "") -> str:
    """The name of the Lease that locks a machine: from the name of its node, or else from its name in the inventory.

    So all commands use the same Lease for a machine: a node has one name, even if two inventories name its machine
    differently. A name that is invalid or too long for an object is replaced by a hash.
    """
    name = (node or machine).lower()
    if len(_PREFIX) + len(name) <= _MAX_NAME_LENGTH and re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        return _PREFIX + name
    readable = "-".join(re.findall(r"[a-z0-9]+", name))[:40].strip("-")
    return f"{_PREFIX}{readable or 'x'}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def identity(command: str) -> str:
    """The identity of this command in a lock: user@host and command, and the data to check if its process is alive."""
    name = f"{getpass.getuser()}@{socket.gethostname()}/{command}"
    return f"{name}/{_boot_and_namespace()}/{os.getpid()}/{_start_time(os.getpid())}/{secrets.token_hex(4)}"


def described(holder: str) -> str:
    """A holder's identity for messages: its command and user."""
    user, _, command = holder.rsplit("/", 4)[0].partition("/")
    return f"`gpunodes {command}` of {user}" if command else user or "an unknown user"


def dead_here(holder: str) -> bool:
    """Whether the holder was a process of the controller, in its current boot, that has ended: then its lock is free.

    Hosts may share a name, and containers a kernel: a process counts as dead only if this process could see it alive.
    """
    parts = holder.rsplit("/", 4)
    if len(parts) != 5 or not re.fullmatch("[0-9]+", parts[2]):  # noqa: PLR2004 - the parts of an identity
        return False
    name, boot, pid, start_time, _ = parts
    host = name.partition("/")[0].rpartition("@")[2]
    return host == socket.gethostname() and boot == _boot_and_namespace() and _has_ended(int(pid), start_time)


def _has_ended(pid: int, start_time: str) -> bool:
    """Whether the process with this start time has ended; /proc may hide other users' processes (proc(5), hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # a process of another user
    current = _start_time(pid)
    return bool(current) and current != start_time


def _boot_and_namespace() -> str:
    """The boot id, and the pid namespace, which decides which processes are visible (pid_namespaces(7))."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_time(pid: int) -> str:
    """The start time of a process in clock ticks (proc(5), stat, field 22); "" without a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A lock, as read from the cluster."""

    name: str
    """The name of the Lease, as of ``lock_name``."""
    machine: str
    """The name that the holder uses: of the node, or of the machine in an inventory."""
    holder: str
    since: str
    """When the holder took the lock, in the control plane's time."""
    live: bool
    alone: bool
    """The holder works on the control plane."""
    record: str
    """The text of the repair's record."""


@dataclass(slots=True)
class _Own:
    lease: Mapping[str, Any]
    machine: str
    record: str
    previous_record: str
    """The record found in the Lease, of a repair that a dead holder did not end."""
    alone: bool
    renewed: float
    """When the last successful renewal was sent, by ``clock``."""
    lost: str = ""
    """How the lock was lost, "" while it is held."""
    mutex: threading.Lock = field(default_factory=threading.Lock)


class Leases:
    """The locks of this command. A thread renews them; ``close`` ends it, and the locks still held expire later.

    Machines are given by the name from which ``lock_name`` makes the name of the Lease.
    """

    def __init__(self, cluster: Cluster, command: str, duration_s: float = DURATION_S) -> None:
        self._cluster = cluster
        self._duration_s = duration_s
        self._holder = identity(command)
        self._own: dict[str, _Own] = {}
        self._server_time = (0.0, 0.0)
        """The control plane's time in the last response, and ``clock`` when its request was sent."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def me(self) -> str:
        """The identity of this command in a Lease."""
        return self._holder

    def seen(self) -> list[ObservedLease]:
        """All locks on machines, with one request."""
        query = f"?labelSelector={quote('='.join(_LABEL), safe='')}"
        response = self._call("GET", query)
        return [
            self._observe(item, response.time)
            for item in response.body["items"]
            if item["metadata"]["name"].startswith(_PREFIX)
        ]

    def take(self, machine: str, record: str | None = None, *, alone: bool = False) -> str:
        """Lock a machine; returns the record that a dead holder left, "" for none. Raises Held and Taken.

        ``record`` replaces the record in the Lease; None keeps it, to resume its repair. ``alone`` is for work on the
        control plane: then no other command may hold a lock on any machine.
        """
        previous_record = self._take(lock_name(machine), machine, record, alone=alone)
        self._check_conflicts([machine], alone=alone)
        return previous_record

    def take_all(self, machines: Iterable[str], *, alone: bool = False) -> None:
        """Lock several machines in the order of their names, all or none of them. Raises Held and Taken."""
        taken: list[str] = []
        try:
            for machine in sorted({machine for machine in machines if not self.holds(machine)}):
                self._take(lock_name(machine), machine, None, alone=alone)
                taken.append(machine)
        except BaseException:
            self._release_all(taken)
            raise
        if taken:
            self._check_conflicts(taken, alone=alone)

    def write(self, machine: str, record: str, *, wait: bool = True) -> None:
        """Write a record into an own lock, and confirm the lock; raises as ``confirm``."""
        if own := self._own.get(lock_name(machine)):
            own.record = record
        self.confirm(machine, wait=wait)

    def confirm(self, machine: str, *, wait: bool = True) -> None:
        """Renew a lock now, before an action on the machine.

        Raises Lost when another command holds it, and Unsure when another command may hold it: the control plane has
        not responded for so long that the lock has expired or is about to. Without ``wait`` a single failed request
        raises Unsure.
        """
        self._confirm(lock_name(machine), wait=wait)

    def confirm_decision(self) -> None:
        """As ``confirm``, for the lock of ``deciding``."""
        self._confirm(_DECISION_LOCK, wait=True)

    def check(self, machine: str) -> None:
        """As ``confirm``, without a request."""
        if own := self._own.get(lock_name(machine)):
            self._check(own)

    def lost(self) -> Lost | None:
        """The error for a lost lock: Lost before Unsure; None while all locks are held."""
        found: Lost | None = None
        for own in list(self._own.values()):
            try:
                self._check(own)
            except Unsure as problem:
                found = problem
            except Lost as problem:
                return problem
        return found

    def release(self, machine: str) -> None:
        """Release a lock and delete its record; a lock that another command holds stays."""
        self._release(lock_name(machine))

    def leave(self, machine: str) -> None:
        """Release a lock if the control plane responds; the record of a dead holder stays in the Lease."""
        self._release_all([machine])

    def abandon(self, machine: str) -> None:
        """Release a lock and leave the own record in it, for the command that resumes the repair."""
        if own := self._own.get(lock_name(machine)):
            own.previous_record = own.record
        self.leave(machine)

    def release_all(self) -> None:
        """Release all locks if the control plane responds; the records of dead holders stay in the Leases."""
        self._release_all([own.machine for own in self._own.values()])

    def holds(self, machine: str) -> bool:
        """Whether this command took the lock and has not released it."""
        return lock_name(machine) in self._own

    @contextlib.contextmanager
    def holding(self, machines: Iterable[str]) -> Iterator[None]:
        """Hold the locks of several machines while inside, for a short action; raises as ``take_all``."""
        try:
            self.take_all(machines)
            yield
        finally:
            self.release_all()
            self.close()

    @contextlib.contextmanager
    def deciding(self, patience_s: float = 2 * DURATION_S) -> Iterator[None]:
        """Hold the lock of the repair decision while inside: two commands never decide at once. Raises Held."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._take(_DECISION_LOCK, "the choice of machines to repair", None, alone=False)
                break
            except Held:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        try:
            yield
        finally:
            with contextlib.suppress(NoResponse, Refused):
                self._release(_DECISION_LOCK)

    def close(self) -> None:
        """End the renewals."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # Requests

    def _call(self, method: str, path: str, body: Any = None) -> Response:
        sent = clock()
        response = self._cluster.call_once(method, _NAMESPACE + path, body)
        self._server_time = (response.time, sent)
        return response

    def now(self) -> float:
        """The control plane's time, in seconds since 1970; the controller's before the first response."""
        server_time, sent = self._server_time
        # Never early, possibly a little late: so a lock does not expire earlier than this command assumes.
        return server_time + clock() - sent if server_time else time.time()

    def _observe(self, item: Mapping[str, Any], now: float) -> ObservedLease:
        metadata, spec = item["metadata"], item["spec"]
        annotations = metadata.get("annotations") or {}
        acquired = spec.get("acquireTime") or ""
        return ObservedLease(
            name=metadata["name"],
            machine=annotations.get(_MACHINE) or metadata["name"].removeprefix(_PREFIX),
            holder=spec.get("holderIdentity") or "",
            since=acquired.partition(".")[0].replace("T", " ") + " UTC" if acquired else "",
            live=_is_live(spec, now),
            alone=_ALONE in annotations,
            record=annotations.get(_RECORD, ""),
        )

    def _body(self, own: _Own, name: str, *, renew: bool) -> dict[str, Any]:
        """The new content of the Lease, to ``renew`` or else to take it."""
        stamp = dt.datetime.fromtimestamp(self.now(), dt.UTC).strftime(_TIME)
        annotations = {_RECORD: own.record, _MACHINE: own.machine} | ({_ALONE: "true"} if own.alone else {})
        metadata: dict[str, Any] = {"name": name, "labels": dict([_LABEL]), "annotations": annotations}
        before = own.lease.get("spec", {})
        if own.lease:
            metadata["resourceVersion"] = own.lease["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": round(self._duration_s),
                "acquireTime": before.get("acquireTime", stamp) if renew else stamp,
                "renewTime": stamp,
                "leaseTransitions": (before.get("leaseTransitions") or 0) + (1 if own.lease and not renew else 0),
            },
        }

    # Taking

    def _take(self, name: str, machine: str, record: str | None, *, alone: bool) -> str:
        if not self._server_time[0]:
            # A new Lease needs the control plane's time, which only a response provides.
            sent = clock()
            self._server_time = (self._cluster.call_once("GET", "/version").time, sent)
        for _ in range(5):
            try:
                own = self._create(name, machine, record, alone=alone)
            except Refused as error:
                if error.status not in (_CONFLICT, _NOT_FOUND):
                    raise
                continue  # another command took it at the same time: read the holder
            self._own[name] = own
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_all, daemon=True)
                self._thread.start()
            return own.previous_record
        raise Held(machine, "another command that started at the same time")

    def _create(self, name: str, machine: str, record: str | None, *, alone: bool) -> _Own:
        own = _Own({}, machine, record or "", "", alone, clock())
        try:
            own.lease = self._call("POST", "", self._body(own, name, renew=False)).body
        except Refused as error:
            if error.status != _CONFLICT:
                raise
            found = self._call("GET", f"/{name}")
            seen = self._observe(found.body, found.time)
            if seen.live and seen.holder != self._holder:
                raise Held(machine, seen.holder, seen.since) from None
            own = _Own(found.body, machine, seen.record if record is None else record, seen.record, alone, clock())
            own.lease = self._call("PUT", f"/{name}", self._body(own, name, renew=False)).body
        return own

    def _check_conflicts(self, machines: list[str], *, alone: bool) -> None:
        """Release the locks on ``machines`` and raise where work on the control plane excludes other commands.

        Every command takes its locks first and checks then: of two concurrent commands at least one sees the other.
        """
        try:
            for seen in self.seen():
                if seen.live and seen.holder != self._holder and (alone or seen.alone):
                    raise Held(seen.machine, seen.holder, seen.since)
            # A command that found no API holds the lock over SSH instead of Leases; the API may be up by now.
            if (by_ssh := self._cluster.lock_holder()) is not None and by_ssh.get("holder") != self._holder:
                raise Taken(by_ssh)
        except BaseException:
            self._release_all(machines)
            raise

    # Keeping

    def _check(self, own: _Own) -> None:
        """Raise Lost or Unsure unless the lock is held for certain; sends no request."""
        if own.lost:
            raise Lost(
                f"the lock on {own.machine} {own.lost}",
                "a lock that is held to the end",
                "check what the other command does",
            )
        age = clock() - own.renewed
        if age > self._duration_s * (1 - _MARGIN):
            raise Unsure(
                f"the lock on {own.machine} could not be renewed for {age:.0f} s: another command may hold it now",
                "a control plane that responds",
                "run the command again when it responds",
            )

    def _confirm(self, name: str, *, wait: bool) -> None:
        own = self._own.get(name)
        if own is None:
            raise Lost(
                f"the lock {name} is not held by this command", "a held lock", "run the command again to continue"
            )
        while True:
            try:
                self._renew(name, own)
            except (NoResponse, Refused) as problem:
                self._check(own)
                if not wait:
                    raise Unsure(f"the lock on {own.machine} cannot be renewed: {problem}") from problem
                time.sleep(min(1.0, self._duration_s / 60))
            else:
                return

    def _renew(self, name: str, own: _Own) -> None:
        """Renew a lock once; raises Lost when another command holds it, NoResponse and Refused when that is unknown."""
        with own.mutex:
            while True:
                if own.lost:
                    self._check(own)
                if self._own.get(name) is not own:
                    return  # it was released meanwhile
                sent = clock()
                try:
                    own.lease = self._call("PUT", f"/{name}", self._body(own, name, renew=True)).body
                except Refused as error:
                    if error.status not in (_CONFLICT, _NOT_FOUND):
                        raise
                    self._reread(name, own)
                else:
                    own.renewed = sent
                    return

    def _reread(self, name: str, own: _Own) -> None:
        """Read a Lease that has changed: another command took or deleted it, or only edited it."""
        try:
            found = self._call("GET", f"/{name}").body
        except Refused as error:
            if error.status != _NOT_FOUND:
                raise
            own.lost = "is lost: its Lease was deleted"
            return
        holder = found["spec"].get("holderIdentity") or ""
        if holder == self._holder:
            own.lease = found
        else:
            own.lost = f"was taken by {described(holder)}"

    def _renew_all(self) -> None:
        with ThreadPoolExecutor(_RENEW_THREADS) as pool:
            succeeded = True
            # Retried soon after a failure: a control plane that restarts is back in seconds.
            while not self._stop.wait(self._duration_s / (4 if succeeded else 30)):
                succeeded = all(pool.map(self._try_renew, list(self._own.items())))

    def _try_renew(self, item: tuple[str, _Own]) -> bool:
        """Renew a lock; False when it must be retried. ``confirm`` and ``lost`` report a lock that is lost."""
        try:
            self._renew(*item)
        except (NoResponse, Refused):
            return False
        except Lost:
            pass
        return True

    # Releasing

    def _release_all(self, machines: Iterable[str]) -> None:
        responds = True
        for machine in machines:
            try:
                if responds:
                    self._release(lock_name(machine), keep_record=True)
            except NoResponse:
                responds = False  # do not wait again for the other locks
            except Refused:
                pass  # it expires
            self._own.pop(lock_name(machine), None)

    def _release(self, name: str, *, keep_record: bool = False) -> None:
        own = self._own.pop(name, None)
        if own is None:
            return
        with own.mutex:
            for _ in range(3):
                if own.lost:
                    return
                metadata = own.lease["metadata"]
                # A command that took the lock meanwhile has changed the resource version.
                preconditions = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
                try:
                    if keep_record and own.previous_record:
                        self._call("PUT", f"/{name}", _released_body(own))
                    else:
                        self._call("DELETE", f"/{name}", {"preconditions": preconditions})
                except Refused as error:
                    if error.status not in (_NOT_FOUND, _CONFLICT):
                        raise
                    self._reread(name, own)
                else:
                    return


def _released_body(own: _Own) -> dict[str, Any]:
    """A Lease without a holder, with the record of the repair to resume."""
    metadata = {name: own.lease["metadata"][name] for name in ("name", "labels", "resourceVersion")}
    metadata["annotations"] = {_RECORD: own.previous_record, _MACHINE: own.machine}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}


def _is_live(spec: Mapping[str, Any], now: float) -> bool:
    """Whether a Lease is held; a Lease with an invalid time counts as free."""
    holder = spec.get("holderIdentity") or ""
    if not holder or dead_here(holder):
        return False
    try:
        renewed = dt.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=dt.UTC).timestamp()
        return bool(renewed + float(spec["leaseDurationSeconds"]) > now)
    except (KeyError, TypeError, ValueError):
        return False
