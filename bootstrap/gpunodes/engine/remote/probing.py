"""Send the probe to many machines in parallel and read its output.

Each machine costs one connection and one round trip. A machine whose sshd sends no SSH banner occupies only a socket:
a connection gets one of the ``parallel`` workers after the banner has arrived. Each machine and the whole scan have a
deadline; when either passes, the connection is closed and the waiting worker returns. Output is limited in size before
it is unpacked. Its content is validated by the caller.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpunodes.engine.remote import programs
from gpunodes.engine.remote.connecting import Address, PendingConnection, numeric_addresses, resolve
from gpunodes.engine.remote.reach import LostError, ProbeResult, Reach
from gpunodes.engine.remote.sessions import Session, Shared
from gpunodes.engine.remote.targets import Target

PARALLEL = 64
"""Maximum number of parallel SSH sessions."""
_MAX_PENDING = 256
"""Maximum number of connections that wait for an SSH banner or for a worker."""
_RESOLVER_THREADS = 16
"""Maximum number of parallel name lookups."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Time limits in seconds."""

    probe_s: float = 30.0
    connect_s: float = 10.0
    """For the connection, and again for the SSH banner."""
    machine_s: float = 60.0
    """For the whole session, starting at the SSH banner."""


def probe(
    targets: Sequence[Target],
    options: ProbeSettings,
    *,
    deadline_s: float,
    parallel: int = PARALLEL,
    on_result: Callable[[ProbeResult], None] = lambda _: None,
) -> list[ProbeResult]:
    """Probe every target; returns within ``deadline_s`` seconds, with one result for each target, in their order.

    ``on_result`` is called in the caller's thread as soon as a result is available. The time that it takes for one
    machine does not count for the others.
    """
    return _Scan(targets, options, time.monotonic() + deadline_s, parallel, on_result).run()


class _Scan:
    """The state of one scan. ``_worker`` and ``_resolver`` run in threads, everything else in the caller's thread."""

    def __init__(
        self,
        targets: Sequence[Target],
        options: ProbeSettings,
        deadline: float,
        parallel: int,
        on_result: Callable[[ProbeResult], None],
    ) -> None:
        self._targets = targets
        self._options = options
        self._deadline = deadline
        self._parallel = max(1, min(parallel, len(targets)))
        self._on_result = on_result
        self._targets_left = deque(targets)
        self._resolving: dict[str, float] = {}
        """Machines whose names are being looked up, with the deadline of each lookup."""
        self._to_resolve: queue.SimpleQueue[Target | None] = queue.SimpleQueue()
        self._resolved: queue.SimpleQueue[tuple[Target, Sequence[Address] | LostError]] = queue.SimpleQueue()
        self._pending: dict[int, PendingConnection] = {}
        self._sessions: dict[str, Session] = {}
        self._queue: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        self._results: dict[str, ProbeResult] = {}
        self._finished: queue.SimpleQueue[ProbeResult] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._shared = Shared(programs.pack("probe.document", {"deadline_s": options.probe_s}))

    def run(self) -> list[ProbeResult]:
        """Probe all targets and wait for the results."""
        _raise_file_limit()
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        for _ in range(self._parallel):
            threading.Thread(target=self._worker, daemon=True).start()
        for _ in range(min(_RESOLVER_THREADS, self._parallel)):
            threading.Thread(target=self._resolver, daemon=True).start()
        try:
            while len(self._results) < len(self._targets) and time.monotonic() < self._deadline:
                self._start_connections()
                self._handle_events()
                self._expire()
        finally:
            for _ in range(self._parallel):
                self._queue.put(None)
                self._to_resolve.put(None)
            for pending in self._pending.values():
                pending.socket.close()
            for session in self._sessions.values():
                session.abort(Reach.TIMEOUT, "the scan ended")
            self._shared.jump_hosts.close()
            self._selector.close()
            self._wakeup_reader.close()
        for target in self._targets:
            if target.name not in self._results:
                self._record(self._timed_out(target))
        return [self._results[target.name] for target in self._targets]

    def _start_connections(self) -> None:
        """Open connections up to the limit."""
        while self._targets_left and len(self._pending) + len(self._resolving) + self._queued() < _MAX_PENDING:
            target = self._targets_left.popleft()
            if target.jump:
                self._start_session(target, None)
            elif target.proxy_command:
                self._add_pending(PendingConnection(target, [], time.monotonic() + self._options.connect_s))
            elif addresses := numeric_addresses(target):
                self._connect_to(target, addresses)
            else:
                self._resolving[target.name] = time.monotonic() + self._options.connect_s
                self._to_resolve.put(target)

    def _connect_to(self, target: Target, addresses: Sequence[Address] | LostError) -> None:
        """Connect to a target whose name is resolved."""
        try:
            if isinstance(addresses, LostError):
                raise addresses
            self._add_pending(PendingConnection(target, addresses, time.monotonic() + self._options.connect_s))
        except LostError as lost:
            self._record(ProbeResult(target.name, lost.reach, lost.message))

    def _queued(self) -> int:
        return sum(session.began is None for session in self._sessions.values())

    def _add_pending(self, pending: PendingConnection) -> None:
        self._pending[pending.socket.fileno()] = pending
        self._selector.register(pending.socket, selectors.EVENT_READ if pending.connected else selectors.EVENT_WRITE)

    def _handle_events(self) -> None:
        """Wait up to 0.25 s for events, and handle them."""
        for key, _ in self._selector.select(0.25):
            if key.fileobj is self._wakeup_reader:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup_reader.recv(4096)
                continue
            pending = self._pending.pop(key.fd)
            self._selector.unregister(key.fileobj)
            if pending.connected:
                self._start_session(pending.target, pending.socket)
                continue
            try:
                pending.advance(time.monotonic() + self._options.connect_s)
            except LostError as lost:
                self._record(ProbeResult(pending.target.name, lost.reach, lost.message))
                continue
            self._add_pending(pending)
        with contextlib.suppress(queue.Empty):
            while True:
                target, addresses = self._resolved.get_nowait()
                if self._resolving.pop(target.name, None) is not None:
                    self._connect_to(target, addresses)
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._finished.get_nowait()
                self._sessions.pop(result.name, None)
                self._record(result)

    def _start_session(self, target: Target, connection: socket.socket | None) -> None:
        session = Session(target, connection, self._shared)
        self._sessions[target.name] = session
        self._queue.put(session)

    def _expire(self) -> None:
        """End name lookups, connections and sessions whose deadline has passed."""
        now = time.monotonic()
        for name in [name for name, deadline in self._resolving.items() if deadline <= now]:
            del self._resolving[name]
            self._record(ProbeResult(name, Reach.NO_ROUTE, "the name lookup timed out"))
        for descriptor, pending in list(self._pending.items()):
            if pending.deadline <= now:
                del self._pending[descriptor]
                self._selector.unregister(pending.socket)
                pending.socket.close()
                self._record(ProbeResult(pending.target.name, *pending.timeout_reason()))
        for session in self._sessions.values():
            if session.began is not None and session.began + self._options.machine_s <= now:
                session.abort(*session.timeout_reason())

    def _timed_out(self, target: Target) -> ProbeResult:
        """The result of a machine that was not finished at the deadline of the scan."""
        for pending in self._pending.values():
            if pending.target is target:
                return ProbeResult(target.name, *pending.timeout_reason())
        session = self._sessions.get(target.name)
        if session is None or session.began is None:
            return ProbeResult(target.name, Reach.TIMEOUT, "the scan timed out before this machine was probed")
        return ProbeResult(target.name, *session.timeout_reason())

    def _record(self, result: ProbeResult) -> None:
        self._results[result.name] = result
        began = time.monotonic()
        self._on_result(result)
        self._postpone(time.monotonic() - began)

    def _postpone(self, seconds: float) -> None:
        """Move all deadlines: nothing was handled meanwhile."""
        self._deadline += seconds
        for name in self._resolving:
            self._resolving[name] += seconds
        for pending in self._pending.values():
            pending.deadline += seconds
        for session in self._sessions.values():
            if session.began is not None:
                session.began += seconds

    def _worker(self) -> None:
        """Run sessions, one after the other."""
        while session := self._queue.get():
            self._finished.put(session.run())
            with contextlib.suppress(OSError):
                self._wakeup_writer.send(b".")

    def _resolver(self) -> None:
        """Look up names. A slow name server delays only the machines whose names it resolves."""
        while target := self._to_resolve.get():
            resolved: Sequence[Address] | LostError
            try:
                resolved = resolve(target.address, target.port)
            except LostError as lost:
                resolved = lost
            self._resolved.put((target, resolved))
            with contextlib.suppress(OSError):
                self._wakeup_writer.send(b".")


def _raise_file_limit() -> None:
    """Allow more open files than a shell does by default: thousands of machines need more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
