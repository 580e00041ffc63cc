"""What a repair waits by its own defaults: a machine in memory hangs and boots as one does, and all else takes no time.

`python -m tests.bench.waits` measures this part alone, in about two minutes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from gpunodes import settings
from gpunodes.ansible.module_utils.gpunodes import probe
from gpunodes.engine.machine_control import StepResult
from gpunodes.model import Machine
from gpunodes.operations import repair
from gpunodes.repair import policy
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.record import RepairOutcome

from tests import repair_fleet
from tests.bench.table import Row, show

BOOT_S = 60.0
"""From the reset to sshd; the kubelet and the device plugin report at the same moment."""
SYSRQ_S = 3.0
"""The pauses between s, u and b (escalate.py)."""
NAME = "w1"


class _Hands(repair_fleet.Hands):
    """A machine whose orderly and forced reboots hang without an sshd, until its survivor uses sysrq."""

    def run_step(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        if step.name != "reboot":
            return StepResult(False, "SSH does not respond")
        self._machine.sshd = False
        after = next(seconds for seconds, name in later if name == "sysrq") + SYSRQ_S
        threading.Timer(after, self._down).start()
        threading.Timer(after + BOOT_S, self._up).start()
        return StepResult(True, armed=tuple(name for _, name in later))

    def _down(self) -> None:
        self._machine.off = True

    def _up(self) -> None:
        self._machine.use("sysrq")


class _World(repair_fleet.Fleet):
    """With the settings' own defaults, and looks at a hung machine that last as long as nvidia-smi is waited for."""

    def settings(self) -> dict[str, Any]:
        return settings.resolve({})

    def machine_control(self, machine: Machine, **_: Any) -> Any:
        return _Hands(self.machines[machine.name])

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, repair.MachineScan]:
        if not self.scans:
            time.sleep(probe.HOPELESS_S)
        return super().scan(machines, full=full)


def measure(folder: Path) -> Iterator[Row]:
    """The row; ``folder`` is for the repair's records."""
    made = repair_fleet.fleet(5, [NAME])
    place = _World(made.api, made.machines)
    request = repair.RepairRequest("health", policy.RepairLimits())
    machines = [machine for machine in place.entries if machine.name == NAME]
    with mock.patch.dict(os.environ, XDG_STATE_HOME=str(folder)):
        began = time.monotonic()
        result = repair.run(place, machines, request, lambda _, message: print(" ", message, file=sys.stderr))
        took = time.monotonic() - began
    if result.machines[0].outcome is not RepairOutcome.REPAIRED:
        raise RuntimeError(result.machines[0].why)
    yield Row(
        "what a repair waits by its defaults, without the boot",
        f"{took - BOOT_S:.0f} s",
        "60 s",
        "a hung machine in memory: nvidia-smi, the pauses between looks, reboots that hang, settling",
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as scratch:
        show(list(measure(Path(scratch))))
