"""One controller's roll-out as a separate process: `python rollout_process.py KUBECONFIG MACHINES begin|resume BUDGET`.

All of gpunodes is real (policy, stages, session program, locks, drain); each machine is a file in the folder MACHINES
with its version. Prints the result as JSON, with the number of API calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.engine.cluster.connection import here
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.scans import MachineScan
from gpunodes.health.model import Action, State, Verdict
from gpunodes.model import Machine, Role
from gpunodes.operations.rolling import commands, context, works
from gpunodes.operations.rolling.work import Target
from gpunodes.repair import policy
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import Disruption
from gpunodes.views import repair as progress
from gpunodes.views import rollout as views

PROGRAM = Path(__file__)
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


class Fleet:
    """engine.fleet.Fleet with machines in files, and a local API server."""

    def __init__(self, kubeconfig: Path, machines: Path) -> None:
        self._names = [path.stem for path in sorted(machines.glob("*.json"))]
        self.made = Session(here(sys.executable, kubeconfig))

    @property
    def cluster_name(self) -> str:
        return "simulated"

    def all_machines(self) -> Sequence[Machine]:
        return [Machine(name, name, Role.WORKER) for name in self._names]

    def pool_label(self, _: str) -> str:
        return ""

    def lock(self, command: str, holder: str) -> Any:
        raise NotImplementedError("no machine is a control plane")

    def settings(self) -> dict[str, Any]:
        return {
            "gpunodes_repair_pool_label": "test/pool",
            "gpunodes_rollout_drain_timeout": 120,
            "gpunodes_rollout_verify_timeout": 120,
        }

    def session(self) -> Session:
        return self.made

    def machine_control(self, machine: Machine, **_: Any) -> Any:
        raise NotImplementedError("nothing is rebooted")

    def scan(self, machines: Sequence[Machine], **_: Any) -> dict[str, MachineScan]:
        facts = {"smi": {"status": "ok"}, "pci": [], "expected": {"gpus": None, "from": None}}
        return {
            each.name: MachineScan(
                Verdict(each.name, "live", State.HEALTHY, Action.NONE, False, (), (), f"{each.name}-boot-1", 8, 8),
                facts,
            )
            for each in machines
        }


def main(kubeconfig: str, machines: str, what: str, budget: str) -> None:
    """Begin a roll-out to all machines, or resume the one that stands in the cluster."""
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
        result = commands.roll_out(fleet, fleet.all_machines(), FileWork(Path(machines), "2"), options, report, "test")
    document = views.document(result)
    document |= {"calls": fleet.made.calls, "seconds_in_all": time.monotonic() - began}
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
