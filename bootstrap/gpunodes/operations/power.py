"""Power actions by the user, and clearing the mark "needs repair"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes import settings
from gpunodes.engine import history, records
from gpunodes.engine import power as powers
from gpunodes.engine.cluster.api import OnWait
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse, NoSession, Refused
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.fleet import Fleet, InventoryFleet, match_nodes, unmatched
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.locks import NoLock
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Order, PowerProblem, PowerState, Trouble, kinds
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.identity.matcher import Match
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import claims
from gpunodes.operations.autoscale import switched_on
from gpunodes.operations.repair.context import Report, avoidable
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Node


class PowerAction(StrEnum):
    """The power actions."""

    STATUS = "status"
    ON = "on"
    OFF = "off"
    CYCLE = "cycle"
    ROTATE_PASSWORD = "rotate-password"  # noqa: S105 - the name of an action


@dataclass(frozen=True, slots=True)
class PowerResult:
    """The state that the BMC reports after an action."""

    machine: str
    action: str
    state: str
    bmc: str
    own: bool | None = None
    """Whether the BMC is the machine's own; None if unknown, and after other actions than status."""
    identities: str = ""
    """Why: the hardware identities that the machine and its BMC report."""
    waited: str = ""
    """With --wait: ``node`` if its node is ready, ``ssh`` if only its system was waited for; else ""."""


def power(
    fleet: InventoryFleet,
    machine: Machine,
    action: PowerAction,
    *,
    named: bool = False,
    report: Report = lambda *_: None,
) -> PowerResult:
    """Carry out a power action and check its effect; raises PowerProblem, and WrongInput without a BMC.

    A machine that is switched on is off on purpose no longer. Nothing is ordered if the BMC is not the machine's own,
    or if the machine contradicts its node: raises GpunodesError. Raises Held if another command works on it.
    ``named``: the user named the machine itself.
    """
    bmc = required(machine, fleet.machine_control(machine).power())
    # A machine that is off, or is to be switched on, is identified by its recorded identity.
    probed = action is not PowerAction.ON and bmc.state() is not PowerState.OFF
    seen = fleet.scan([machine]) if probed else {}
    if action is not PowerAction.STATUS:
        with locked(fleet, machine, action, report) as confirm:
            if probed:
                _check_contradiction(fleet, machine, seen)
            machine_control = fleet.machine_control(
                machine, named=named, report=lambda text: report(machine.name, text)
            )
            if action is PowerAction.CYCLE:
                machine_control.cold_cycle(confirm)
            elif action is PowerAction.OFF and machine_control.only_wakes:
                shut_down(machine_control, machine_control.own_power(), seen.get(machine.name), confirm)
            else:
                powers.change(machine_control.own_power(), Order(action.value), confirm)
            _tell_autoscaler(fleet, machine, report, is_off=action is PowerAction.OFF)
    machine_control = fleet.machine_control(machine)
    state = bmc.state().value
    if action is not PowerAction.STATUS:
        history.note(machine.name, fleet.cluster_name, history.EntryKind.POWER, action.value, state)
        return PowerResult(machine.name, action.value, state, bmc.name)
    match = machine_control.compare(bmc)
    own, why = (match.same, match.why) if match else (None, f"{bmc.name} gets the machine's name with each order")
    if machine_control.only_wakes:
        why = f"the network shows whether it is on; {why}"
    return PowerResult(machine.name, action.value, state, bmc.name, own, why)


def _tell_autoscaler(fleet: InventoryFleet, machine: Machine, report: Report, *, is_off: bool) -> None:
    """Have the machine stay off, or end that it counts as off on purpose; nothing without a cluster that responds."""
    if machine.role is not Role.WORKER:
        return
    tell = switched_on.keep_off if is_off else switched_on.end_off
    with contextlib.suppress(WrongInput), contextlib.closing(fleet.session()) as session:
        tell(fleet, machine, session, report)


_TYPE = "gpunodes_bmc_type"


def only_wakes(inventory: Inventory, machine: Machine) -> bool:
    """Whether a machine has no BMC, and is switched on by Wake-on-LAN and off by a shutdown."""
    return bool(settings.resolve(inventory.with_rendered(machine.name, [_TYPE]))[_TYPE] == kinds.WOL)


SHUTDOWN_S = 300.0
"""Time limit in seconds for the end of an operating system."""


def shut_down(
    control: MachineControl, bmc: powers.Power, seen: MachineScan | None, confirm: powers.Confirm, poll_s: float = 5.0
) -> None:
    """Switch a machine off that has no BMC: its system shuts down over SSH, and then does not respond any more.

    ``seen`` is its scan, None if it is off. Raises PowerProblem, and as ``confirm``.
    """
    if seen is None:
        return
    if not seen.verdict.boot_id:
        raise PowerProblem(
            Trouble.REFUSED,
            f"{control.name} has no BMC, and its system does not respond over SSH",
            "switch it off on site",
        )
    confirm()
    control.shut_down(seen.verdict.boot_id)
    if not powers.off_within(bmc, SHUTDOWN_S, poll_s):
        raise PowerProblem(
            Trouble.INCONSISTENT,
            f"{control.name} still responds {SHUTDOWN_S:.0f} s after its system was asked to shut down",
            "see what holds it up: `systemctl list-jobs` there",
        )


def required(machine: Machine, bmc: powers.Power | None) -> powers.Power:
    """The BMC of a machine; raises WrongInput for none."""
    if bmc is None:
        raise WrongInput(
            f"{machine.name} has no BMC", "gpunodes_bmc_type and the other BMC settings", "set them in the inventory"
        )
    return bmc


def _check_contradiction(fleet: Fleet, machine: Machine, seen: Mapping[str, MachineScan]) -> None:
    """Raise GpunodesError if the machine contradicts its node; pass if the cluster cannot be queried."""
    try:
        with contextlib.closing(fleet.session()) as session:
            nodes = Cluster(session, patience_s=0.0).nodes()
    except (NoResponse, Refused, WrongInput):
        return
    match = _match(fleet, machine, seen, nodes)
    if match.contradiction:
        raise GpunodesError(
            match.contradiction,
            "a machine that matches exactly one node, or none",
            "its power was not changed; delete a node whose machine is gone, or correct the inventory",
        )


def _match(fleet: Fleet, machine: Machine, seen: Mapping[str, MachineScan], nodes: Sequence[Node]) -> Match:
    return match_nodes(fleet, nodes, seen)[machine.name]


@contextlib.contextmanager
def locked(fleet: InventoryFleet, machine: Machine, action: PowerAction, report: Report) -> Iterator[powers.Confirm]:
    """Hold a machine's lock while its power is changed; yields a function that raises if it may be lost. Raises Held.

    If no lock can be taken, since the control plane is down or does not exist, it continues without and reports that.
    Raises WrongInput for a kubeconfig that cannot be used.
    """
    with contextlib.ExitStack() as held:
        claim: claims.Claim | None = None
        try:
            command = f"power {action.value}"
            claimed = claims.claimed(
                fleet.inventory,
                [machine],
                command,
                lambda each: report(each.machine, str(each.problem)),
            )
            claim = held.enter_context(claimed)
            for finding in claim.findings:
                report(finding.machine, finding.problem.found)
        except (NoSession, NoLock, WrongInput) as error:
            if isinstance(error, WrongInput) and fleet.inventory.kubeconfig:
                # A file that cannot be used is no cluster that is down: it can be corrected.
                raise
            report(machine.name, f"no lock: {error.problem.found}")

        def confirm() -> None:
            if claim and (problem := claim.lost(at_work=True)):
                raise problem

        yield confirm


@dataclass(frozen=True, slots=True)
class ClearResult:
    """A machine that may be repaired again. ``schedulable`` is None with --without-cluster."""

    machine: str
    node: str
    schedulable: bool | None


def clear(fleet: Fleet, machine: Machine, *, without_cluster: bool, on_wait: OnWait = lambda _: None) -> ClearResult:
    """Clear "needs repair": marks, taint, and the cordon if gpunodes made it.

    Raises GpunodesError if another command works on the machine.
    """
    if without_cluster:
        _end_repair(fleet, machine)
        history.note(machine.name, fleet.cluster_name, history.EntryKind.CLEARED, "cleared", "")
        return ClearResult(machine.name, "", None)
    with avoidable():
        session: Session = fleet.session()
    try:
        cluster = Cluster(session, on_wait=on_wait)
        with avoidable():
            nodes = cluster.nodes()
        match = _match(fleet, machine, fleet.scan([machine]), nodes)
        node = match.node
        if node is None:
            raise WrongInput(f"{machine.name}: {unmatched(match)}", "a node", "see `gpunodes status`")
        leases = Leases(cluster, "uncordon")
        with leases.holding([node.name]) as stored:
            schedulable = cluster.clear(node.name, leases.now())
            # An unfinished repair ends too; what cannot be removed now is dropped by the next repair command.
            # A roll-out's record stays in the Lease.
            with contextlib.suppress(NoResponse, Refused, ValueError):
                recording.parse(stored[node.name])
                leases.release(node.name)
            _end_repair(fleet, machine)
        history.note(
            machine.name,
            fleet.cluster_name,
            history.EntryKind.CLEARED,
            "cleared",
            "" if schedulable else "it stays cordoned: by its maintenance, a user or another program",
        )
        cluster.event(node.name, "RepairCleared", "a user cleared this machine", warning=False)
        return ClearResult(machine.name, node.name, schedulable)
    finally:
        session.close()


def _end_repair(fleet: Fleet, machine: Machine) -> None:
    """End a machine's unfinished repair on this controller; raises GpunodesError if another command works on it."""
    if left := records.read(fleet.cluster_name).get(machine.name):
        with records.claimed(machine.name, fleet.cluster_name):
            records.remove(left)
