"""A loopback port of the controller that leads to an address which a machine reaches, over SSH.

Other connections of gpunodes forward nothing (``openssh.options``), whatever ssh_config has; so does this one when it
starts. Then exactly one port is requested over its control socket, in a folder that only this user may enter.
``engine/jupyter/tunnel.py`` forwards in the same way, to a program that it runs on the machine.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpunodes.engine.deadline import LoopbackConnection
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import commands, openssh, shell
from gpunodes.engine.remote.commands import Become
from gpunodes.engine.remote.messages import Messages
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine

_START_S = 60.0
_REQUEST_S = 20.0
_ANSWER_S = 20.0
_POLL_S = 0.1


class Forward:
    """A port that is open. ``machine`` is the name of the machine between, for messages."""

    def __init__(self, machine: str, process: subprocess.Popen[bytes], messages: Messages) -> None:
        self.machine = machine
        self._process = process
        self._messages = messages

    def follow(self) -> None:
        """Wait until the connection ends, and raise GpunodesError with the reason; Ctrl-C interrupts it."""
        self._process.wait()
        raise self.lost("the SSH connection ended")

    def lost(self, why: str) -> GpunodesError:
        """The error for a broken connection, with what ssh reports about it."""
        reason = ssh_reason(self._messages.text())
        return GpunodesError(
            f"{self.machine}: {reason or why}",
            "a machine that is reachable by SSH, and whose SSH server forwards ports",
            "check that `ssh` to it works, and AllowTcpForwarding in its sshd_config",
        )


@contextlib.contextmanager
def opened(machine: Machine, variables: Mapping[str, Any], address: str, port: int, local: int) -> Iterator[Forward]:
    """Forward the port ``local`` of 127.0.0.1 to ``address`` and ``port``, as ``machine`` reaches it, while inside.

    ``variables`` are the machine's in the inventory. Raises WrongInput if the port is in use, and GpunodesError for an
    address that is none, or without a connection.
    """
    target = _checked(address)
    free(local)
    with tempfile.TemporaryDirectory(prefix="gpunodes-") as folder:
        control = Path(folder) / "ssh"
        # It ends with this process, even a killed one: `cat` ends with its input.
        command = commands.remote(["cat"], variables, Become.NEVER)
        own = (*control_options(control), *openssh.SESSION_TIMEOUTS)
        argv = [*shell.command(machine.address, variables, *own), command.line]
        process = subprocess.Popen(
            argv,
            env=shell.environment(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stderr  # noqa: S101 - for the type checker
            found = Forward(machine.name, process, Messages(process.stderr))
            _wait(found, process, control)
            if why := request(control, local, target, port):
                raise found.lost(f"its port was not forwarded: {why}")
            yield found
        finally:
            _end(process)


def _checked(address: str) -> str:
    """The address as text, which the cluster reported: no name, and nothing that ssh could read otherwise."""
    try:
        return str(ipaddress.IPv4Address(address))
    except ValueError as error:
        raise GpunodesError(f"{address!a} is not an IPv4 address", "the address of a pod", "") from error


def free(port: int) -> int:
    """The port of this computer, or any free one for 0; raises WrongInput if it cannot be used."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise WrongInput(
                f"port {port} of this computer cannot be used: {error.strerror}",
                "a free port",
                "choose another one with --port",
            ) from error
        found: int = listening.getsockname()[1]
        return found


def control_options(control: Path) -> tuple[str, ...]:
    """Options for an ssh that takes requests at the socket ``control``, and ends with its own session."""
    # ssh expands tokens in this option.
    quoted = f'"{control}"'.replace("%", "%%")
    return ("-o", "ControlMaster=yes", "-o", f"ControlPath={quoted}", "-o", "ControlPersist=no")


def _wait(found: Forward, process: subprocess.Popen[bytes], control: Path) -> None:
    """Wait until ssh is logged in, which is when it makes its control socket."""
    deadline = time.monotonic() + _START_S
    while not control.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise found.lost(f"no SSH connection within {_START_S:.0f} s")
        time.sleep(_POLL_S)


def request(control: Path, local: int, address: str, port: int) -> str:
    """Let an ssh that is logged in forward a port of 127.0.0.1; why it does not, "" if it does."""
    what = f"127.0.0.1:{local}:{address}:{port}"
    # Without a configuration: its forwards would be requested, too. No connection is made: there is a control socket.
    argv = ["ssh", "-F", "none", "-S", str(control), "-O", "forward", "-L", what, "--", "gpunodes"]
    done = shell.local(argv, deadline_s=_REQUEST_S)
    return "" if done.ok else ssh_reason(done.err) or str(done.reached)


def unanswered(local: int, path: str) -> str:
    """Why no HTTP server answers at the other end of a port of 127.0.0.1, "" if one does, with whatever status."""
    connection = LoopbackConnection(local, _ANSWER_S)
    try:
        connection.request("GET", path)
        connection.getresponse().read(1)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    # PermissionError: macOS, for a process that has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(OSError):
        if process.stdin:
            process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
