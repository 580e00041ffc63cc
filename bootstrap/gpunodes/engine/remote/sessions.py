"""The session with one machine: key exchange, login, shell, probe."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

import paramiko

from gpunodes.engine.remote import answers
from gpunodes.engine.remote.answers import MAX_BANNER_BYTES, PACKED_BYTES
from gpunodes.engine.remote.commands import Become, RemoteCommand
from gpunodes.engine.remote.host_check import HostCheck
from gpunodes.engine.remote.jump_hosts import JumpHosts
from gpunodes.engine.remote.keys import PrivateKeys
from gpunodes.engine.remote.login import Stream, handshake, login
from gpunodes.engine.remote.programs import Program
from gpunodes.engine.remote.reach import LostError, ProbeResult, Reach
from gpunodes.engine.remote.targets import Target
from gpunodes.model import printable


class State(Enum):
    """The state of a session, with the result when the session times out in it."""

    JUMP = (Reach.NO_ROUTE, "the connection through the jump host timed out")
    KEYS = (Reach.SHELL_HANGS, "sshd sent its SSH banner, but the key exchange timed out")
    LOGIN = (Reach.SHELL_HANGS, "the SSH login timed out")
    SHELL = (Reach.SHELL_HANGS, "the SSH login succeeded, but no shell started in time")
    PROBE = (Reach.TIMEOUT, "the probe started, but did not end in time")


class Shared:
    """What the sessions of a scan share: the packed probe, keys, connections to jump hosts."""

    def __init__(self, probe: Program) -> None:
        self.probe = probe
        self.parsing = threading.Lock()
        self.keys = PrivateKeys()
        self.check = HostCheck()
        self.jump_hosts = JumpHosts(self.check, self.keys)


class Session:
    """The session with one machine: keys, login, shell, probe. A worker calls ``run``; the scan may call ``abort``."""

    def __init__(self, target: Target, connection: socket.socket | None, shared: Shared) -> None:
        self.target = target
        self.began: float | None = None
        self._connection = connection
        self._shared = shared
        self._state = State.JUMP if connection is None else State.KEYS
        self._stream: Stream | None = None
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
        except LostError as lost:
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
        return ProbeResult(self.target.name, reach, _line(message), facts)

    def _run(self) -> Mapping[str, Any]:
        connection: Any = self._connection
        if self._aborted:
            raise EOFError
        if connection is None:
            connection = self._shared.jump_hosts.tunnel(self.target)
        else:
            connection.setblocking(True)
        self._stream = Stream(connection)
        if self._aborted:
            raise EOFError
        self._state = State.KEYS
        transport = handshake(self._stream, self.target, self._shared.check)
        self._state = State.LOGIN
        login(transport, self.target, self._shared.keys)
        self._state = State.SHELL
        channel = transport.open_session()
        command = _command(self.target, self._shared.probe)
        channel.exec_command(command.line)
        # A command that ends before it has read the probe reports the reason in its output, which is read below.
        with contextlib.suppress(OSError):
            channel.sendall(command.stdin)
            channel.shutdown_write()
        packed = self._read_output(channel)
        transport.close()
        with self._shared.parsing:
            return answers.unpacked(packed)

    def _read_output(self, channel: paramiko.Channel) -> bytes:
        """The compressed document in the output, without the banner of the login shell."""
        received = b""
        length = None
        while length is None:
            chunk = channel.recv(1 << 16)
            received += chunk
            output = answers.unframed(received)
            data = received if output is None else output
            if output is not None:
                self._state = State.PROBE
                length, data = answers.length(output)
            if length is None and (not chunk or len(received) > MAX_BANNER_BYTES):
                raise LostError(Reach.PROBE_FAILED, answers.failure_message(channel, data, too_long=bool(chunk)))
        if length > PACKED_BYTES:
            raise LostError(Reach.PROBE_FAILED, f"the probe's output has {length} bytes; the limit is {PACKED_BYTES}")
        parts = [data]
        missing = length - len(data)
        while missing > 0:
            chunk = channel.recv(1 << 16)
            if not chunk:
                raise LostError(Reach.PROBE_FAILED, "the probe's output is incomplete")
            parts.append(chunk)
            missing -= len(chunk)
        return b"".join(parts)[:length]

    def _classify(self, error: Exception) -> tuple[Reach, str]:
        """The result for an error of paramiko or of the socket."""
        if self._state is State.KEYS:
            message = str(error)
            if isinstance(error, EOFError | ConnectionError) or "banner" in message or not message:
                return Reach.REFUSED, "sshd closed the connection before the login"
            return Reach.SHELL_HANGS if "imed out" in message else Reach.REFUSED, message
        if self._state is State.LOGIN:
            return Reach.LOGIN_REFUSED, str(error) or "sshd closed the connection during the login"
        if self._state is State.JUMP:
            return Reach.NO_ROUTE, str(error) or "the jump host closed the connection"
        return Reach.PROBE_FAILED, str(error) or "the connection was closed"


def _command(target: Target, probe: Program) -> RemoteCommand:
    """The command that runs the probe, as root if possible."""
    variables = {"ansible_python_interpreter": target.python, "ansible_become_password": target.become_password}
    return probe.command(variables, Become.IF_POSSIBLE if target.become else Become.NEVER)


def _line(text: str) -> str:
    """One line of limited length, without control characters for the terminal."""
    return printable(text)[:300]
