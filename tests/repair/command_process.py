"""One controller's command as a separate process: `python command_process.py KUBECONFIG COMMAND MACHINE...`.

Takes the locks of such a command (operations/claims.py), prints "held" and works until its standard input ends; then
prints why it lost its locks, or "kept". A machine whose name begins with c is the control plane. Only SSH is not real:
the session with the API runs locally, and the SSH lock is omitted.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpunodes.engine import control_planes, locks
from gpunodes.engine.cluster.connection import here
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.operations import claims

PROGRAM = Path(__file__)


def main(kubeconfig: str, command: str, *names: str) -> None:
    """Hold the locks of the command."""
    transport = here(sys.executable, Path(kubeconfig))
    control_planes.over_ssh = lambda *_, **__: transport  # type: ignore[attr-defined]  # where it is used
    unlocked = SimpleNamespace(lost=lambda: None)
    locks.hold = lambda *_, **__: contextlib.nullcontext(unlocked)  # type: ignore[assignment]  # a stand-in
    machines = [Machine(name, name, Role.CONTROL_PLANE if name.startswith("c") else Role.WORKER) for name in names]
    control = Machine("c0", "c0", Role.CONTROL_PLANE)
    inventory: Any = SimpleNamespace(
        kubeconfig=None,
        control_planes=lambda: [control],
        connection=lambda _: {},
        machines=lambda *_: machines,
        cluster="simulated",
    )
    began = time.monotonic()
    try:
        with claims.claimed(inventory, machines, command) as claim:
            sys.stdout.write(f"held after {time.monotonic() - began:.1f} s\n")
            sys.stdout.flush()
            sys.stdin.read()
            sys.stdout.write(f"{claim.lost() or 'kept'}\n")
    except GpunodesError as problem:
        sys.stdout.write(f"{problem}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
