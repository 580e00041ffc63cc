"""The locks of one command: taken, renewed by a thread while they are held, and released.

A lock fences its holder: before each step :meth:`Leases.confirm` renews the lock or raises, because another command may
hold a lock that was not renewed in time. Even if none took it, another one may have begun what it excludes: so a lock
that has expired is not renewed. Only work that stops the API renews it then, and checks again what it excludes.

The times in a Lease are those of the control plane, because the clocks of two controllers may differ; those of two
control planes may, too (``expiry.py``). The age of an own lock is measured by a clock that cannot be set and that runs
while the controller is suspended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from gpunodes.engine.cluster.api import CONFLICT, NOT_FOUND, Api
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.leases import objects
from gpunodes.engine.leases.errors import Held, Lost, Unsure
from gpunodes.engine.leases.expiry import Expiry
from gpunodes.engine.leases.holders import described, identity
from gpunodes.engine.leases.objects import HeldLease, ObservedLease, lock_name
from gpunodes.engine.locks import Taken, clock

DURATION_S = 60.0
"""Seconds without renewal after which another command may take a lock."""
_NAMESPACE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_RENEW_THREADS = 8
"""Maximum number of locks that are renewed in parallel."""


class Leases:
    """The locks of this command. A thread renews them; ``close`` ends it, and the locks still held expire later.

    Machines are given by the name from which ``lock_name`` makes the name of the Lease.
    """

    def __init__(self, api: Api, command: str, duration_s: float = DURATION_S) -> None:
        self._api = api
        self._duration_s = duration_s
        self.holder = identity(command)
        """The identity of this command in a Lease."""
        self._own: dict[str, HeldLease] = {}
        self._expiry = Expiry(self._read_all, duration_s)
        self._server_time = (0.0, 0.0)
        """The control plane's time in the last response, and ``clock`` when its request was sent."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """The control plane's time, in seconds since 1970; the controller's before the first response."""
        server_time, sent = self._server_time
        # Never early, possibly a little late: so a lock does not expire earlier than this command assumes.
        return server_time + clock() - sent if server_time else time.time()

    def observe(self, *, watched: bool = False) -> list[ObservedLease]:
        """All locks on machines, of every command; ``watched``: one that looks expired is live if it is renewed."""
        found = [seen for seen in self._read_all() if seen.name.startswith(objects.PREFIX)]
        return self._expiry.watched(found) if watched else found

    def _read_all(self) -> list[ObservedLease]:
        sent = clock()
        query = f"?labelSelector={quote('='.join(objects.LABEL), safe='')}"
        found = self._api.list_once(_NAMESPACE + query)
        self._server_time = (found.time, sent)
        return [objects.observed(item, found.time) for item in found.items]

    # Taking

    def take(self, machine: str, record: str | None = None, *, alone: bool = False, stops_api: bool = False) -> str:
        """Lock a machine; returns the record that a dead holder left, "" for none. Raises Held and Taken.

        ``record`` replaces the record in the Lease; None keeps it, to resume its repair. ``alone`` is for work on the
        control plane: then no other command may hold a lock on any machine. ``stops_api``: that work may stop the API.
        """
        previous_record = self._take(lock_name(machine), machine, record, alone=alone, stops_api=stops_api)
        self._check_conflicts([machine], alone=alone)
        return previous_record

    def take_all(self, machines: Iterable[str], *, alone: bool = False, stops_api: bool = False) -> dict[str, str]:
        """Lock several machines in the order of their names, all or none of them; as ``take``, by machine."""
        taken: dict[str, str] = {}
        try:
            for machine in sorted({machine for machine in machines if lock_name(machine) not in self._own}):
                taken[machine] = self._take(lock_name(machine), machine, None, alone=alone, stops_api=stops_api)
        except BaseException:
            self._release_quietly(taken)
            raise
        if taken:
            self._check_conflicts(taken, alone=alone)
        return taken

    @contextlib.contextmanager
    def holding(self, machines: Iterable[str]) -> Iterator[dict[str, str]]:
        """Hold the locks of several machines while inside, for a short action; as ``take_all``."""
        try:
            yield self.take_all(machines)
        finally:
            self.release_all()
            self.close()

    @contextlib.contextmanager
    def deciding(self, patience_s: float = 2 * DURATION_S) -> Iterator[None]:
        """Hold the lock of the repair decision while inside: two commands never decide at once. Raises Held."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._take(objects.DECISION_LOCK, "the choice of machines to repair", None)
                break
            except Held:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        try:
            yield
        finally:
            with contextlib.suppress(NoResponse, Refused):
                self._release(objects.DECISION_LOCK)

    # The lock of the roll-out

    def take_rollout(self) -> str:
        """Lock the cluster's one roll-out; returns the record of an unfinished one, "" for none. Raises Held."""
        # Its machines may be control planes. It excludes nothing but other roll-outs, by this Lease.
        return self._take(objects.ROLLOUT_LOCK, "the roll-out of this cluster", None, stops_api=True)

    def write_rollout(self, record: str) -> None:
        """Write the roll-out's record into its lock, and confirm the lock; raises as ``confirm``."""
        if own := self._own.get(objects.ROLLOUT_LOCK):
            own.record = record
        self._confirm(objects.ROLLOUT_LOCK, wait=True)

    def release_rollout(self, *, keep: bool) -> None:
        """Release the lock of the roll-out; ``keep`` its record, to resume it, or delete it."""
        if own := self._own.get(objects.ROLLOUT_LOCK):
            own.previous_record = own.record if keep else ""
        self._release(objects.ROLLOUT_LOCK, keep_record=keep)

    def observe_rollout(self) -> ObservedLease | None:
        """The lock of the roll-out, None without one."""
        try:
            response = self._call("GET", f"/{objects.ROLLOUT_LOCK}")
        except Refused as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return objects.observed(response.body, response.time)

    def _take(
        self, name: str, machine: str, record: str | None, *, alone: bool = False, stops_api: bool = False
    ) -> str:
        if not self._server_time[0]:
            # A new Lease needs the control plane's time, which only a response provides.
            sent = clock()
            self._server_time = (self._api.call_once("GET", "/version").time, sent)
        for _ in range(5):
            try:
                own = self._create(HeldLease(name, machine, record or "", alone, stops_api), record)
            except Refused as error:
                if error.status not in (CONFLICT, NOT_FOUND):
                    raise
                continue  # another command took it at the same time: read the holder
            self._own[name] = own
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_all, daemon=True)
                self._thread.start()
            return own.previous_record
        raise Held(machine, "another command that started at the same time")

    def _create(self, own: HeldLease, record: str | None) -> HeldLease:
        """Write a Lease; ``record`` as of ``take``."""
        try:
            own.found = self._call("POST", "", own.taken(self.holder, self._duration_s, self.now())).body
        except Refused as error:
            if error.status != CONFLICT:
                raise
            response = self._call("GET", f"/{own.name}")
            seen = objects.observed(response.body, response.time)
            if seen.holder != self.holder and self._expiry.held(seen):
                raise Held(own.machine, seen.holder, seen.since) from None
            own.found, own.previous_record, own.renewed = response.body, seen.record, clock()
            own.record = seen.record if record is None else record
            own.found = self._call("PUT", f"/{own.name}", own.taken(self.holder, self._duration_s, self.now())).body
        return own

    def _check_conflicts(self, machines: Iterable[str], *, alone: bool) -> None:
        """Release the locks on ``machines`` and raise where work on the control plane excludes other commands.

        Every command takes its locks first and checks then: of two concurrent commands at least one sees the other.
        """
        try:
            self._raise_conflict(alone=alone)
        except BaseException:
            self._release_quietly(machines)
            raise

    def _raise_conflict(self, *, alone: bool) -> None:
        """Raise Held or Taken if another command holds what excludes the own locks, which are ``alone`` or not."""
        for seen in self.observe():
            if seen.excludes(self.holder, alone=alone) and self._expiry.held(seen):
                raise Held(seen.machine, seen.holder, seen.since)
        # A command that found no API holds the lock over SSH instead of Leases; the API may be up by now.
        if (by_ssh := self._api.lock_holder()) is not None and by_ssh.get("holder") != self.holder:
            raise Taken(by_ssh)

    # Keeping

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
        self._confirm(objects.DECISION_LOCK, wait=True)

    def check(self, machine: str) -> None:
        """As ``confirm``, without a request."""
        if own := self._own.get(lock_name(machine)):
            own.check(self._duration_s)

    def lost(self) -> Lost | None:
        """The error for a lost lock: Lost before Unsure; None while all locks are held."""
        found: Lost | None = None
        for own in list(self._own.values()):
            try:
                own.check(self._duration_s)
            except Unsure as problem:
                found = problem
            except Lost as problem:
                return problem
        return found

    def _confirm(self, name: str, *, wait: bool) -> None:
        own = self._own.get(name)
        if own is None:
            raise Lost(
                f"the lock {name} is not held by this command", "a held lock", "run the command again to continue"
            )
        while True:
            try:
                self._renew(own)
            except (NoResponse, Refused) as problem:
                own.check(self._duration_s)
                if not wait:
                    raise Unsure(f"the lock on {own.machine} cannot be renewed: {problem}") from problem
                time.sleep(min(1.0, self._duration_s / 60))
            else:
                return

    def _renew(self, own: HeldLease) -> None:
        """Renew a lock once; raises Lost when another command holds it, NoResponse and Refused when that is unknown."""
        with own.mutex:
            while True:
                if own.lost:
                    own.check(self._duration_s)
                if self._own.get(own.name) is not own:
                    return  # it was released meanwhile
                if own.expired(self._duration_s) and not own.stops_api:
                    self._reread(own)
                    own.lost = own.lost or own.expiry
                    continue
                sent = clock()
                try:
                    own.found = self._call(
                        "PUT", f"/{own.name}", own.held(self.holder, self._duration_s, self.now())
                    ).body
                except Refused as error:
                    if error.status not in (CONFLICT, NOT_FOUND):
                        raise
                    self._reread(own)
                else:
                    # The request may have waited, too.
                    if own.expired(self._duration_s):
                        self._check_again(own)
                    if not own.lost:
                        own.renewed = sent
                        return

    def _check_again(self, own: HeldLease) -> None:
        """A Lease that had expired was renewed: it is lost if a command may have begun meanwhile that it excludes."""
        if not own.stops_api:
            own.lost = own.expiry
        elif own.alone:
            try:
                self._raise_conflict(alone=True)
            except (Held, Taken) as problem:
                own.lost = f"expired, and another command began meanwhile: {problem.problem.found}"

    def _reread(self, own: HeldLease) -> bool:
        """Read a Lease that has changed; False if another command took or deleted it, and did not only edit it."""
        try:
            found = self._call("GET", f"/{own.name}").body
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
            own.lost = "is lost: its Lease was deleted"
            return False
        holder = found["spec"].get("holderIdentity") or ""
        if holder == self.holder:
            own.found = found
            return True
        own.lost = f"was taken by {described(holder)}"
        return False

    def _renew_all(self) -> None:
        with ThreadPoolExecutor(_RENEW_THREADS) as pool:
            succeeded = True
            # Retried soon after a failure: a control plane that restarts is back in seconds.
            while not self._stop.wait(self._duration_s / (4 if succeeded else 30)):
                succeeded = all(pool.map(self._try_renew, list(self._own.values())))

    def _try_renew(self, own: HeldLease) -> bool:
        """Renew a lock; False when it must be retried. ``confirm`` and ``lost`` report a lock that is lost."""
        try:
            self._renew(own)
        except (NoResponse, Refused):
            return False
        except Lost:
            pass
        return True

    # Releasing

    def release(self, machine: str) -> None:
        """Release a lock and delete its record; a lock that another command holds stays."""
        self._release(lock_name(machine))

    def release_unused(self, machine: str) -> None:
        """Release a lock if the control plane responds; the record that was found in the Lease stays there."""
        self._release_quietly([machine])

    def release_unfinished(self, machine: str) -> None:
        """Release a lock if the control plane responds; the own record stays in the Lease, to resume the repair."""
        if own := self._own.get(lock_name(machine)):
            own.previous_record = own.record
        self._release_quietly([machine])

    def release_all(self) -> None:
        """Release all locks if the control plane responds; the records that were found in the Leases stay there."""
        self._release_quietly([own.machine for own in self._own.values()])

    def close(self) -> None:
        """End the renewals."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _release_quietly(self, machines: Iterable[str]) -> None:
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
                try:
                    self._call(*own.end(keep_record=keep_record))
                except Refused as error:
                    if error.status not in (NOT_FOUND, CONFLICT):
                        raise
                    if self._reread(own):
                        continue
                return

    # Requests

    def _call(self, method: str, path: str, body: Any = None) -> Response:
        sent = clock()
        response = self._api.call_once(method, _NAMESPACE + path, body)
        self._server_time = (response.time, sent)
        return response
