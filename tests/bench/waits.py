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
from gpunodes.engine.hands import Asked
from gpunodes.model import Machine
from gpunodes.operations import repair
from gpunodes.repair import policy
from gpunodes.repair.ladder import Rung
from gpunodes.repair.record import Outcome

from tests import repair_world
from tests.bench.table import Row, show

BOOT_S = 60.0
"""From the reset to sshd; the kubelet and the device plugin report at the same moment."""
SYSRQ_S = 3.0
"""The pauses between s, u and b (climb.py)."""
NAME = "w1"


class _Hands(repair_world.Hands):
    """A machine whose orderly and forced reboots hang without an sshd, until its survivor uses sysrq."""

    def ask(self, rung: Rung, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]) -> Asked:
        if rung.name != "reboot":
            return Asked(False, "it does not answer on SSH")
        self._machine.sshd = False
        after = next(seconds for seconds, name in later if name == "sysrq") + SYSRQ_S
        threading.Timer(after, self._down).start()
        threading.Timer(after + BOOT_S, self._up).start()
        return Asked(True, armed=tuple(name for _, name in later))

    def _down(self) -> None:
        self._machine.off = True

    def _up(self) -> None:
        self._machine.use("sysrq")


class _World(repair_world.World):
    """With the settings' own defaults, and looks at a hung machine that last as long as nvidia-smi is waited for."""

    def settings(self) -> dict[str, Any]:
        return settings.of({})

    def hands(self, machine: Machine, **_: Any) -> Any:
        return _Hands(self.machines[machine.name])

    def look(self, machines: Sequence[Machine], *, scan: bool = True) -> dict[str, repair.Seen]:
        if not self.looks:
            time.sleep(probe.HOPELESS_S)
        return super().look(machines, scan=scan)


def measure(folder: Path) -> Iterator[Row]:
    """The row; ``folder`` is for the repair's records."""
    made = repair_world.world(5, [NAME])
    place = _World(made.api, made.machines)
    wish = repair.Wish("health", policy.Limits())
    machines = [machine for machine in place.entries if machine.name == NAME]
    with mock.patch.dict(os.environ, XDG_STATE_HOME=str(folder)):
        began = time.monotonic()
        result = repair.run(place, machines, wish, lambda _, said: print(" ", said, file=sys.stderr))
        took = time.monotonic() - began
    if result.machines[0].outcome is not Outcome.REPAIRED:
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
