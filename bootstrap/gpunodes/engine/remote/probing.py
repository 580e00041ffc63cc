"""Send the probe to many machines in parallel and read its output; the only file that uses paramiko.

Each machine costs one connection and one round trip. A machine whose sshd sends no SSH banner occupies only a socket:
a connection gets one of the ``parallel`` workers after the banner has arrived. Each machine and the whole scan have a
deadline; when either passes, the connection is closed and the waiting worker returns. Output is limited in size before
it is unpacked. Its content is validated by the caller.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import logging
import os
import queue
import resource
import selectors
import socket
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import paramiko
from paramiko.packet import Packetizer

from gpunodes import settings
from gpunodes.engine.remote import hostkeys, openssh, shell
from gpunodes.engine.remote.hostkeys import HostKeys, Trust
from gpunodes.engine.remote.targets import DEFAULT_KEYS, Lookup, Target
from gpunodes.errors import WrongInput
from gpunodes.model import printable

PARALLEL = 64
"""Maximum number of parallel SSH sessions."""
PACKED_BYTES = 2 << 20
UNPACKED_BYTES = 8 << 20
ITEMS = 1_000_000
"""Maximum number of values in a document: many brackets fit into few bytes and use much memory when parsed."""
_MAX_BANNER_BYTES = 64 << 10
"""Maximum size of a login shell's banner, which comes before the output of the probe."""
_MAX_PENDING = 256
"""Maximum number of connections that wait for an SSH banner or for a worker."""
_POLL_S = 2.0
"""Seconds between two checks that a connection is still open, in case paramiko does not signal its end."""
_RESOLVER_THREADS = 16
"""Maximum number of parallel name lookups."""
_LOGIN_TRIES = 5
"""sshd closes a connection after six failures (MaxAuthTries)."""
_HOP_S = 20.0
"""Time limit in seconds for the connection to a jump host, and for a connection through one."""
_KRL = b"SSHKRL\n\0"
_CERTIFICATE = "-cert-v01@openssh.com"
_FRAME_MARK = b"gpunodes.probe/1 "

_UNPACK = 'import sys,zlib;exec(compile(zlib.decompress(sys.stdin.buffer.read()),"gpunodes-probe","exec"))'


_Address = tuple[socket.AddressFamily, Any]
"""Address family and address, as ``socket.connect`` takes them."""


class Reach(StrEnum):
    """How far a session with a machine came."""

    ANSWERED = "answered"
    NO_ROUTE = "no_route"
    """No connection: unknown host name, no route to the host, or timeout."""
    REFUSED = "refused"
    """The machine refuses the connection, or closes it before the login."""
    KEY_CHANGED = "key_changed"
    KEY_UNKNOWN = "key_unknown"
    """The host key is unknown, and the user's SSH configuration does not allow new keys."""
    LOGIN_REFUSED = "login_refused"
    SHELL_HANGS = "shell_hangs"
    """Connected, but the SSH banner, the login or the shell times out: the kernel runs, user space may hang."""
    PROBE_FAILED = "probe_failed"
    """Logged in, but the output is not a probe document."""
    TIMEOUT = "timeout"
    """The probe started and did not end in time."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result for one machine; ``message`` is the reason when there are no facts."""

    name: str
    reach: Reach
    message: str = ""
    facts: Mapping[str, Any] | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The source of the probe, and time limits in seconds."""

    source: bytes
    probe_s: float = 30.0
    connect_s: float = 10.0
    """For the connection, and again for the SSH banner."""
    machine_s: float = 60.0
    """For the whole session, starting at the SSH banner."""


def ssh_config() -> Lookup:
    """Return a lookup of a host's options in the ssh_config of the user and of the system.

    Where a configuration changes how host keys are checked, the lookup runs ``ssh -G``. It raises WrongInput for a file
    that cannot be parsed.
    """
    config = paramiko.SSHConfig()

    @functools.cache
    def find(host: str, arguments: tuple[str, ...]) -> Mapping[str, Any]:
        try:
            if own_rules or openssh.sets_rules(arguments):
                return openssh.resolved(host, arguments)
            found: dict[str, Any] = dict(config.lookup(host))
        except (openssh.ResolveError, paramiko.SSHException, ImportError, KeyError, ValueError) as error:
            raise _unreadable(error) from error
        if found.get("hostname") == host:
            del found["hostname"]
        return found

    # One process for each machine is slow: `ssh -G` runs only where a configuration has options for host keys.
    own_rules = openssh.has_own_rules()
    if not own_rules:
        try:
            config.parse(openssh.config_lines())
        except paramiko.SSHException as error:
            raise _unreadable(error) from error
    return lambda host, arguments: find(host, tuple(arguments))


def _unreadable(error: Exception) -> WrongInput:
    return WrongInput(f"ssh_config cannot be parsed: {error}", "ssh_config(5)", "correct ~/.ssh/config")


def probe(
    targets: Sequence[Target],
    options: ProbeSettings,
    *,
    deadline_s: float,
    parallel: int = PARALLEL,
    on_result: Callable[[ProbeResult], None] = lambda _: None,
) -> list[ProbeResult]:
    """Probe every target; returns within ``deadline_s`` seconds, with one result for each target, in their order.

    ``on_result`` is called in the caller's thread as soon as a result is available.
    """
    return _Scan(targets, options, time.monotonic() + deadline_s, parallel, on_result).run()


class _LostError(Exception):
    """A session failed: how far it came, and the reason."""

    def __init__(self, reach: Reach, message: str) -> None:
        super().__init__(message)
        self.reach = reach
        self.message = message


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
        self._resolved: queue.SimpleQueue[tuple[Target, Sequence[_Address] | _LostError]] = queue.SimpleQueue()
        self._pending: dict[int, _PendingConnection] = {}
        self._sessions: dict[str, _Session] = {}
        self._queue: queue.SimpleQueue[_Session | None] = queue.SimpleQueue()
        self._results: dict[str, ProbeResult] = {}
        self._finished: queue.SimpleQueue[ProbeResult] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._shared = _Shared(options)

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
            self._shared.close()
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
                self._add_pending(_PendingConnection(target, [], time.monotonic() + self._options.connect_s))
            elif addresses := _numeric_addresses(target):
                self._connect_to(target, addresses)
            else:
                self._resolving[target.name] = time.monotonic() + self._options.connect_s
                self._to_resolve.put(target)

    def _connect_to(self, target: Target, addresses: Sequence[_Address] | _LostError) -> None:
        """Connect to a target whose name is resolved."""
        try:
            if isinstance(addresses, _LostError):
                raise addresses
            self._add_pending(_PendingConnection(target, addresses, time.monotonic() + self._options.connect_s))
        except _LostError as lost:
            self._record(ProbeResult(target.name, lost.reach, lost.message))

    def _queued(self) -> int:
        return sum(session.began is None for session in self._sessions.values())

    def _add_pending(self, pending: _PendingConnection) -> None:
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
            except _LostError as lost:
                self._record(ProbeResult(pending.target.name, lost.reach, lost.message, took_s=pending.took_s))
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
        session = _Session(target, connection, self._shared)
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
                self._record(ProbeResult(pending.target.name, *pending.timeout_reason(), took_s=pending.took_s))
        for session in self._sessions.values():
            if session.began is not None and session.began + self._options.machine_s <= now:
                session.abort(*session.timeout_reason())

    def _timed_out(self, target: Target) -> ProbeResult:
        """The result of a machine that was not finished at the deadline of the scan."""
        for pending in self._pending.values():
            if pending.target is target:
                return ProbeResult(target.name, *pending.timeout_reason(), took_s=pending.took_s)
        session = self._sessions.get(target.name)
        if session is None or session.began is None:
            return ProbeResult(target.name, Reach.TIMEOUT, "the scan timed out before this machine was probed")
        return ProbeResult(target.name, *session.timeout_reason(), took_s=time.monotonic() - session.began)

    def _record(self, result: ProbeResult) -> None:
        self._results[result.name] = result
        self._on_result(result)

    def _worker(self) -> None:
        """Run sessions, one after the other."""
        while session := self._queue.get():
            self._finished.put(session.run())
            with contextlib.suppress(OSError):
                self._wakeup_writer.send(b".")

    def _resolver(self) -> None:
        """Look up names. A slow name server delays only the machines whose names it resolves."""
        while target := self._to_resolve.get():
            resolved: Sequence[_Address] | _LostError
            try:
                resolved = _resolve(target.address, target.port)
            except _LostError as lost:
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


# --- connecting ------------------------------------------------------------------------------------------------------


class _PendingConnection:
    """A connection that has not received an SSH banner yet."""

    def __init__(self, target: Target, addresses: Sequence[_Address], deadline: float) -> None:
        """Start to connect to the first of ``addresses``, or start the ProxyCommand; raises _LostError."""
        self.target = target
        self.deadline = deadline
        self._started = time.monotonic()
        self.connected = False
        self._error = _LostError(Reach.NO_ROUTE, f"no address for {target.address}")
        if target.proxy_command:
            self.connected = True
            self.socket = _proxy_socket(target.proxy_command)
            return
        self._addresses = deque(addresses)
        self._connect()

    def advance(self, deadline: float) -> None:
        """Handle the end of connect(2); after a failure try the next address. Raises _LostError after the last."""
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.socket.close()
            self._error = _connection_error(OSError(code, os.strerror(code)))
            self._connect()
            return
        self.connected = True
        self.deadline = deadline
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def timeout_reason(self) -> tuple[Reach, str]:
        """How far the connection came when its deadline passed."""
        if self.connected:
            return Reach.SHELL_HANGS, "connected, but sshd sends no SSH banner"
        return Reach.NO_ROUTE, f"no response from {self.target.address} port {self.target.port}"

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._started

    def _connect(self) -> None:
        while self._addresses:
            family, address = self._addresses.popleft()
            self.socket = socket.socket(family, socket.SOCK_STREAM)
            self.socket.setblocking(False)
            code = self.socket.connect_ex(address)
            if code in {0, errno.EINPROGRESS}:
                return
            self.socket.close()
            self._error = _connection_error(OSError(code, os.strerror(code)))
        raise self._error


def _resolve(host: str, port: int) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _LostError(Reach.NO_ROUTE, f"cannot resolve {host}: {error.strerror}") from error
    return [(family, address) for family, _, _, _, address in found]


def _numeric_addresses(target: Target) -> list[_Address]:
    """The address of a machine that is given as a number; an empty list for a name."""
    try:
        found = socket.getaddrinfo(
            target.address, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in found]


def _proxy_socket(command: str) -> socket.socket:
    """Start a ProxyCommand and return the socket to it; the command ends when the socket is closed."""
    near, far = socket.socketpair()
    with far:
        subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=far.fileno(),
            stdout=far.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return near


def _connection_error(error: OSError) -> _LostError:
    reach = Reach.REFUSED if isinstance(error, ConnectionError) else Reach.NO_ROUTE
    return _LostError(reach, error.strerror or type(error).__name__)


# --- sessions --------------------------------------------------------------------------------------------------------


class _State(Enum):
    """The state of a session, with the result when the session times out in it."""

    JUMP = (Reach.NO_ROUTE, "the connection through the jump host timed out")
    KEYS = (Reach.SHELL_HANGS, "sshd sent its SSH banner, but the key exchange timed out")
    LOGIN = (Reach.SHELL_HANGS, "the SSH login timed out")
    SHELL = (Reach.SHELL_HANGS, "the SSH login succeeded, but no shell started in time")
    PROBE = (Reach.TIMEOUT, "the probe started, but did not end in time")


class _Shared:
    """Resources shared by the sessions of a scan: keys, read once, and connections to jump hosts."""

    def __init__(self, options: ProbeSettings) -> None:
        self.payload = zlib.compress(options.source, 9)
        self.arguments = json.dumps({"deadline_s": options.probe_s, "framed": True})
        self.parsing = threading.Lock()
        self._mutex = threading.Lock()
        self._keys: dict[str, paramiko.PKey | None] = {}
        self._agent: list[paramiko.PKey] | None = None
        self._host_keys: dict[tuple[str, ...], HostKeys] = {}
        self._hops: dict[tuple[Target, ...], _Hop] = {}

    def keys(self, target: Target) -> Iterable[paramiko.PKey]:
        """The private keys to try, in order: those of the inventory, then those of the agent."""
        named = [Path(file) for file in target.key_files]
        for path in named or [Path(name).expanduser() for name in DEFAULT_KEYS]:
            if key := self._key(str(path)):
                yield key
        if not target.identities_only:
            yield from self._agent_keys()

    def host_keys(self, target: Target, more: str) -> tuple[HostKeys, bool]:
        """The host keys to check a machine against, and whether its key must be one of them.

        ``more`` holds further known_hosts lines. The keys that gpunodes has learned are used only where the files of
        the user and of the system have no key of the machine.
        """
        files = target.rules.files
        configured = (*openssh.user_known_hosts(), *openssh.GLOBAL_KNOWN_HOSTS) if files is None else files
        found = self._read_keys((*configured, more))
        if target.rules.strict or found.knows(target.host_key_name):
            return found, True
        return self._read_keys((str(settings.known_hosts()), *configured, more)), False

    def _read_keys(self, sources: tuple[str, ...]) -> HostKeys:
        *files, more = sources
        if more:
            return HostKeys([Path(file) for file in files], more)
        with self._mutex:
            if sources not in self._host_keys:
                self._host_keys[sources] = HostKeys([Path(file) for file in files])
            return self._host_keys[sources]

    def hop(self, jump: tuple[Target, ...]) -> paramiko.Transport:
        """The connection to the last of these jump hosts; raises _LostError. All machines behind it share it."""
        with self._mutex:
            hop = self._hops.setdefault(jump, _Hop())
        with hop.mutex:
            if hop.lost is None and hop.transport is None:
                try:
                    hop.transport = self._connect_hop(jump)
                except _LostError as lost:
                    hop.lost = _LostError(lost.reach, f"{jump[-1].name}: {lost.message}")
            if hop.transport is None:
                raise hop.lost or _LostError(Reach.NO_ROUTE, f"{jump[-1].name} is not connected")
            return hop.transport

    def close(self) -> None:
        """Close the connections to jump hosts."""
        for hop in self._hops.values():
            if hop.transport is not None:
                hop.transport.close()

    def _connect_hop(self, jump: tuple[Target, ...]) -> paramiko.Transport:
        *before, last = jump
        if before:
            connection: Any = _tunnel(self.hop(tuple(before)), last)
        elif last.proxy_command:
            connection = _proxy_socket(last.proxy_command)
        else:
            try:
                connection = socket.create_connection((last.address, last.port), timeout=_HOP_S)
            except OSError as error:
                raise _connection_error(error) from error
        connection.settimeout(None)
        stream = _Stream(connection)
        timer = threading.Timer(_HOP_S, stream.close)
        timer.daemon = True
        timer.start()
        try:
            return _login(_handshake(stream, last, self), last, self)
        finally:
            timer.cancel()

    def _key(self, path: str) -> paramiko.PKey | None:
        with self._mutex:
            if path not in self._keys:
                try:
                    self._keys[path] = paramiko.PKey.from_path(path)
                except (OSError, ValueError, TypeError, paramiko.SSHException):
                    # The file is missing, or a passphrase protects it: then the agent may have the key.
                    self._keys[path] = None
            return self._keys[path]

    def _agent_keys(self) -> list[paramiko.PKey]:
        with self._mutex:
            if self._agent is None:
                lock = threading.Lock()
                try:
                    keys = paramiko.Agent().get_keys() if os.environ.get("SSH_AUTH_SOCK") else ()
                except (OSError, paramiko.SSHException):
                    keys = ()
                self._agent = [_AgentKey(key, lock) for key in keys]
            return self._agent


class _Hop:
    """The connection to a jump host, opened by the first session that needs it."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.transport: paramiko.Transport | None = None
        self.lost: _LostError | None = None


class _AgentKey(paramiko.AgentKey):  # type: ignore[misc]  # paramiko has no types
    """A key of the agent. All keys share one connection to the agent, so signatures are serialized."""

    def __init__(self, key: paramiko.AgentKey, lock: threading.Lock) -> None:
        super().__init__(key.agent, key.blob)
        self._lock = lock

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        with self._lock:
            signed: bytes = super().sign_ssh_data(data, algorithm)
            return signed


class _Stream:
    """A socket for paramiko that reads ahead: half the system calls, and no polling ten times a second."""

    _closed = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._ahead = b""

    def send(self, data: bytes) -> int:
        sent: int = self._connection.send(data)
        return sent

    def recv(self, size: int) -> bytes:
        ahead = self._ahead or self._connection.recv(1 << 16)
        self._ahead = ahead[size:]
        return bytes(ahead[:size])

    def settimeout(self, seconds: float | None) -> None:
        """Ignored: the scan closes the socket at the deadline of the session."""

    def close(self) -> None:
        self._closed = True
        # Only shutdown(2) wakes a thread that is reading.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Packetizer(Packetizer):  # type: ignore[misc]  # as above
    """No handshake timer, which costs a thread for each connection: the scan enforces the deadline of the session."""

    def start_handshake(self, timeout: float) -> None:
        pass


class _Session:
    """The session with one machine: keys, login, shell, probe. A worker calls ``run``; the scan may call ``abort``."""

    def __init__(self, target: Target, connection: socket.socket | None, shared: _Shared) -> None:
        self.target = target
        self.began: float | None = None
        self._connection = connection
        self._shared = shared
        self._state = _State.JUMP if connection is None else _State.KEYS
        self._stream: _Stream | None = None
        self._aborted: tuple[Reach, str] | None = None

    def timeout_reason(self) -> tuple[Reach, str]:
        """The result when the session times out in its current state."""
        return self._state.value

    def abort(self, reach: Reach, message: str) -> None:
        """Close the connection, so that ``run`` returns with this result."""
        if self._aborted is None:
            self._aborted = reach, message
            if self._stream is not None:
                self._stream.close()
            elif self._connection is not None:
                self._connection.close()

    def run(self) -> ProbeResult:
        """Run the session to its end; raises nothing."""
        self.began = time.monotonic()
        facts = None
        try:
            facts = self._run()
            reach, message = Reach.ANSWERED, ""
        except _LostError as lost:
            reach, message = lost.reach, lost.message
        except (paramiko.SSHException, OSError, EOFError) as error:
            reach, message = self._classify(error)
        except Exception as error:  # a machine may trigger any error in paramiko: the scan must go on
            reach, message = Reach.PROBE_FAILED, f"{type(error).__name__}: {error}"
        finally:
            if self._stream is not None:
                self._stream.close()
        if facts is None and self._aborted is not None:
            reach, message = self._aborted
        return ProbeResult(self.target.name, reach, _line(message), facts, time.monotonic() - self.began)

    def _run(self) -> Mapping[str, Any]:
        connection: Any = self._connection
        if self._aborted:
            raise EOFError
        if connection is None:
            connection = _tunnel(self._shared.hop(self.target.jump), self.target)
        else:
            connection.setblocking(True)
        self._stream = _Stream(connection)
        if self._aborted:
            raise EOFError
        self._state = _State.KEYS
        transport = _handshake(self._stream, self.target, self._shared)
        self._state = _State.LOGIN
        _login(transport, self.target, self._shared)
        self._state = _State.SHELL
        channel = transport.open_session()
        channel.exec_command(_command(self.target, self._shared.arguments))
        # A command that ends before it has read the probe reports the reason in its output, which is read below.
        with contextlib.suppress(OSError):
            channel.sendall(shell.for_sudo(_variables(self.target)).encode() + self._shared.payload)
            channel.shutdown_write()
        packed = self._read_output(channel)
        transport.close()
        with self._shared.parsing:
            return _unpacked(packed)

    def _read_output(self, channel: paramiko.Channel) -> bytes:
        """The compressed document in the output, without the banner of the login shell."""
        data = b""
        length = None
        while length is None:
            chunk = channel.recv(1 << 16)
            data += chunk
            start = data.find(_FRAME_MARK)
            if start >= 0 and self._state is _State.SHELL:
                self._state = _State.PROBE
            length, data = _parse_frame(data) if start >= 0 else (None, data)
            if length is None and (not chunk or len(data) > _MAX_BANNER_BYTES):
                raise _LostError(Reach.PROBE_FAILED, _failure_message(channel, data, too_long=bool(chunk)))
        if length > PACKED_BYTES:
            raise _LostError(Reach.PROBE_FAILED, f"the probe's output has {length} bytes; the limit is {PACKED_BYTES}")
        parts = [data]
        missing = length - len(data)
        while missing > 0:
            chunk = channel.recv(1 << 16)
            if not chunk:
                raise _LostError(Reach.PROBE_FAILED, "the probe's output is incomplete")
            parts.append(chunk)
            missing -= len(chunk)
        return b"".join(parts)[:length]

    def _classify(self, error: Exception) -> tuple[Reach, str]:
        """The result for an error of paramiko or of the socket."""
        if self._state is _State.KEYS:
            message = str(error)
            if isinstance(error, EOFError | ConnectionError) or "banner" in message or not message:
                return Reach.REFUSED, "sshd closed the connection before the login"
            return Reach.SHELL_HANGS if "imed out" in message else Reach.REFUSED, message
        if self._state is _State.LOGIN:
            return Reach.LOGIN_REFUSED, str(error) or "sshd closed the connection during the login"
        if self._state is _State.JUMP:
            return Reach.NO_ROUTE, str(error) or "the jump host closed the connection"
        return Reach.PROBE_FAILED, str(error) or "the connection was closed"


def _tunnel(transport: paramiko.Transport, target: Target) -> paramiko.Channel:
    """A connection to ``target`` through the jump host that ``transport`` is connected to."""
    try:
        return transport.open_channel("direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=_HOP_S)
    except paramiko.ChannelException as error:
        # The jump host sends a reason, which paramiko does not pass on.
        raise _LostError(Reach.NO_ROUTE, f"from the jump host: {error.text}") from error
    except (paramiko.SSHException, EOFError) as error:
        raise _LostError(Reach.NO_ROUTE, f"from the jump host: {error or 'no response'}") from error


def _handshake(stream: _Stream, target: Target, shared: _Shared) -> paramiko.Transport:
    """Exchange keys and check the machine's host key; raises _LostError."""
    transport = paramiko.Transport(stream, packetizer_class=_Packetizer)
    transport.banner_timeout = _HOP_S
    security = transport.get_security_options()
    # GCM ciphers authenticate each packet while decrypting; for others paramiko does that in Python, byte by byte.
    security.ciphers = sorted(security.ciphers, key=lambda name: "gcm" not in name)
    name = target.host_key_name
    host_keys, _ = shared.host_keys(target, _from_known_hosts_command(target))
    if known := host_keys.types(name):
        # As ssh does: prefer the types of the keys that are known, to be able to compare.
        preferred = [kind for kind in security.key_types if any(_can_sign_with(kind, each) for each in known)]
        security.key_types = [*preferred, *(kind for kind in security.key_types if kind not in preferred)]
    if host_keys.certified(name) or target.rules.revoked:
        # As ssh does: prefer a certificate to any key; its authority may be revoked.
        plain = security.key_types
        certified = [f"{kind}{_CERTIFICATE}" for kind in plain]
        security.key_types = [*(kind for kind in certified if kind in transport._key_info), *plain]
    ended = threading.Event()
    transport.start_client(event=ended)
    ended.wait()
    if not transport.is_active():
        raise transport.get_exception() or EOFError
    key = transport.get_remote_server_key()
    shown = key.public_blob.key_blob if key.public_blob else b""
    try:
        host_keys, strict = shared.host_keys(target, _from_known_hosts_command(target, key, shown))
    except _LostError:
        transport.close()
        raise
    if any(_revoked(Path(file), key, shown) for file in target.rules.revoked):
        trust = Trust.REVOKED
    else:
        trust = host_keys.judge(name, key.get_name(), key.asbytes(), shown, strict=strict)
    if trust not in {Trust.NEW, Trust.KNOWN}:
        transport.close()
        remedy = _remedy(trust, name, learned=not strict)
        raise _LostError(
            Reach.KEY_UNKNOWN if trust is Trust.UNKNOWN else Reach.KEY_CHANGED,
            f"its host key {trust.value}: {key.get_name()} {key.fingerprint}; {remedy}",
        )
    return transport


def _remedy(trust: Trust, name: str, *, learned: bool) -> str:
    if trust is Trust.UNKNOWN and learned:
        return f"{settings.known_hosts()} cannot be written"
    if trust is Trust.UNKNOWN:
        return (
            "ssh_config, or a certificate authority in known_hosts, does not allow new keys: "
            "if the key is right, add it to known_hosts"
        )
    if trust is Trust.REVOKED:
        return "another host may use that key: replace the key of the machine"
    if trust is Trust.INVALID:
        return "its name, its validity or its signature is wrong: issue a new certificate"
    if not learned:
        return "known_hosts of the user or of the system holds another key: if the new key is right, correct it there"
    return f"if the new key is right, run `ssh-keygen -R '{name}' -f {settings.known_hosts()}`"


def _from_known_hosts_command(target: Target, key: paramiko.PKey | None = None, certificate: bytes = b"") -> str:
    """The known_hosts lines that KnownHostsCommand prints for a machine.

    As ssh does, it runs before the key exchange and again with the machine's key. Raises _LostError where ssh would
    give up.
    """
    if not target.rules.command:
        return ""
    kind, blob = _public_key(key, certificate) if key else ("NONE", "NONE")
    tokens = {"%%": "%", "%f": key.fingerprint if key else "NONE", "%K": blob, "%t": kind}
    tokens["%I"] = "HOSTNAME" if key else "ORDER"
    tokens["%H"] = target.host_key_name if key else target.address
    argv = [openssh.expand(word, tokens) for word in target.rules.command]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_HOP_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise _LostError(Reach.KEY_UNKNOWN, f"KnownHostsCommand failed: {error}") from error
    return hostkeys.lines_of(done.stdout.decode("utf-8", "replace"), target.host_key_name)


def _revoked(path: Path, key: paramiko.PKey, certificate: bytes) -> bool:
    """Whether a file of RevokedHostKeys has this key, its certificate, or the authority of that.

    As with ssh, a file that cannot be read revokes every key.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return True
    if not data.startswith(_KRL):
        return hostkeys.is_among(data.decode("utf-8", "replace"), key.asbytes(), certificate)
    done = subprocess.run(
        ["ssh-keygen", "-Q", "-f", path, "/dev/stdin"],
        input=f"{' '.join(_public_key(key, certificate))}\n".encode(),
        capture_output=True,
        check=False,
    )
    return done.returncode != 0


def _public_key(key: paramiko.PKey, certificate: bytes) -> tuple[str, str]:
    """The type of a key, or of its certificate, and the same in base64."""
    blob = certificate or key.asbytes()
    return hostkeys.kind(blob), base64.b64encode(blob).decode()


def _can_sign_with(algorithm: str, kind: str) -> bool:
    """Whether a key of this type can sign with this algorithm: ssh-rsa keys sign with rsa-sha2-*, too."""
    return algorithm == kind or (kind == "ssh-rsa" and algorithm.startswith("rsa-sha2-"))


def _login(transport: paramiko.Transport, target: Target, shared: _Shared) -> paramiko.Transport:
    """Log in with the keys, then with the password; raises _LostError when all are refused."""
    tried = 0
    for key in shared.keys(target):
        if tried == _LOGIN_TRIES:
            break
        tried += 1
        if _try_login(transport, functools.partial(transport.auth_publickey, target.user, key)):
            return transport
        if not transport.is_active():
            break
    if target.password and transport.is_active():
        by_password = functools.partial(transport.auth_password, target.user, target.password, fallback=False)
        if _try_login(transport, by_password):
            return transport
    how = f"{tried} key{'s' if tried != 1 else ''}" + (" and the password" if target.password else "")
    raise _LostError(Reach.LOGIN_REFUSED, f"sshd refused the login of {target.user} with {how}")


def _try_login(transport: paramiko.Transport, authenticate: Callable[..., object]) -> bool:
    """Try one login method. It gets an event: without one, paramiko polls ten times a second."""
    done = threading.Event()
    try:
        authenticate(event=done)
    except paramiko.BadAuthenticationType:
        return False
    while not done.wait(_POLL_S) and transport.is_active():
        pass
    authenticated: bool = transport.is_authenticated()
    return authenticated


def _command(target: Target, arguments: str) -> str:
    """The command for the login shell: unpack the probe from standard input and run it, as root if possible."""
    argv = shell.python(_variables(target), _UNPACK, arguments)
    return shell.remote(argv, _variables(target), shell.Become.IF_POSSIBLE if target.become else shell.Become.NEVER)


def _variables(target: Target) -> Mapping[str, Any]:
    """The inventory variables that the command depends on."""
    password = target.become_password if target.become else ""
    return {"ansible_python_interpreter": target.python, "ansible_become_password": password}


# --- output ----------------------------------------------------------------------------------------------------------


def _parse_frame(data: bytes) -> tuple[int | None, bytes]:
    """The announced length of the document, and the data after it; None until the announcement is complete."""
    start = 0
    while (start := data.find(_FRAME_MARK, start)) >= 0:
        end = data.find(b"\n", start)
        if end < 0:
            break
        length = data[start + len(_FRAME_MARK) : end]
        if length.isdigit() and len(length) < len(str(1 << 63)):
            return int(length), data[end + 1 :]
        start = end
    return None, data


def _unpacked(packed: bytes) -> Mapping[str, Any]:
    """The document; raises _LostError unless it is a JSON object within the size limits."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, UNPACKED_BYTES)
        if not unpacker.eof:
            raise _LostError(
                Reach.PROBE_FAILED, f"the probe's output unpacks to more than {UNPACKED_BYTES} bytes, or is incomplete"
            )
        if sum(data.count(character) for character in b"[{,") > ITEMS:
            raise _LostError(Reach.PROBE_FAILED, f"the probe's output holds more than {ITEMS} values")
        document = json.loads(data)
    except (zlib.error, ValueError, RecursionError) as error:
        raise _LostError(Reach.PROBE_FAILED, f"the probe's output cannot be parsed: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise _LostError(Reach.PROBE_FAILED, "the probe's output is not a JSON object")
    return document


def _failure_message(channel: paramiko.Channel, data: bytes, *, too_long: bool) -> str:
    """The reason for missing output of the probe: the last line that the machine printed."""
    if too_long:
        return f"the login shell printed more than {_MAX_BANNER_BYTES} bytes before the output of the probe"
    stderr = channel.recv_stderr(4096) if channel.recv_stderr_ready() else b""
    lines = (stderr or data[-4096:]).decode("utf-8", "replace").strip().splitlines()
    status = channel.recv_exit_status() if channel.exit_status_ready() else -1
    return lines[-1] if lines else f"the probe printed no output; exit status {status}"


def _line(text: str) -> str:
    """One line of limited length, without control characters for the terminal."""
    return printable(text)[:300]


# paramiko raises an exception for everything that it logs.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False
logging.getLogger("paramiko").setLevel(logging.CRITICAL)
