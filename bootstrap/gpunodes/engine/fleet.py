"""The fleet: machines, nodes, BMCs and the cluster as a repair meets them, and the one way to find a machine's node."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpunodes import settings
from gpunodes.engine import control_planes, identities
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.group_lock import GroupLock
from gpunodes.engine.machine_control import Boot, MachineControl, StepResult
from gpunodes.engine.power import Confirm, kinds
from gpunodes.errors import WrongInput
from gpunodes.health.model import State
from gpunodes.identity import mac_owners
from gpunodes.identity.matcher import Match, Matcher
from gpunodes.identity.model import MachineIdentity, reported
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.planner import pools
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.policy import Node
from gpunodes.repair.switched_off import Switched, of_machines

if TYPE_CHECKING:
    from gpunodes.engine.scans import MachineScan, ScanTarget

_MINIMUM = {"unhealthy_percent": 1, "guard_repairs": 1, "evidence_days": 1, "evidence_mib": 1}
"""The minimum of repair settings for which 0 would do harm."""


class ControlsMachine(Protocol):
    """What a repair can do to a machine; implemented by engine/machine_control.py."""

    def boot(self) -> Boot:
        """The boot it is in."""

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        """Save the evidence; the names of the files."""

    def run_step(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        """Perform a step that needs a shell."""

    def has_power(self) -> bool:
        """Whether it has a BMC."""

    def reset(self, confirm: Confirm) -> None:
        """Reset it by its BMC; ``confirm`` is called before each order."""

    def cold_cycle(self, confirm: Confirm) -> None:
        """Switch it off, wait, and switch it on; ``confirm`` as of ``reset``."""


class Fleet(Protocol):
    """What repairs need of the machines and their cluster. Tests implement it with machines in memory."""

    @property
    def cluster_name(self) -> str:
        """The key of this cluster's records and history."""

    def all_machines(self) -> Sequence[Machine]:
        """All machines of the inventory."""

    def settings(self) -> Mapping[str, Any]:
        """The cluster-wide settings; raises WrongInput for a template that cannot be rendered."""

    def pool_label(self, name: str) -> str:
        """The pool label that a machine's node gets when it joins, "" for none."""

    def session(self) -> Session:
        """A session with the cluster's API."""

    def lock(self, command: str, holder: str) -> AbstractContextManager[GroupLock]:
        """The SSH lock, for work on the control plane: commands that find no API check it. Raises Taken, NoLock."""

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        """Scan machines now; the user's deadline applies only to a ``full`` scan."""

    def machine_control(
        self, machine: Machine, *, named: bool = False, report: Callable[[str], None] = lambda _: None
    ) -> ControlsMachine:
        """The control of a machine; ``named``: the user named the machine itself."""


class InventoryFleet:
    """The fleet of an inventory."""

    def __init__(self, inventory: Inventory, deadline_s: float | None = None, parallel: int | None = None) -> None:
        """``deadline_s`` and ``parallel`` limit each scan; the default deadline depends on the number of machines."""
        self.inventory = inventory
        self._deadline_s = deadline_s
        self._parallel = parallel
        self._targets: dict[str, ScanTarget] = {}
        self._settings: dict[str, Any] | None = None
        self._labels: dict[str, Mapping[str, str]] = {}
        self._macs: dict[str, tuple[str, ...]] | None = None

    @property
    def cluster_name(self) -> str:
        """As ``Fleet`` has it."""
        return self.inventory.cluster

    def all_machines(self) -> Sequence[Machine]:
        """As ``Fleet`` has it."""
        return self.inventory.machines()

    def settings(self) -> dict[str, Any]:
        """As ``Fleet`` has it."""
        if self._settings is None:
            found = self.inventory.machines(Role.CONTROL_PLANE) or self.inventory.machines()
            given = {}
            if found:
                name = found[0].name
                given = self.inventory.variables(name) | self.inventory.rendered(
                    name, "gpunodes_repair_", "gpunodes_rollout_"
                )
            # Called for each machine, and templates are slow.
            self._settings = settings.resolve(given)
        return self._settings

    def pool_label(self, name: str) -> str:
        """As ``Fleet`` has it."""
        return self.labels(name).get(str(self.settings()["gpunodes_repair_pool_label"]), "")

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels by its settings that a machine's node gets when it joins; raises WrongInput for wrong ones."""
        if name not in self._labels:
            # Called for each machine at each decision, and templates are slow.
            self._labels[name] = self._read_labels(name)
        return self._labels[name]

    def _read_labels(self, name: str) -> dict[str, str]:
        variables = self.inventory.variables(name)
        given = settings.resolve(variables)
        if "{{" in str([given[key] for key in pools.LABEL_SETTINGS]):
            rendered = self.inventory.rendered(name, *pools.LABEL_SETTINGS)
            settings.report_all(self.inventory.title, {name: list(settings.problems(rendered))})
            given |= rendered
        try:
            return pools.labels(given, variables.get("group_names") or ())
        except WrongInput as error:
            wrong = error.problem
            raise WrongInput(f"{name}: {wrong.found}", wrong.wanted, wrong.remedy) from error

    def session(self) -> Session:
        """As ``Fleet`` has it."""
        return control_planes.session(self.inventory)

    def lock(self, command: str, holder: str) -> AbstractContextManager[GroupLock]:
        """As ``Fleet`` has it."""
        return control_planes.lock(self.inventory, command, holder, restarts=True)

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        """As ``Fleet`` has it."""
        # With paramiko and the rules of health, which most commands do not need.
        from gpunodes.engine import scans

        new = [machine for machine in machines if machine.name not in self._targets]
        self._targets |= {each.target.name: each for each in scans.scan_targets(self.inventory, new)}
        return scans.scan(
            [self._targets[machine.name] for machine in machines],
            deadline_s=self._deadline_s if full else None,
            parallel=self._parallel or scans.PARALLEL,
            cluster=self.cluster_name,
        )

    def machine_control(
        self, machine: Machine, *, named: bool = False, report: Callable[[str], None] = lambda _: None
    ) -> MachineControl:
        """As ``Fleet`` has it."""
        variables = self.inventory.connection(machine.name) | self.inventory.rendered(machine.name, "gpunodes_bmc_")
        pause = repair_settings(self.settings())["gpunodes_repair_cold_pause"]
        known = identities.recall(self.cluster_name, machine.name, machine.address)
        others = self.macs_of_others(machine.name) if variables.get("gpunodes_bmc_type") == kinds.WOL else {}
        return MachineControl(
            machine.name,
            machine.address,
            variables,
            pause,
            known,
            named=named,
            report=report,
            macs_of_others=others,
        )

    def macs_of_others(self, name: str) -> dict[str, str]:
        """The MAC addresses of all other machines, each with the machine's name: by settings, and as recorded."""
        if self._macs is None:
            addresses = {each.name: each.address for each in self.all_machines()}
            self._macs = {
                each: (*known.macs, str(self.inventory.variables(each).get("gpunodes_bmc_mac") or ""))
                for each, known in identities.recall_all(self.cluster_name, addresses).items()
            }
        return mac_owners.of_others(name, self._macs)


def repair_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the numbers among the repair settings converted; raises WrongInput."""
    found = dict(given)
    for key, default in settings.resolve({}).items():
        name = key.removeprefix("gpunodes_repair_")
        if key not in given or name == key or not isinstance(default, int):
            continue
        try:
            found[key] = float(given[key])
        except (TypeError, ValueError):
            found[key] = math.nan
        if not _MINIMUM.get(name, 0) <= found[key] < math.inf:
            wanted = f"a number, at least {_MINIMUM.get(name, 0)}"
            raise WrongInput(f"{key} is {given[key]!r}", wanted, "correct it in the inventory")
    return found


def match_nodes(
    fleet: Fleet, nodes: Sequence[Node], seen: Mapping[str, MachineScan], *, confirmed: bool = True
) -> dict[str, Match]:
    """Each machine's match with its node, by the machine's name; ``seen`` are the scans of machines.

    ``confirmed=False`` accepts an unconfirmed name without its domain, or address: for display only.
    """
    machines = _identities(fleet, seen)
    matcher = Matcher([node.identity for node in nodes], machines.values())
    return {name: matcher.match(machine, confirmed=confirmed) for name, machine in machines.items()}


def match_switched(
    fleet: Fleet, switched: Mapping[str, Switched], nodes: Sequence[Node], seen: Mapping[str, MachineScan]
) -> dict[str, Switched]:
    """The machines that the autoscaler keeps off, by name; ``switched`` has them by the names that their nodes had.

    ``nodes`` are those that exist.
    """
    return of_machines(switched, _identities(fleet, seen), match_nodes(fleet, nodes, seen)) if switched else {}


def unmatched(match: Match) -> str:
    """Why no node matches a machine, and how to repair it anyway."""
    return f"{missing(match)}; nothing is changed; --without-cluster ignores the cluster"


def missing(match: Match) -> str:
    """Why no node matches a machine."""
    return match.contradiction or "no node of the cluster matches it by boot id, name or address"


def _identities(fleet: Fleet, seen: Mapping[str, MachineScan]) -> dict[str, MachineIdentity]:
    """The identities of all machines: of scanned machines as they report, of the others as recorded."""
    machines = {machine.name: machine.address for machine in fleet.all_machines()}
    found = identities.recall_all(fleet.cluster_name, machines)
    for name, each in seen.items():
        if each.verdict.state is not State.UNREACHABLE and (each.facts or each.verdict.boot_id):
            facts = {"boot_id": each.verdict.boot_id, **(each.facts or {})}
            live, before = reported(name, machines.get(name, ""), facts), found.get(name)
            if before and live.machine_id and before.machine_id == live.machine_id:
                # The probe does not report the machine's addresses; the same installation reported them before.
                addresses = tuple(dict.fromkeys([*live.addresses, *before.addresses]))
                live = dataclasses.replace(live, addresses=addresses)
            found[name] = live
    return found
