"""One controller's repair command as a separate process: `operator_process.py KUBECONFIG MACHINES BUDGET [NAME]`.

With NAME it is `repair NAME`, else `health --reboot-hung`. A machine whose name begins with c is the control plane.

All of gpunodes is real (policy, stages, session program, locks, drain); each machine is a file in the folder
MACHINES with its health, its boot, and the steps done to it. No step ends while there is a file NAME.hold beside it.
Only the SSH lock is omitted. Prints the result as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpunodes.engine.cluster.connection import here
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.machine_control import Boot, StepResult
from gpunodes.engine.power import Confirm
from gpunodes.engine.remote.shell import Reached
from gpunodes.engine.scans import MachineScan
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.model import Machine, Role
from gpunodes.operations.repair import commands, tools
from gpunodes.repair import policy
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.request import RepairRequest
from gpunodes.views import repair as views

PROGRAM = Path(__file__)
BOOT_S = 0.5
"""Seconds that a simulated machine takes to boot."""


class FileMachine:
    """A simulated machine: `sick`, `boot`, `deaf` (steps that do not bring it down), `done`."""

    def __init__(self, path: Path, api: Session) -> None:
        self._path = path
        self._api = api
        self.name = path.stem

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text())
        return found

    def boot_id(self, state: Mapping[str, Any]) -> str:
        return f"{self.name}-boot-{state['boot']}"

    def verdict(self) -> Verdict:
        state = self.read()
        if time.time() < state["back"]:
            return Verdict(self.name, "live", State.UNREACHABLE, Action.NONE)
        boot_id = self.boot_id(state)
        if not state["sick"]:
            return Verdict(self.name, "live", State.HEALTHY, Action.NONE, False, (), (), boot_id, 8, 8)
        found = (Finding("hung-in-driver", "", Action.REBOOT, State.HUNG, evidence=("the line",)),)
        return Verdict(self.name, "live", State.HUNG, Action.REBOOT, True, (), (), boot_id, 8, 8, found)

    def use(self, step: str) -> None:
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            state["done"].append(step)
            if step not in state["deaf"]:
                state |= {"boot": state["boot"] + 1, "sick": False, "back": time.time() + BOOT_S}
            text = json.dumps(state)
            file.seek(0)
            file.write(text)
            file.truncate()
        # The kubelet of the new boot.
        status = {"status": {"nodeInfo": {"bootID": self.boot_id(state)}}}
        self._api.request("PATCH", f"/api/v1/nodes/{self.name}/status", status, "application/merge-patch+json")
        while self._path.with_suffix(".hold").exists():
            time.sleep(0.1)

    # engine.fleet.ControlsMachine

    def boot(self) -> Boot:
        state = self.read()
        if time.time() < state["back"]:
            return Boot(Reached.NO_RESPONSE)
        return Boot(Reached.ENDED, self.boot_id(state), 1.0)

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        return []

    def run_step(
        self,
        step: EscalationStep,
        boot_id: str,
        later: Sequence[tuple[float, str]],
        gpus: Sequence[str],
    ) -> StepResult:
        if boot_id != self.boot_id(self.read()):
            return StepResult(False, "the machine has already rebooted")
        self.use(step.name)
        return StepResult(True)

    def has_power(self) -> bool:
        return True

    def reset(self, confirm: Confirm) -> None:
        confirm()
        self.use("bmc")

    def cold_cycle(self, confirm: Confirm) -> None:
        confirm()
        self.use("cold")


class Fleet:
    """engine.fleet.Fleet with machines in files, and a local API server."""

    def __init__(self, kubeconfig: Path, machines: Path) -> None:
        self._kubeconfig = kubeconfig
        self.made = Session(here(sys.executable, kubeconfig))
        self._side = Session(here(sys.executable, kubeconfig))
        self._files = {path.stem: FileMachine(path, self._side) for path in sorted(machines.glob("*.json"))}

    @property
    def cluster_name(self) -> str:
        return "simulated"

    def all_machines(self) -> Sequence[Machine]:
        return [
            Machine(name, name, Role.CONTROL_PLANE if name.startswith("c") else Role.WORKER) for name in self._files
        ]

    def pool_label(self, name: str) -> str:
        return ""

    def lock(self, command: str, holder: str) -> Any:
        return contextlib.nullcontext(SimpleNamespace(lost=lambda: None))

    def settings(self) -> dict[str, Any]:
        return {
            "gpunodes_repair_pool_label": "test/pool",
            "gpunodes_repair_rescan_pause": 0,
            "gpunodes_repair_drain_timeout": 20,
            "gpunodes_repair_drain_timeout_hung": 10,
            "gpunodes_repair_boot_timeout": 20,
            "gpunodes_repair_verify_timeout": 30,
            "gpunodes_repair_settle": 0,
            "gpunodes_repair_evidence_days": 90,
            "gpunodes_repair_evidence_mib": 100,
            "gpunodes_rollout_drain_timeout": 120,
            "gpunodes_rollout_verify_timeout": 120,
        }

    def session(self) -> Session:
        return self.made

    def machine_control(self, machine: Machine, **_: Any) -> Any:
        return self._files[machine.name]

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        facts = {"smi": {"status": "ok"}, "pci": [], "expected": {"gpus": None, "from": None}}
        return {machine.name: MachineScan(self._files[machine.name].verdict(), facts) for machine in machines}

    def close(self) -> None:
        self._side.close()


def main(kubeconfig: str, machines: str, budget: str, name: str = "") -> None:
    """Repair all unhealthy machines, or the one with this name."""
    # The real time limits are for machines that take minutes to boot.
    EscalationStep.limit = lambda self, *, hung: 3.0  # type: ignore[method-assign]  # a stand-in
    given = tools.TimeLimits
    tools.TimeLimits = lambda **more: given(**{**more, "poll": 0.2})  # type: ignore[misc,assignment]  # a stand-in
    fleet = Fleet(Path(kubeconfig), Path(machines))
    limits = policy.RepairLimits(max_unavailable=policy.budget(budget), by_hand=bool(name))
    request = RepairRequest("repair" if name else "health", limits, named=frozenset({name} - {""}))
    chosen = [machine for machine in fleet.all_machines() if name in ("", machine.name)]
    began = time.monotonic()
    result = commands.run(fleet, chosen, request, views.RepairLines(sys.stderr).report)
    fleet.close()
    document = views.document(result)
    acted = [each for each in document["machines"] if each["decision"] != "nothing"]
    sys.stdout.write(
        json.dumps({"machines": acted, "calls": fleet.made.calls, "seconds": time.monotonic() - began}) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
