"""Benchmark of a repair's waits with default settings: a simulated machine hangs and boots, all else takes no time.

`python -m tests.bench.waits` runs only this, in about two minutes.
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
from gpunodes.ansible.module_utils.probe import smi
from gpunodes.engine.machine_control import StepResult
from gpunodes.engine.scans import MachineScan
from gpunodes.model import Machine
from gpunodes.operations.repair import commands
from gpunodes.repair import policy
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.request import RepairRequest

from tests import repair_fleet
from tests.bench.table import Row, show

BOOT_S = 60.0
"""Seconds from the reset to sshd; the kubelet and the device plugin report at the same time."""
SYSRQ_S = 3.0
"""Seconds of the pauses between s, u and b (escalate.py)."""
NAME = "w1"


class _HangingReboot(repair_fleet.StandInControl):
    """Control of a machine whose reboots hang without an sshd, until the process left there uses sysrq."""

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


class _Fleet(repair_fleet.Fleet):
    """A fleet with default settings, in which the first scan takes as long as the limit for a hung nvidia-smi."""

    def settings(self) -> dict[str, Any]:
        return settings.resolve({})

    def machine_control(self, machine: Machine, **_: Any) -> Any:
        return _HangingReboot(self.machines[machine.name])

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        if not self.scans:
            time.sleep(smi.HOPELESS_S)
        return super().scan(machines, full=full)


def measure(folder: Path) -> Iterator[Row]:
    """The row; ``folder`` is for the repair's records."""
    prepared = repair_fleet.fleet(5, [NAME])
    fleet = _Fleet(prepared.api, prepared.machines)
    request = RepairRequest("health", policy.RepairLimits())
    machines = [machine for machine in fleet.all_machines() if machine.name == NAME]
    with mock.patch.dict(os.environ, XDG_STATE_HOME=str(folder)):
        started = time.monotonic()
        result = commands.run(fleet, machines, request, lambda _, message: print(" ", message, file=sys.stderr))
        duration = time.monotonic() - started
    if result.machines[0].outcome is not RepairOutcome.REPAIRED:
        raise RuntimeError(result.machines[0].why)
    yield Row(
        "waits of a repair with default settings, excluding boot time",
        f"{duration - BOOT_S:.0f} s",
        "60 s",
        "a simulated hung machine: nvidia-smi, pauses between scans, reboots that hang, settling time",
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as scratch:
        show(list(measure(Path(scratch))))
