"""TCP connections through SSH jump hosts, for programs that are not SSH: each is a socket of this process.

The connections to the jump hosts are shared, and closed a while after their last use: a power server orders hundreds of
BMCs behind one jump host, each with several short requests.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import paramiko

from gpunodes.engine.remote.host_check import HostCheck
from gpunodes.engine.remote.jump_hosts import JumpHosts
from gpunodes.engine.remote.keys import PrivateKeys
from gpunodes.engine.remote.reach import LostError
from gpunodes.engine.remote.targets import Target

_IDLE_S = 30.0
_BYTES = 1 << 16


def connect(hops: tuple[Target, ...], host: str, port: int, limit_s: float) -> socket.socket:
    """A connection to a port that the last of these jump hosts reaches, which also resolves the name of the host.

    Raises LostError, and TimeoutError at the limit.
    """
    found: queue.Queue[socket.socket | Exception] = queue.Queue()
    mutex, given_up = threading.Lock(), threading.Event()

    def run() -> None:
        result: socket.socket | Exception
        try:
            result = _RELAYS.connect(hops, host, port)
        except Exception as error:  # it is raised in the caller's thread
            result = error
        with mutex:
            if given_up.is_set() and isinstance(result, socket.socket):
                result.close()
            found.put(result)

    # Each step of a login has its own limit, so this thread ends, if too late.
    threading.Thread(target=run, name="relay", daemon=True).start()
    try:
        result = found.get(timeout=limit_s)
    except queue.Empty:
        with mutex:
            given_up.set()
            if not found.empty() and isinstance(late := found.get(), socket.socket):
                late.close()
        raise TimeoutError from None
    if isinstance(result, Exception):
        raise result
    return result


@dataclass(eq=False)
class _Jump:
    """Connections to jump hosts, the hops of one path; closed when nobody has used them for a while."""

    hosts: JumpHosts
    users: int = 0
    timer: threading.Timer | None = None
    worked: bool = field(default=False)
    """Whether a connection has been made through it: then it may have broken since."""


class _Relays:
    """The connections to jump hosts of this process. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: dict[tuple[Target, ...], _Jump] = {}

    def connect(self, hops: tuple[Target, ...], host: str, port: int) -> socket.socket:
        target = Target(f"{host} port {port}", host, port, jump=hops)
        jump = self._taken(hops)
        try:
            channel = jump.hosts.tunnel(target)
        except LostError as error:
            worked = jump.worked
            is_refused = isinstance(error.__cause__, paramiko.ChannelException)
            self._released(hops, jump, broken=not is_refused)
            if is_refused or not worked:
                raise
            # The jump host was restarted, or a firewall forgot the connection. Nothing was sent yet.
            return self.connect(hops, host, port)
        except BaseException:
            self._released(hops, jump, broken=True)
            raise
        jump.worked = True
        near, far = socket.socketpair()
        _Relay(channel, far, lambda: self._released(hops, jump)).start()
        return near

    def _taken(self, hops: tuple[Target, ...]) -> _Jump:
        with self._mutex:
            # Keys and known hosts are read again for each new connection.
            jump = self._open.setdefault(hops, _Jump(JumpHosts(HostCheck(), PrivateKeys())))
            jump.users += 1
            if jump.timer:
                jump.timer.cancel()
                jump.timer = None
            return jump

    def _released(self, hops: tuple[Target, ...], jump: _Jump, *, broken: bool = False) -> None:
        with self._mutex:
            if broken and self._open.get(hops) is jump:
                del self._open[hops]
            jump.users -= 1
            if jump.users:
                return
            if self._open.get(hops) is jump:
                jump.timer = threading.Timer(_IDLE_S, self._expire, (hops, jump))
                jump.timer.daemon = True
                jump.timer.start()
                return
        jump.hosts.close()

    def _expire(self, hops: tuple[Target, ...], jump: _Jump) -> None:
        with self._mutex:
            if jump.users or self._open.get(hops) is not jump:
                return
            del self._open[hops]
        jump.hosts.close()


class _Relay:
    """Copies between a channel and a socket, until one of them ends; then both are closed, and ``ended`` is called."""

    def __init__(self, channel: paramiko.Channel, far: socket.socket, ended: Callable[[], None]) -> None:
        self._channel = channel
        self._far = far
        self._ended = ended
        self._mutex = threading.Lock()
        self._is_over = False

    def start(self) -> None:
        pairs = ((self._channel.recv, self._far.sendall), (self._far.recv, self._channel.sendall))
        for receive, send in pairs:
            threading.Thread(target=self._copy, args=(receive, send), name="relay", daemon=True).start()

    def _copy(self, receive: Callable[[int], bytes], send: Callable[[bytes], object]) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := receive(_BYTES):
                send(data)
        self._end()

    def _end(self) -> None:
        with self._mutex:
            if self._is_over:
                return
            self._is_over = True
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
        # Only shutdown(2) wakes the other thread.
        with contextlib.suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)
        self._far.close()
        self._ended()


_RELAYS = _Relays()
