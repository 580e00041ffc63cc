"""A loopback port of the controller that leads to a pod: SSH to a control plane, and from there the cluster's API.

One ssh carries both: it runs the program ``module_utils/port_forward.py``, which forwards a loopback port of the
control plane to the pod, and forwards that one port only (``engine/remote/forward.py``). Other users of the controller
and of the control plane can reach these ports: what listens there must ask for a secret.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes.engine.cluster.connection import ADMIN
from gpunodes.engine.remote import forward, openssh, programs, shell
from gpunodes.engine.remote.stream import Stream, StreamLost
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, printable

_ATTEMPTS = 3
_START_S = 60.0
_PATIENCE_S = 45.0
"""Seconds without a sign of life of the program after which the connection counts as broken."""
# Outside of NodePorts and of Linux' ephemeral ports: hardly anything listens there. kubectl refuses a port in use.
_FIRST, _NUMBER = 20000, 10000


@dataclass(frozen=True, slots=True)
class Target:
    """What a tunnel leads to, for messages: its name, and the command that shows its state."""

    name: str
    status: str


NOTEBOOK = Target("notebook", "gpunodes jupyter list")
REGISTRY = Target("registry", "gpunodes registry status")


class Tunnel:
    """An open tunnel."""

    def __init__(self, port: int, stream: Stream, machine: str, to: Target) -> None:
        self.port = port
        self._to = to
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
                raise _ended(found, self._machine, self._to)

    def check(self, path: str) -> None:
        """Raise GpunodesError unless an HTTP server answers at the other end."""
        if why := forward.unanswered(self.port, path):
            raise GpunodesError(
                f"nothing answers through the tunnel: {self._stream.lost(why).problem.found}",
                f"a server in the pod, and an SSH server on {self._machine} that forwards ports",
                f"see `{self._to.status}`, and AllowTcpForwarding in its sshd_config",
            )


@contextlib.contextmanager
def opened(
    machine: Machine,
    variables: Mapping[str, Any],
    namespace: str,
    pod: str,
    port: int,
    local: int = 0,
    to: Target = NOTEBOOK,
) -> Iterator[Tunnel]:
    """A tunnel to a port of a pod, over a control plane with these inventory variables, while inside.

    ``local`` is the port of the controller, 0 for any that is free. Raises WrongInput if it is in use, and
    GpunodesError if there is no tunnel.
    """
    local = forward.free(local)
    options = {"kubeconfig": ADMIN, "namespace": namespace, "pod": pod, "port": port}
    with contextlib.ExitStack() as stack:
        for left in reversed(range(_ATTEMPTS)):
            between = _FIRST + secrets.randbelow(_NUMBER)
            control = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpunodes-"))) / "ssh"
            stream = stack.enter_context(_started(machine, variables, options | {"local": between}, control))
            found = stream.line(_START_S)
            if found.get("state") == "forwarding":
                if why := forward.request(control, local, "127.0.0.1", between):
                    raise stream.lost(f"its port was not forwarded: {why}")
                yield Tunnel(local, stream, machine.name, to)
                return
            if not left or "unable to listen" not in str(found.get("reason")):
                raise _ended(found, machine.name, to)
            stack.close()


def _started(machine: Machine, variables: Mapping[str, Any], options: Mapping[str, Any], control: Path) -> Stream:
    command = programs.pack("port_forward", options).command(variables)
    own = (*forward.control_options(control), *openssh.SESSION_TIMEOUTS)
    argv = shell.command(machine.address, variables, *own)
    return Stream(machine.name, [*argv, command.line], command.stdin, shell.environment(variables))


def _ended(found: Mapping[str, Any], machine: str, to: Target) -> GpunodesError:
    reason = printable(str(found.get("reason") or "without a reason"))
    return StreamLost(
        f"{machine}: the connection to the {to.name} ended: {reason}",
        "a pod that keeps running, and kubectl on the control plane",
        f"see `{to.status}`, then run the same command again",
    )
