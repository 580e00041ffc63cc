"""One controller's roll-out as a process: `python -m ... KUBECONFIG MACHINES begin|resume BUDGET [NAME...]`.

With names it goes to these machines only. All of gpunodes is real (policy, stages, session program, locks, drain); the
machines are those of operator_process.py, each with its version. The work on a machine does not end while there is a
file NAME.hold. Prints the result as JSON, with the number of API calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpunodes.operations.rolling import commands, context, works
from gpunodes.operations.rolling.work import Target
from gpunodes.repair import policy
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import Disruption
from gpunodes.views import repair as progress
from gpunodes.views import rollout as views

from tests.repair.operator_process import Fleet

PROGRAM = ("-m", "tests.repair.rollout_process")
ROOT = Path(__file__).parents[2]
"""The folder in which it is started."""
APPLY_S = 0.2
"""Seconds that the work takes on a simulated machine."""


class FileWork:
    """Brings a machine's file to a version."""

    name = "simulated"
    disrupts = Disruption.NODE
    undoes = False

    def __init__(self, machines: Path, version: str) -> None:
        self._machines = machines
        self.parameters: Mapping[str, str] = {"version": version}

    def needed(self, target: Target) -> str:
        found = self._read(target)["version"]
        return "" if found == self.parameters["version"] else f"{found} -> {self.parameters['version']}"

    def prepare(self, target: Target) -> None:
        self._write(target, prepared=self._read(target)["prepared"] + 1)

    def apply(self, target: Target) -> None:
        time.sleep(APPLY_S)
        while (self._machines / f"{target.name}.hold").exists():
            time.sleep(0.1)
        self._write(target, version=self.parameters["version"], applied=self._read(target)["applied"] + 1)

    def verify(self, target: Target) -> str:
        return self.needed(target)

    def undo(self, target: Target) -> None:
        raise NotImplementedError

    def _read(self, target: Target) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._machines / f"{target.name}.json").read_text())
        return found

    def _write(self, target: Target, **changes: object) -> None:
        path = self._machines / f"{target.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**self._read(target), **changes}))
        partial.replace(path)


def main(kubeconfig: str, machines: str, what: str, budget: str, *names: str) -> None:
    """Begin a roll-out to all machines, or to those with these names, or resume the one that stands in the cluster."""
    given = context.TimeLimits
    context.TimeLimits = lambda **more: given(**{**more, "poll": 0.3})  # type: ignore[misc,assignment]  # a stand-in
    fleet = Fleet(Path(kubeconfig), Path(machines))
    works.WORKS["simulated"] = lambda _, parameters: FileWork(Path(machines), parameters["version"])
    report = progress.RepairLines(sys.stderr).report
    began = time.monotonic()
    if what == "resume":
        result = commands.resume(fleet, report)
    else:
        options = RolloutOptions(policy.budget(budget), canary=2, soak_s=0.5)
        chosen = [machine for machine in fleet.all_machines() if not names or machine.name in names]
        result = commands.roll_out(fleet, chosen, FileWork(Path(machines), "2"), options, report, "rollout apply")
    fleet.close()
    document = views.document(result)
    document |= {"calls": fleet.made.calls, "seconds_in_all": time.monotonic() - began}
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
