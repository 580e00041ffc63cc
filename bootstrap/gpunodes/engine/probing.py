"""The only file that knows paramiko: sends the probe to many machines at once and takes their answers.

One connection and one round trip a machine. A machine that does not greet holds up nothing but a socket: only greeted
connections get one of the ``parallel`` workers. Each machine has its time, the sweep has its own, and when either is
over the connection is closed under whoever waits on it. What comes back is bounded in size before it is unpacked, and
checked for nothing but that here: its shape is the business of who judges it.
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
from gpunodes.engine import hostkeys, openssh, shell
from gpunodes.engine.hostkeys import HostKeys, Trust
from gpunodes.engine.targets import DEFAULT_KEYS, Lookup, Target
from gpunodes.errors import WrongInput
from gpunodes.model import printable

PARALLEL = 64
"""How many machines are talked to at once."""
PACKED_BYTES = 2 << 20
UNPACKED_BYTES = 8 << 20
ITEMS = 1_000_000
"""Most values that a document may hold: what many brackets in little space would cost in memory."""
_NOISE_BYTES = 64 << 10
"""What a login shell may print before the probe speaks."""
_CONNECTING = 256
"""How many connections may wait for a greeting, or greeted for a worker."""
_LOOK_S = 2.0
"""Seconds between two looks whether a connection still is there, for what paramiko might forget to tell."""
_RESOLVERS = 16
"""How many names are looked up at once."""
_LOGIN_TRIES = 5
"""sshd ends a connection after six (MaxAuthTries)."""
_HOP_S = 20.0
"""Seconds that a jump host, or a connection made by one, may take."""
_KRL = b"SSHKRL\n\0"
_CERTIFICATE = "-cert-v01@openssh.com"
_MARK = b"gpunodes.probe/1 "

_UNPACK = 'import sys,zlib;exec(compile(zlib.decompress(sys.stdin.buffer.read()),"gpunodes-probe","exec"))'


_Place = tuple[socket.AddressFamily, Any]
"""An address, as a socket connects to it."""


class Reach(StrEnum):
    """How far we came with a machine."""

    ANSWERED = "answered"
    NO_ROUTE = "no_route"
    """No connection: no such name, no way there, or no answer."""
    REFUSED = "refused"
    """The machine is there; nobody listens, or whoever does hangs up."""
    KEY_CHANGED = "key_changed"
    KEY_UNKNOWN = "key_unknown"
    """And the user's own rules forbid to learn it."""
    LOGIN_REFUSED = "login_refused"
    SHELL_HANGS = "shell_hangs"
    """Connected, and then greeting, login or shell do not come: the kernel lives, the rest may not."""
    PROBE_FAILED = "probe_failed"
    """Logged in, but what came back is no answer."""
    TIMEOUT = "timeout"
    """The probe began and did not end in time."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What came of one machine; ``said`` is why there are no facts."""

    name: str
    reach: Reach
    message: str = ""
    facts: Mapping[str, Any] | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The probe, and the time that things may take, in seconds."""

    source: bytes
    probe_s: float = 30.0
    connect_s: float = 10.0
    """For the connection, and again for the greeting."""
    machine_s: float = 60.0
    """For all of a machine from its greeting on."""


def ssh_config() -> Lookup:
    """What the user's and the system's ssh_config say of a host; what ssh says, where a host key's check is concerned.

    The lookup raises WrongInput for a file that cannot be understood.
    """
    config = paramiko.SSHConfig()

    @functools.cache
    def find(host: str, arguments: tuple[str, ...]) -> Mapping[str, Any]:
        try:
            if own_rules or openssh.say_rules(arguments):
                return openssh.resolved(host, arguments)
            found: dict[str, Any] = dict(config.lookup(host))
        except (openssh.ResolveError, paramiko.SSHException, ImportError, KeyError, ValueError) as error:
            raise _unreadable(error) from error
        if found.get("hostname") == host:
            del found["hostname"]
        return found

    # A process for each machine would be felt: ssh is asked where somebody says something of host keys.
    own_rules = openssh.has_own_rules()
    if not own_rules:
        try:
            config.parse(openssh.config_lines())
        except paramiko.SSHException as error:
            raise _unreadable(error) from error
    return lambda host, arguments: find(host, tuple(arguments))


def _unreadable(error: Exception) -> WrongInput:
    return WrongInput(f"ssh_config cannot be understood: {error}", "ssh_config(5)", "correct ~/.ssh/config")


def probe(
    targets: Sequence[Target],
    options: ProbeSettings,
    *,
    deadline_s: float,
    parallel: int = PARALLEL,
    on_answer: Callable[[ProbeResult], None] = lambda _: None,
) -> list[ProbeResult]:
    """Ask every target; returns after ``deadline_s`` seconds at the latest, with an answer for each, in their order.

    ``on_answer`` is called in the caller's thread, as the answers come.
    """
    return _Sweep(targets, options, time.monotonic() + deadline_s, parallel, on_answer).run()


class _LostError(Exception):
    """A machine does not answer; how far we came, and why not further."""

    def __init__(self, reach: Reach, message: str) -> None:
        super().__init__(message)
        self.reach = reach
        self.message = message


class _Sweep:
    """The state of one sweep. All but ``_work`` and what it calls runs in the caller's thread."""

    def __init__(
        self,
        targets: Sequence[Target],
        options: ProbeSettings,
        until: float,
        parallel: int,
        on_answer: Callable[[ProbeResult], None],
    ) -> None:
        self._targets = targets
        self._options = options
        self._until = until
        self._parallel = max(1, min(parallel, len(targets)))
        self._on_answer = on_answer
        self._waiting = deque(targets)
        self._naming: dict[str, float] = {}
        """Machines whose names are being looked up, and until when."""
        self._names: queue.SimpleQueue[Target | None] = queue.SimpleQueue()
        self._named: queue.SimpleQueue[tuple[Target, Sequence[_Place] | _LostError]] = queue.SimpleQueue()
        self._banners: dict[int, _Banner] = {}
        self._sessions: dict[str, _Session] = {}
        self._queue: queue.SimpleQueue[_Session | None] = queue.SimpleQueue()
        self._answers: dict[str, ProbeResult] = {}
        self._came: queue.SimpleQueue[ProbeResult] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._shared = _Shared(options)

    def run(self) -> list[ProbeResult]:
        """Ask, and wait."""
        _raise_file_limit()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        for _ in range(self._parallel):
            threading.Thread(target=self._work, daemon=True).start()
        for _ in range(min(_RESOLVERS, self._parallel)):
            threading.Thread(target=self._look_up, daemon=True).start()
        try:
            while len(self._answers) < len(self._targets) and time.monotonic() < self._until:
                self._begin()
                self._turn()
                self._expire()
        finally:
            for _ in range(self._parallel):
                self._queue.put(None)
                self._names.put(None)
            for banner in self._banners.values():
                banner.socket.close()
            for session in self._sessions.values():
                session.abort(Reach.TIMEOUT, "the sweep ended")
            self._shared.close()
            self._selector.close()
            self._bell.close()
        for target in self._targets:
            if target.name not in self._answers:
                self._answered(self._unfinished(target))
        return [self._answers[target.name] for target in self._targets]

    def _begin(self) -> None:
        """Open connections while there is room for more."""
        while self._waiting and len(self._banners) + len(self._naming) + self._unserved() < _CONNECTING:
            target = self._waiting.popleft()
            if target.jump:
                self._hand_over(target, None)
            elif target.proxy_command:
                self._watch(_Banner(target, [], time.monotonic() + self._options.connect_s))
            elif places := _numeric(target):
                self._banner(target, places)
            else:
                self._naming[target.name] = time.monotonic() + self._options.connect_s
                self._names.put(target)

    def _banner(self, target: Target, places: Sequence[_Place] | _LostError) -> None:
        """Open the connection, now that the address is known."""
        try:
            if isinstance(places, _LostError):
                raise places
            self._watch(_Banner(target, places, time.monotonic() + self._options.connect_s))
        except _LostError as lost:
            self._answered(ProbeResult(target.name, lost.reach, lost.message))

    def _unserved(self) -> int:
        return sum(session.began is None for session in self._sessions.values())

    def _watch(self, banner: _Banner) -> None:
        self._banners[banner.socket.fileno()] = banner
        self._selector.register(banner.socket, selectors.EVENT_READ if banner.connected else selectors.EVENT_WRITE)

    def _turn(self) -> None:
        """Wait for something to happen, at most a quarter of a second."""
        for key, _ in self._selector.select(0.25):
            if key.fileobj is self._bell:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
                continue
            banner = self._banners.pop(key.fd)
            self._selector.unregister(key.fileobj)
            if banner.connected:
                self._hand_over(banner.target, banner.socket)
                continue
            try:
                banner.go_on(time.monotonic() + self._options.connect_s)
            except _LostError as lost:
                self._answered(ProbeResult(banner.target.name, lost.reach, lost.message, took_s=banner.took_s))
                continue
            self._watch(banner)
        with contextlib.suppress(queue.Empty):
            while True:
                target, places = self._named.get_nowait()
                if self._naming.pop(target.name, None) is not None:
                    self._banner(target, places)
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._came.get_nowait()
                self._sessions.pop(answer.name, None)
                self._answered(answer)

    def _hand_over(self, target: Target, connection: socket.socket | None) -> None:
        session = _Session(target, connection, self._shared)
        self._sessions[target.name] = session
        self._queue.put(session)

    def _expire(self) -> None:
        """End what has had its time."""
        now = time.monotonic()
        for name in [name for name, until in self._naming.items() if until <= now]:
            del self._naming[name]
            self._answered(ProbeResult(name, Reach.NO_ROUTE, "no answer to the question for its address"))
        for descriptor, banner in list(self._banners.items()):
            if banner.until <= now:
                del self._banners[descriptor]
                self._selector.unregister(banner.socket)
                banner.socket.close()
                self._answered(ProbeResult(banner.target.name, *banner.stuck(), took_s=banner.took_s))
        for session in self._sessions.values():
            if session.began is not None and session.began + self._options.machine_s <= now:
                session.abort(*session.stuck())

    def _unfinished(self, target: Target) -> ProbeResult:
        """The answer of a machine that the end of the sweep overtook."""
        for banner in self._banners.values():
            if banner.target is target:
                return ProbeResult(target.name, *banner.stuck(), took_s=banner.took_s)
        session = self._sessions.get(target.name)
        if session is None or session.began is None:
            return ProbeResult(target.name, Reach.TIMEOUT, "the sweep's time was over before its turn came")
        return ProbeResult(target.name, *session.stuck(), took_s=time.monotonic() - session.began)

    def _answered(self, answer: ProbeResult) -> None:
        self._answers[answer.name] = answer
        self._on_answer(answer)

    def _work(self) -> None:
        """A worker: one machine after the other."""
        while session := self._queue.get():
            self._came.put(session.hold())
            with contextlib.suppress(OSError):
                self._ringer.send(b".")

    def _look_up(self) -> None:
        """A worker that finds addresses: a name server that is slow holds up its own machines only."""
        while target := self._names.get():
            found: Sequence[_Place] | _LostError
            try:
                found = _resolve(target.address, target.port)
            except _LostError as lost:
                found = lost
            self._named.put((target, found))
            with contextlib.suppress(OSError):
                self._ringer.send(b".")


def _raise_file_limit() -> None:
    """Machines by the thousand need more descriptors than a shell gives by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --- greeting --------------------------------------------------------------------------------------------------------


class _Banner:
    """A connection that nobody has said anything on."""

    def __init__(self, target: Target, places: Sequence[_Place], until: float) -> None:
        """Begin to connect to the first of ``places``, or start the ProxyCommand; raises _LostError."""
        self.target = target
        self.until = until
        self._began = time.monotonic()
        self.connected = False
        self._trouble = _LostError(Reach.NO_ROUTE, f"no address for {target.address}")
        if target.proxy_command:
            self.connected = True
            self.socket = _proxied(target.proxy_command)
            return
        self._places = deque(places)
        self._connect()

    def go_on(self, until: float) -> None:
        """The connection came, or did not; then the next address is tried. Raises _LostError after the last."""
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.socket.close()
            self._trouble = _lost(OSError(code, os.strerror(code)))
            self._connect()
            return
        self.connected = True
        self.until = until
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stuck(self) -> tuple[Reach, str]:
        """What it means that nothing more came."""
        if self.connected:
            return Reach.SHELL_HANGS, "it takes the connection, but its sshd does not greet"
        return Reach.NO_ROUTE, f"no answer from {self.target.address} port {self.target.port}"

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began

    def _connect(self) -> None:
        while self._places:
            family, address = self._places.popleft()
            self.socket = socket.socket(family, socket.SOCK_STREAM)
            self.socket.setblocking(False)
            code = self.socket.connect_ex(address)
            if code in {0, errno.EINPROGRESS}:
                return
            self.socket.close()
            self._trouble = _lost(OSError(code, os.strerror(code)))
        raise self._trouble


def _resolve(host: str, port: int) -> list[_Place]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _LostError(Reach.NO_ROUTE, f"{host} is no known name: {error.strerror}") from error
    return [(family, address) for family, _, _, _, address in found]


def _numeric(target: Target) -> list[_Place]:
    """The place of a machine whose address needs no looking up; none for a name."""
    try:
        found = socket.getaddrinfo(
            target.address, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in found]


def _proxied(command: str) -> socket.socket:
    """The connection that a ProxyCommand makes; the command ends when it is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours


def _lost(error: OSError) -> _LostError:
    reach = Reach.REFUSED if isinstance(error, ConnectionError) else Reach.NO_ROUTE
    return _LostError(reach, error.strerror or type(error).__name__)


# --- talking ---------------------------------------------------------------------------------------------------------


class _Stage(Enum):
    """Where a talk is, and what it means when it goes no further."""

    JUMP = (Reach.NO_ROUTE, "the jump host does not get through to it")
    KEYS = (Reach.SHELL_HANGS, "its sshd greets, but does not come to an agreement on keys")
    LOGIN = (Reach.SHELL_HANGS, "its sshd does not say whether the login is right")
    SHELL = (Reach.SHELL_HANGS, "the login is right, but no shell comes")
    PROBE = (Reach.TIMEOUT, "the probe began, but did not end in time")


class _Shared:
    """What the talks of a sweep share: keys, read once, and the connections to jump hosts."""

    def __init__(self, options: ProbeSettings) -> None:
        self.payload = zlib.compress(options.source, 9)
        self.arguments = json.dumps({"deadline_s": options.probe_s, "framed": True})
        self.parsing = threading.Lock()
        self._guard = threading.Lock()
        self._keys: dict[str, paramiko.PKey | None] = {}
        self._agent: list[paramiko.PKey] | None = None
        self._host_keys: dict[tuple[str, ...], HostKeys] = {}
        self._hops: dict[tuple[Target, ...], _Hop] = {}

    def keys(self, target: Target) -> Iterable[paramiko.PKey]:
        """The private keys to try, those of the inventory first; the agent is asked when they do not fit."""
        named = [Path(file) for file in target.key_files]
        for path in named or [Path(name).expanduser() for name in DEFAULT_KEYS]:
            if key := self._key(str(path)):
                yield key
        if not target.identities_only:
            yield from self._agents()

    def host_keys(self, target: Target, more: str) -> tuple[HostKeys, bool]:
        """The host keys that count for a machine, with these lines beside, and whether it must have one of them.

        Those that we learned count where the user's and the system's say nothing of it.
        """
        files = target.rules.files
        theirs = (*openssh.user_known_hosts(), *openssh.GLOBAL_KNOWN_HOSTS) if files is None else files
        found = self._read_keys((*theirs, more))
        if target.rules.strict or found.knows(target.host_key_name):
            return found, True
        return self._read_keys((str(settings.known_hosts()), *theirs, more)), False

    def _read_keys(self, sources: tuple[str, ...]) -> HostKeys:
        *files, more = sources
        if more:
            return HostKeys([Path(file) for file in files], more)
        with self._guard:
            if sources not in self._host_keys:
                self._host_keys[sources] = HostKeys([Path(file) for file in files])
            return self._host_keys[sources]

    def hop(self, jump: tuple[Target, ...]) -> paramiko.Transport:
        """The connection to the last of these jump hosts; raises _LostError. Machines behind it share it."""
        with self._guard:
            hop = self._hops.setdefault(jump, _Hop())
        with hop.guard:
            if hop.lost is None and hop.transport is None:
                try:
                    hop.transport = self._to_hop(jump)
                except _LostError as lost:
                    hop.lost = _LostError(lost.reach, f"{jump[-1].name}: {lost.message}")
            if hop.transport is None:
                raise hop.lost or _LostError(Reach.NO_ROUTE, f"{jump[-1].name} is not there")
            return hop.transport

    def close(self) -> None:
        """End the connections to jump hosts."""
        for hop in self._hops.values():
            if hop.transport is not None:
                hop.transport.close()

    def _to_hop(self, jump: tuple[Target, ...]) -> paramiko.Transport:
        *before, last = jump
        if before:
            connection: Any = _tunnel(self.hop(tuple(before)), last)
        elif last.proxy_command:
            connection = _proxied(last.proxy_command)
        else:
            try:
                connection = socket.create_connection((last.address, last.port), timeout=_HOP_S)
            except OSError as error:
                raise _lost(error) from error
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
        with self._guard:
            if path not in self._keys:
                try:
                    self._keys[path] = paramiko.PKey.from_path(path)
                except (OSError, ValueError, TypeError, paramiko.SSHException):
                    # Not there, or protected by a passphrase: then the agent has it.
                    self._keys[path] = None
            return self._keys[path]

    def _agents(self) -> list[paramiko.PKey]:
        with self._guard:
            if self._agent is None:
                lock = threading.Lock()
                try:
                    found = paramiko.Agent().get_keys() if os.environ.get("SSH_AUTH_SOCK") else ()
                except (OSError, paramiko.SSHException):
                    found = ()
                self._agent = [_AgentKey(key, lock) for key in found]
            return self._agent


class _Hop:
    """A jump host's connection, made by whoever needs it first."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.transport: paramiko.Transport | None = None
        self.lost: _LostError | None = None


class _AgentKey(paramiko.AgentKey):  # type: ignore[misc]  # paramiko has no types
    """A key of the agent; all share one connection to it, so one signs at a time."""

    def __init__(self, key: paramiko.AgentKey, lock: threading.Lock) -> None:
        super().__init__(key.agent, key.blob)
        self._lock = lock

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        with self._lock:
            signed: bytes = super().sign_ssh_data(data, algorithm)
            return signed


class _Stream:
    """A socket as paramiko wants it, that reads ahead: half the system calls, and no waking up ten times a second."""

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
        """Whoever watches over the talk closes the socket when it is time."""

    def close(self) -> None:
        self._closed = True
        # Only this wakes a thread that reads.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Packetizer(Packetizer):  # type: ignore[misc]  # as above
    """Without paramiko's timer of the handshake, a thread for each connection: the talk is watched over as a whole."""

    def start_handshake(self, timeout: float) -> None:
        pass


class _Session:
    """One machine's conversation: keys, login, shell, probe. ``hold`` runs in a worker, ``abort`` from outside."""

    def __init__(self, target: Target, connection: socket.socket | None, shared: _Shared) -> None:
        self.target = target
        self.began: float | None = None
        self._connection = connection
        self._shared = shared
        self._stage = _Stage.JUMP if connection is None else _Stage.KEYS
        self._stream: _Stream | None = None
        self._aborted: tuple[Reach, str] | None = None

    def stuck(self) -> tuple[Reach, str]:
        """What it means that it goes no further."""
        return self._stage.value

    def abort(self, reach: Reach, message: str) -> None:
        """Close the connection under it."""
        if self._aborted is None:
            self._aborted = reach, message
            if self._stream is not None:
                self._stream.close()
            elif self._connection is not None:
                self._connection.close()

    def hold(self) -> ProbeResult:
        """Talk to the end; raises nothing."""
        self.began = time.monotonic()
        facts = None
        try:
            facts = self._session()
            reach, message = Reach.ANSWERED, ""
        except _LostError as lost:
            reach, message = lost.reach, lost.message
        except (paramiko.SSHException, OSError, EOFError) as error:
            reach, message = self._meaning(error)
        except Exception as error:  # whatever a machine makes paramiko do, the sweep goes on
            reach, message = Reach.PROBE_FAILED, f"{type(error).__name__}: {error}"
        finally:
            if self._stream is not None:
                self._stream.close()
        if facts is None and self._aborted is not None:
            reach, message = self._aborted
        return ProbeResult(self.target.name, reach, _line(message), facts, time.monotonic() - self.began)

    def _session(self) -> Mapping[str, Any]:
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
        self._stage = _Stage.KEYS
        transport = _handshake(self._stream, self.target, self._shared)
        self._stage = _Stage.LOGIN
        _login(transport, self.target, self._shared)
        self._stage = _Stage.SHELL
        channel = transport.open_session()
        channel.exec_command(_command(self.target, self._shared.arguments))
        # A command that ends before it has read the probe has said why: that is read below.
        with contextlib.suppress(OSError):
            channel.sendall(shell.for_sudo(_variables(self.target)).encode() + self._shared.payload)
            channel.shutdown_write()
        packed = self._answer(channel)
        transport.close()
        with self._shared.parsing:
            return _unpacked(packed)

    def _answer(self, channel: paramiko.Channel) -> bytes:
        """The compressed document, out of whatever else the login shell prints."""
        data = b""
        length = None
        while length is None:
            chunk = channel.recv(1 << 16)
            data += chunk
            start = data.find(_MARK)
            if start >= 0 and self._stage is _Stage.SHELL:
                self._stage = _Stage.PROBE
            length, data = _framed(data) if start >= 0 else (None, data)
            if length is None and (not chunk or len(data) > _NOISE_BYTES):
                raise _LostError(Reach.PROBE_FAILED, _error_text(channel, data, over=bool(chunk)))
        if length > PACKED_BYTES:
            raise _LostError(Reach.PROBE_FAILED, f"it answers with {length} bytes; at most {PACKED_BYTES} are taken")
        parts = [data]
        missing = length - len(data)
        while missing > 0:
            chunk = channel.recv(1 << 16)
            if not chunk:
                raise _LostError(Reach.PROBE_FAILED, "its answer breaks off")
            parts.append(chunk)
            missing -= len(chunk)
        return b"".join(parts)[:length]

    def _meaning(self, error: Exception) -> tuple[Reach, str]:
        """What an error of paramiko or of the socket says of the machine."""
        if self._stage is _Stage.KEYS:
            message = str(error)
            if isinstance(error, EOFError | ConnectionError) or "banner" in message or not message:
                return Reach.REFUSED, "its sshd hangs up before the login"
            return Reach.SHELL_HANGS if "imed out" in message else Reach.REFUSED, message
        if self._stage is _Stage.LOGIN:
            return Reach.LOGIN_REFUSED, str(error) or "its sshd hangs up during the login"
        if self._stage is _Stage.JUMP:
            return Reach.NO_ROUTE, str(error) or "the jump host hangs up"
        return Reach.PROBE_FAILED, str(error) or "the connection broke"


def _tunnel(transport: paramiko.Transport, target: Target) -> paramiko.Channel:
    """A connection to ``target`` from the machine at the other end of ``transport``."""
    try:
        return transport.open_channel("direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=_HOP_S)
    except paramiko.ChannelException as error:
        # Why, the jump host tells paramiko, but paramiko does not tell us.
        raise _LostError(Reach.NO_ROUTE, f"from the jump host: {error.text}") from error
    except (paramiko.SSHException, EOFError) as error:
        raise _LostError(Reach.NO_ROUTE, f"from the jump host: {error or 'no answer'}") from error


def _handshake(stream: _Stream, target: Target, shared: _Shared) -> paramiko.Transport:
    """Agree on keys, and hold the machine's own against what we know; raises _LostError."""
    transport = paramiko.Transport(stream, packetizer_class=_Packetizer)
    transport.banner_timeout = _HOP_S
    security = transport.get_security_options()
    # These check each packet as they decrypt it; for others paramiko does that in Python, byte by byte.
    security.ciphers = sorted(security.ciphers, key=lambda name: "gcm" not in name)
    name = target.host_key_name
    host_keys, _ = shared.host_keys(target, _told(target))
    if known := host_keys.types(name):
        # As ssh does: ask for a key of a kind that we can hold against something.
        wanted = [kind for kind in security.key_types if any(_same_kind(kind, each) for each in known)]
        security.key_types = [*wanted, *(kind for kind in security.key_types if kind not in wanted)]
    if host_keys.certified(name) or target.rules.revoked:
        # As ssh does: ask for a certificate before anything else; its authority may be revoked.
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
        host_keys, strict = shared.host_keys(target, _told(target, key, shown))
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
            "ssh_config, or a certificate authority in known_hosts, forbids to learn it: if it is right, add it there"
        )
    if trust is Trust.REVOKED:
        return "whoever has that key may not be the machine: give it another"
    if trust is Trust.INVALID:
        return "its name, its time or its signature: have it certified again"
    if not learned:
        return "your known_hosts, or everybody's, holds another: if that is right, correct it there"
    return f"if that is right, run `ssh-keygen -R '{name}' -f {settings.known_hosts()}`"


def _told(target: Target, key: paramiko.PKey | None = None, certificate: bytes = b"") -> str:
    """What KnownHostsCommand says of a machine, asked as ssh asks it, before it shows a key and then again.

    Raises _LostError where ssh would give up.
    """
    if not target.rules.command:
        return ""
    kind, blob = _public(key, certificate) if key else ("NONE", "NONE")
    tokens = {"%%": "%", "%f": key.fingerprint if key else "NONE", "%K": blob, "%t": kind}
    tokens["%I"] = "HOSTNAME" if key else "ORDER"
    tokens["%H"] = target.host_key_name if key else target.address
    words = [openssh.expand(word, tokens) for word in target.rules.command]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_HOP_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise _LostError(Reach.KEY_UNKNOWN, f"KnownHostsCommand does not say its host key: {error}") from error
    return hostkeys.lines_of(done.stdout.decode("utf-8", "replace"), target.host_key_name)


def _revoked(path: Path, key: paramiko.PKey, certificate: bytes) -> bool:
    """Whether a file of RevokedHostKeys has this key, or its certificate, or who signed that.

    As with ssh, a file that cannot be read revokes them all.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return True
    if not data.startswith(_KRL):
        return hostkeys.is_among(data.decode("utf-8", "replace"), key.asbytes(), certificate)
    done = subprocess.run(
        ["ssh-keygen", "-Q", "-f", path, "/dev/stdin"],
        input=f"{' '.join(_public(key, certificate))}\n".encode(),
        capture_output=True,
        check=False,
    )
    return done.returncode != 0


def _public(key: paramiko.PKey, certificate: bytes) -> tuple[str, str]:
    """The kind of a key, or of its certificate, and itself in base64."""
    blob = certificate or key.asbytes()
    return hostkeys.kind(blob), base64.b64encode(blob).decode()


def _same_kind(algorithm: str, kind: str) -> bool:
    """Whether a key of this kind signs with this algorithm: a key of kind ssh-rsa does with rsa-sha2-*."""
    return algorithm == kind or (kind == "ssh-rsa" and algorithm.startswith("rsa-sha2-"))


def _login(transport: paramiko.Transport, target: Target, shared: _Shared) -> paramiko.Transport:
    """Log in with the keys, then the password; raises _LostError when none is taken."""
    tried = 0
    for key in shared.keys(target):
        if tried == _LOGIN_TRIES:
            break
        tried += 1
        if _let_in(transport, functools.partial(transport.auth_publickey, target.user, key)):
            return transport
        if not transport.is_active():
            break
    if target.password and transport.is_active():
        ask = functools.partial(transport.auth_password, target.user, target.password, fallback=False)
        if _let_in(transport, ask):
            return transport
    how = f"{tried} key{'s' if tried != 1 else ''}" + (" and the password" if target.password else "")
    raise _LostError(Reach.LOGIN_REFUSED, f"{target.user} is not let in with {how}")


def _let_in(transport: paramiko.Transport, ask: Callable[..., object]) -> bool:
    """Try one way to log in. With an event of ours: without one paramiko looks ten times a second."""
    done = threading.Event()
    try:
        ask(event=done)
    except paramiko.BadAuthenticationType:
        return False
    while not done.wait(_LOOK_S) and transport.is_active():
        pass
    authenticated: bool = transport.is_authenticated()
    return authenticated


def _command(target: Target, arguments: str) -> str:
    """What the machine's login shell is told: unpack what comes on standard input and run it, as root if we may."""
    words = shell.python(_variables(target), _UNPACK, arguments)
    return shell.remote(words, _variables(target), shell.Become.IF_POSSIBLE if target.become else shell.Become.NEVER)


def _variables(target: Target) -> Mapping[str, Any]:
    """What of a target's variables its commands depend on."""
    password = target.become_password if target.become else ""
    return {"ansible_python_interpreter": target.python, "ansible_become_password": password}


# --- the answer ------------------------------------------------------------------------------------------------------


def _framed(data: bytes) -> tuple[int | None, bytes]:
    """The announced length and what follows it; None while it has not come. Raises _LostError for nonsense."""
    start = 0
    while (start := data.find(_MARK, start)) >= 0:
        end = data.find(b"\n", start)
        if end < 0:
            break
        word = data[start + len(_MARK) : end]
        if word.isdigit() and len(word) < len(str(1 << 63)):
            return int(word), data[end + 1 :]
        start = end
    return None, data


def _unpacked(packed: bytes) -> Mapping[str, Any]:
    """The document; raises _LostError for anything but a JSON object of a bearable size."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, UNPACKED_BYTES)
        if not unpacker.eof:
            raise _LostError(Reach.PROBE_FAILED, f"its answer unpacks to more than {UNPACKED_BYTES} bytes, or is cut")
        if sum(data.count(sign) for sign in b"[{,") > ITEMS:
            raise _LostError(Reach.PROBE_FAILED, f"its answer holds more than {ITEMS} values")
        document = json.loads(data)
    except (zlib.error, ValueError, RecursionError) as error:
        raise _LostError(Reach.PROBE_FAILED, f"its answer cannot be read: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise _LostError(Reach.PROBE_FAILED, "its answer is no JSON object")
    return document


def _error_text(channel: paramiko.Channel, data: bytes, *, over: bool) -> str:
    """Why no probe spoke, in the machine's own words."""
    if over:
        return f"it prints more than {_NOISE_BYTES} bytes before the probe speaks"
    message = channel.recv_stderr(4096) if channel.recv_stderr_ready() else b""
    words = (message or data[-4096:]).decode("utf-8", "replace").strip().splitlines()
    status = channel.recv_exit_status() if channel.exit_status_ready() else -1
    return words[-1] if words else f"the probe said nothing; exit status {status}"


def _line(text: str) -> str:
    """One line that cannot steer a terminal, of bearable length."""
    return printable(text)[:300]


# What paramiko has to say comes as exceptions too.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False
logging.getLogger("paramiko").setLevel(logging.CRITICAL)
