"""Who may work on what: Lease objects in the cluster, renewed while they are held, that expire when their holder dies.

A lock fences its holder: :meth:`Leases.confirm` before a step renews it, or stops what it was to protect, for a lock
that was not renewed in time may be somebody else's by now. What is written into a Lease is the control plane's time
(two operators' own clocks need not agree); how old a lock of ours is, a clock of ours tells that nobody sets and that
goes on while this machine sleeps.
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

from gpunodes.engine.cluster import Cluster, NoResponse, Refused, Response
from gpunodes.engine.locks import Taken, clock
from gpunodes.errors import GpunodesError

DURATION_S = 60.0
"""Seconds without renewal after which somebody else may take a lock."""
_MARGIN = 1 / 6
"""The last part of that time, in which a lock of ours counts as lost already."""
_NAMESPACE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_LABEL = ("app.kubernetes.io/managed-by", "gpunodes")
_RECORD = "gpunodes.dev/record"
_MACHINE = "gpunodes.dev/machine"
"""Annotation: the machine, as its holder calls it."""
_ALONE = "gpunodes.dev/alone"
"""Annotation: its holder works on the control plane, and so nobody else works on any machine."""
_PREFIX = "gpunodes-machine-"
_DECISION = "gpunodes-decision"
"""The lock that is held for the moment in which it is decided who is repaired."""
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_CONFLICT = 409
_NOT_FOUND = 404
_LONGEST_NAME = 253
"""Characters of an object's name (Kubernetes, DNS subdomain names)."""
_AT_ONCE = 8
"""Locks that are renewed side by side."""


class Held(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """Somebody else holds a lock."""

    def __init__(self, what: str, holder: str, since: str = "") -> None:
        by = described(holder) + (f", since {since}" if since else "")
        super().__init__(f"{what} is being worked on: {by}", "one command or repair at a time", "wait for it to end")


class Lost(GpunodesError):  # noqa: N818 - as above
    """A lock of ours was taken by somebody else."""


class Unsure(Lost):
    """A lock of ours could not be renewed in time: somebody else may have it by now."""


def lock_name(machine: str, node: str = "") -> str:
    """The Lease that locks a machine: that of its node's name, or of its name in the inventory where it is no node.

    Everybody who works on a machine comes to the same name by this: a node has one name, whatever two inventories call
    its machine. What is no legal name of an object, or too long for one, is told apart by a hash.
    """
    name = (node or machine).lower()
    if len(_PREFIX) + len(name) <= _LONGEST_NAME and re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        return _PREFIX + name
    readable = "-".join(re.findall(r"[a-z0-9]+", name))[:40].strip("-")
    return f"{_PREFIX}{readable or 'x'}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def identity(command: str) -> str:
    """Who we are, in a lock: user@host and command for people, and what tells whether this process still lives."""
    me = f"{getpass.getuser()}@{socket.gethostname()}/{command}"
    return f"{me}/{_boot()}/{os.getpid()}/{_started(os.getpid())}/{secrets.token_hex(4)}"


def described(holder: str) -> str:
    """A holder's identity for people: the command, and whose it is."""
    person, _, command = holder.rsplit("/", 4)[0].partition("/")
    return f"`gpunodes {command}` of {person}" if command else person or "somebody"


def dead_here(holder: str) -> bool:
    """Whether the holder was a process of this machine, in this boot, that has ended: its lock need not expire first.

    Machines may share a name, and containers a kernel: only what this process could see alive does it call dead.
    """
    parts = holder.rsplit("/", 4)
    if len(parts) != 5 or not re.fullmatch("[0-9]+", parts[2]):  # noqa: PLR2004 - the parts of an identity
        return False
    name, boot, pid, started, _ = parts
    host = name.partition("/")[0].rpartition("@")[2]
    return host == socket.gethostname() and boot == _boot() and _ended(int(pid), started)


def _ended(pid: int, started: str) -> bool:
    """Whether the process that started then is no more; /proc may hide those of others (proc(5), hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is somebody else's
    now = _started(pid)
    return bool(now) and now != started


def _boot() -> str:
    """This kernel's boot, and which of its processes are seen from here: pid_namespaces(7)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks (proc(5), stat, field 22); "" when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A lock as it stands in the cluster."""

    name: str
    """The Lease's: that of ``lock_name``."""
    machine: str
    """As its holder calls it: its node, or its name in an inventory."""
    holder: str
    since: str
    """When its holder took it, the control plane's time."""
    live: bool
    alone: bool
    """Its holder works on the control plane."""
    record: str
    """The text of the repair's record."""


@dataclass(slots=True)
class _Own:
    lease: Mapping[str, Any]
    machine: str
    record: str
    left: str
    """The record that was found there: of a repair that a dead holder did not end."""
    alone: bool
    renewed: float
    """When the last renewal that came through was sent, by ``_clock``."""
    lost: str = ""
    """Who took it, once somebody has."""
    mutex: threading.Lock = field(default_factory=threading.Lock)


class Leases:
    """The locks of this command. A thread renews them; close() ends it and leaves what is still held to expire.

    A machine's lock goes by ``lock_name`` of the name that is given here.
    """

    def __init__(self, cluster: Cluster, command: str, duration_s: float = DURATION_S) -> None:
        self._cluster = cluster
        self._duration_s = duration_s
        self._me = identity(command)
        self._own: dict[str, _Own] = {}
        self._told = (0.0, 0.0)
        """The control plane's time, and ours (``_clock``) then or a little before."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def me(self) -> str:
        """Who we are, in a Lease."""
        return self._me

    def seen(self) -> list[ObservedLease]:
        """All locks on machines, by one request."""
        query = f"?labelSelector={quote('='.join(_LABEL), safe='')}"
        answer = self._call("GET", query)
        return [
            self._seen(item, answer.time)
            for item in answer.body["items"]
            if item["metadata"]["name"].startswith(_PREFIX)
        ]

    def take(self, machine: str, record: str | None = None, *, alone: bool = False) -> str:
        """Lock a machine; the record that a dead holder left there, "" for none. Raises Held and Taken.

        ``record`` replaces what was left; None keeps it, for the repair that it is of. ``alone`` is for work on the
        control plane: nobody else may hold a machine then.
        """
        left = self._take(lock_name(machine), machine, record, alone=alone)
        self._among_others([machine], alone=alone)
        return left

    def take_all(self, machines: Iterable[str], *, alone: bool = False) -> None:
        """Lock several machines in the order of their names, or none of them. Raises Held and Taken."""
        taken: list[str] = []
        try:
            for machine in sorted({machine for machine in machines if not self.holds(machine)}):
                self._take(lock_name(machine), machine, None, alone=alone)
                taken.append(machine)
        except BaseException:
            self._put_back(taken)
            raise
        if taken:
            self._among_others(taken, alone=alone)

    def write(self, machine: str, record: str, *, wait: bool = True) -> None:
        """Put a record into a lock of ours, and confirm it; raises as ``confirm``."""
        if own := self._own.get(lock_name(machine)):
            own.record = record
        self.confirm(machine, wait=wait)

    def confirm(self, machine: str, *, wait: bool = True) -> None:
        """Renew a lock now; for the moment before something is done to a machine.

        Raises Lost when it is somebody else's, and Unsure when it may be: the control plane does not answer for so long
        that the lock has expired, or is about to. Without ``wait`` an answer that does not come at once will do.
        """
        self._confirm(lock_name(machine), wait=wait)

    def confirm_decision(self) -> None:
        """As ``confirm``, of the lock that is held while ``deciding``."""
        self._confirm(_DECISION, wait=True)

    def check(self, machine: str) -> None:
        """As ``confirm``, by what is known without asking."""
        if own := self._own.get(lock_name(machine)):
            self._check(own)

    def lost(self) -> Lost | None:
        """What became of our locks, as the error that it is, what is sure first; None while all are surely ours."""
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
        """Let a lock go, and its record with it; one that is not ours any more stays."""
        self._release(lock_name(machine))

    def leave(self, machine: str) -> None:
        """Let a lock go, as far as the control plane answers; what a dead holder left in it stays there."""
        self._put_back([machine])

    def abandon(self, machine: str) -> None:
        """Let a lock go and leave our own record in it, for whoever goes on."""
        if own := self._own.get(lock_name(machine)):
            own.left = own.record
        self.leave(machine)

    def put_back(self) -> None:
        """Let all locks go, as far as the control plane answers; what dead holders left in them stays there."""
        self._put_back([own.machine for own in self._own.values()])

    def holds(self, machine: str) -> bool:
        """Whether we took this lock and have not let it go."""
        return lock_name(machine) in self._own

    @contextlib.contextmanager
    def holding(self, machines: Iterable[str]) -> Iterator[None]:
        """Hold several machines' locks while inside, for what takes a moment; raises as ``take_all``."""
        try:
            self.take_all(machines)
            yield
        finally:
            self.put_back()
            self.close()

    @contextlib.contextmanager
    def deciding(self, patience_s: float = 2 * DURATION_S) -> Iterator[None]:
        """Hold the lock of the decision while inside: two commands never decide at once. Raises Held."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._take(_DECISION, "the choice of who is repaired", None, alone=False)
                break
            except Held:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        try:
            yield
        finally:
            with contextlib.suppress(NoResponse, Refused):
                self._release(_DECISION)

    def close(self) -> None:
        """Renew nothing any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # What stands in the cluster

    def _call(self, method: str, path: str, body: Any = None) -> Response:
        sent = clock()
        answer = self._cluster.call_once(method, _NAMESPACE + path, body)
        self._told = (answer.time, sent)
        return answer

    def now(self) -> float:
        """The control plane's time, seconds since 1970; our own as long as it has told none."""
        told, when = self._told
        # Or a little later: never so early that a lock ends before we think it does.
        return told + clock() - when if told else time.time()

    def _seen(self, item: Mapping[str, Any], now: float) -> ObservedLease:
        metadata, spec = item["metadata"], item["spec"]
        annotations = metadata.get("annotations") or {}
        taken = spec.get("acquireTime") or ""
        return ObservedLease(
            name=metadata["name"],
            machine=annotations.get(_MACHINE) or metadata["name"].removeprefix(_PREFIX),
            holder=spec.get("holderIdentity") or "",
            since=taken.partition(".")[0].replace("T", " ") + " UTC" if taken else "",
            live=_live(spec, now),
            alone=_ALONE in annotations,
            record=annotations.get(_RECORD, ""),
        )

    def _body(self, own: _Own, name: str, *, ours: bool) -> dict[str, Any]:
        """The Lease as it is to be; ``ours`` when it is renewed, and not taken."""
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
                "holderIdentity": self._me,
                "leaseDurationSeconds": round(self._duration_s),
                "acquireTime": before.get("acquireTime", stamp) if ours else stamp,
                "renewTime": stamp,
                "leaseTransitions": (before.get("leaseTransitions") or 0) + (1 if own.lease and not ours else 0),
            },
        }

    # Taking

    def _take(self, name: str, machine: str, record: str | None, *, alone: bool) -> str:
        if not self._told[0]:
            # What is made first needs the control plane's time, which only an answer tells.
            sent = clock()
            self._told = (self._cluster.call_once("GET", "/version").time, sent)
        for _ in range(5):
            try:
                own = self._made(name, machine, record, alone=alone)
            except Refused as error:
                if error.status not in (_CONFLICT, _NOT_FOUND):
                    raise
                continue  # somebody was quicker: look who
            self._own[name] = own
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_all, daemon=True)
                self._thread.start()
            return own.left
        raise Held(machine, "others, who were quicker")

    def _made(self, name: str, machine: str, record: str | None, *, alone: bool) -> _Own:
        own = _Own({}, machine, record or "", "", alone, clock())
        try:
            own.lease = self._call("POST", "", self._body(own, name, ours=False)).body
        except Refused as error:
            if error.status != _CONFLICT:
                raise
            found = self._call("GET", f"/{name}")
            seen = self._seen(found.body, found.time)
            if seen.live and seen.holder != self._me:
                raise Held(machine, seen.holder, seen.since) from None
            own = _Own(found.body, machine, seen.record if record is None else record, seen.record, alone, clock())
            own.lease = self._call("PUT", f"/{name}", self._body(own, name, ours=False)).body
        return own

    def _among_others(self, machines: list[str], *, alone: bool) -> None:
        """Put what was just taken back, and raise, where somebody works on the control plane, or we do and others.

        Everybody takes first and then looks: of two at once, one at least sees the other.
        """
        try:
            for seen in self.seen():
                if seen.live and seen.holder != self._me and (alone or seen.alone):
                    raise Held(seen.machine, seen.holder, seen.since)
            # Who found no API has no Leases: there may be an API by now.
            if (by_ssh := self._cluster.lock_holder()) is not None and by_ssh.get("holder") != self._me:
                raise Taken(by_ssh)
        except BaseException:
            self._put_back(machines)
            raise

    # Keeping

    def _check(self, own: _Own) -> None:
        """Raise Lost or Unsure unless a lock is surely ours, without asking."""
        if own.lost:
            raise Lost(
                f"the lock on {own.machine} was taken by {own.lost}",
                "a lock that is held to the end",
                "see what they do",
            )
        silent = clock() - own.renewed
        if silent > self._duration_s * (1 - _MARGIN):
            raise Unsure(
                f"the lock on {own.machine} could not be renewed for {silent:.0f} s: somebody else may hold it by now",
                "a control plane that answers",
                "run the command again when it does",
            )

    def _confirm(self, name: str, *, wait: bool) -> None:
        own = self._own.get(name)
        if own is None:
            raise Lost(f"the lock {name} is not ours", "a lock that is held", "run the command again to go on")
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
        """Renew a lock once; raises Lost when it is somebody else's, NoAnswer and Refused when nobody knows."""
        with own.mutex:
            while True:
                if own.lost:
                    self._check(own)
                if self._own.get(name) is not own:
                    return  # it was let go meanwhile
                sent = clock()
                try:
                    own.lease = self._call("PUT", f"/{name}", self._body(own, name, ours=True)).body
                except Refused as error:
                    if error.status not in (_CONFLICT, _NOT_FOUND):
                        raise
                    self._compare(name, own)
                else:
                    own.renewed = sent
                    return

    def _compare(self, name: str, own: _Own) -> None:
        """The Lease is not as we left it: somebody took it, or only wrote on it."""
        try:
            found = self._call("GET", f"/{name}").body
        except Refused as error:
            if error.status != _NOT_FOUND:
                raise
            own.lost = "nobody: its Lease was deleted"
            return
        holder = found["spec"].get("holderIdentity") or ""
        if holder == self._me:
            own.lease = found
        else:
            own.lost = described(holder)

    def _renew_all(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            good = True
            # Soon again where it could not be renewed: a control plane that restarts is back in seconds.
            while not self._stop.wait(self._duration_s / (4 if good else 30)):
                good = all(pool.map(self._renewed, list(self._own.items())))

    def _renewed(self, item: tuple[str, _Own]) -> bool:
        """Whether nothing hinders a lock's renewal; what does is found by ``confirm`` and ``lost``."""
        try:
            self._renew(*item)
        except (NoResponse, Refused):
            return False
        except Lost:
            pass
        return True

    # Letting go

    def _put_back(self, machines: Iterable[str]) -> None:
        answers = True
        for machine in machines:
            try:
                if answers:
                    self._release(lock_name(machine), keep=True)
            except NoResponse:
                answers = False  # nor will it for the others
            except Refused:
                pass  # it expires
            self._own.pop(lock_name(machine), None)

    def _release(self, name: str, *, keep: bool = False) -> None:
        own = self._own.pop(name, None)
        if own is None:
            return
        with own.mutex:
            for _ in range(3):
                if own.lost:
                    return
                metadata = own.lease["metadata"]
                # Whoever took it since has made another version of it.
                exactly = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
                try:
                    if keep and own.left:
                        self._call("PUT", f"/{name}", _unheld(own))
                    else:
                        self._call("DELETE", f"/{name}", {"preconditions": exactly})
                except Refused as error:
                    if error.status not in (_NOT_FOUND, _CONFLICT):
                        raise
                    self._compare(name, own)
                else:
                    return


def _unheld(own: _Own) -> dict[str, Any]:
    """The Lease as its dead holder left it, to be gone on with."""
    metadata = {name: own.lease["metadata"][name] for name in ("name", "labels", "resourceVersion")}
    metadata["annotations"] = {_RECORD: own.left, _MACHINE: own.machine}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}


def _live(spec: Mapping[str, Any], now: float) -> bool:
    """Whether a Lease is held; one that nobody could read when it ends is held by nobody."""
    holder = spec.get("holderIdentity") or ""
    if not holder or dead_here(holder):
        return False
    try:
        renewed = dt.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=dt.UTC).timestamp()
        return bool(renewed + float(spec["leaseDurationSeconds"]) > now)
    except (KeyError, TypeError, ValueError):
        return False
