"""A loopback port of the controller that leads to a pod: SSH to a control plane, and from there the cluster's API.

One ssh carries both: it forwards the port to a loopback port of the control plane, where the program
``module_utils/port_forward.py`` forwards it to the pod. ssh starts the program only after it has opened its own port,
so what the program reports shows that the port is ours. Other users of the controller and of the control plane can
reach these ports: what listens there must ask for a secret.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from gpunodes.engine.cluster.connection import ADMIN
from gpunodes.engine.remote import openssh, programs, shell
from gpunodes.engine.remote.stream import Stream, StreamLost
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine, printable

_ATTEMPTS = 3
_START_S = 60.0
_PATIENCE_S = 45.0
"""Seconds without a sign of life of the program after which the connection counts as broken."""
_ANSWER_S = 20.0
# Outside of NodePorts and of Linux' ephemeral ports: hardly anything listens there. kubectl refuses a port in use.
_FIRST, _NUMBER = 20000, 10000


class Tunnel:
    """An open tunnel."""

    def __init__(self, port: int, stream: Stream, machine: str) -> None:
        self.port = port
        self._stream = stream
        self._machine = machine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def follow(self) -> None:
        """Wait until the tunnel ends, and raise GpunodesError with the reason; Ctrl-C interrupts it."""
        while True:
            found = self._stream.line(_PATIENCE_S)
            if found.get("state") == "ended":
                raise _ended(found, self._machine)

    def check(self, path: str) -> None:
        """Raise GpunodesError unless an HTTP server answers at the other end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        try:
            connection.request("GET", path)
            connection.getresponse().read(1)
        except (OSError, http.client.HTTPException) as error:
            reason = self._stream.lost(str(error) or type(error).__name__).problem.found
            raise GpunodesError(
                f"nothing answers through the tunnel: {reason}",
                f"a server in the pod, and an SSH server on {self._machine} that forwards ports",
                "see `gpunodes jupyter list`, and AllowTcpForwarding in its sshd_config",
            ) from error
        finally:
            connection.close()


@contextlib.contextmanager
def opened(
    machine: Machine, variables: Mapping[str, Any], namespace: str, pod: str, port: int, local: int = 0
) -> Iterator[Tunnel]:
    """A tunnel to a port of a pod, over a control plane with these inventory variables, while inside.

    ``local`` is the port of the controller, 0 for any that is free. Raises WrongInput if it is in use, and
    GpunodesError if there is no tunnel.
    """
    local = _free(local)
    options = {"kubeconfig": ADMIN, "namespace": namespace, "pod": pod, "port": port}
    with contextlib.ExitStack() as stack:
        for left in reversed(range(_ATTEMPTS)):
            between = _FIRST + secrets.randbelow(_NUMBER)
            stream = stack.enter_context(_started(machine, variables, options | {"local": between}, local))
            found = stream.line(_START_S)
            if found.get("state") == "forwarding":
                yield Tunnel(local, stream, machine.name)
                return
            if not left or "unable to listen" not in str(found.get("reason")):
                raise _ended(found, machine.name)
            stack.close()


def _started(machine: Machine, variables: Mapping[str, Any], options: Mapping[str, Any], local: int) -> Stream:
    command = programs.pack("port_forward", options).command(variables)
    argv = shell.command(
        machine.address,
        variables,
        # Every other connection has yes, and ssh uses the first value.
        "-o", "ClearAllForwardings=no",
        "-o", "ExitOnForwardFailure=yes",
        "-L", f"127.0.0.1:{local}:127.0.0.1:{options['local']}",
        *openssh.SESSION_TIMEOUTS,
    )  # fmt: skip
    return Stream(machine.name, [*argv, command.line], command.stdin, shell.environment(variables))


def _free(port: int) -> int:
    """The port, or any free one for 0; raises WrongInput if another program has it."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise WrongInput(
                f"port {port} of this computer is in use", "a free port", "choose another one with --port"
            ) from error
        found: int = listening.getsockname()[1]
        return found


def _ended(found: Mapping[str, Any], machine: str) -> GpunodesError:
    reason = printable(str(found.get("reason") or "without a reason"))
    return StreamLost(
        f"{machine}: the connection to the notebook ended: {reason}",
        "a pod that keeps running, and kubectl on the control plane",
        "see `gpunodes jupyter list`, then run the same command again",
    )
