"""Read how control planes and kubelets differ from their settings, and roll the settings out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gpunodes import settings
from gpunodes.engine import events, journal, runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import GpunodesError, Interrupted, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.operations import phases, status
from gpunodes.operations.rolling import commands
from gpunodes.operations.rolling.context import Report
from gpunodes.operations.rolling.control_plane_settings import ControlPlaneSettings
from gpunodes.operations.rolling.kubelet_settings import KubeletSettings
from gpunodes.operations.rolling.work import Work
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner.drift import KUBELET, MachineDrift, of_report
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult

COMMAND = "rollout apply"
_SAME = ("gpunodes_component_arguments", "gpunodes_audit_rules")
"""Settings that kubeadm's configuration has once for all control planes; patches may differ."""


def read(inventory: Inventory, machines: Sequence[Machine], view: RunView) -> list[MachineDrift]:
    """How each of these control planes differs from its settings, or why that is unknown; nothing is changed."""
    tracker = Tracker(machines, (phases.DRIFT,), view)
    view.begin(COMMAND, machines)
    play = runner.Play("drift.yml", inventory, [machine.name for machine in machines])
    ended = runner.run(play, journal.open_run(COMMAND), tracker.on_event)
    if ended.interrupted:
        raise Interrupted
    tracker.check_controller(ended)
    reported = tracker.answers.get("control_plane_drift", {})
    error_text = "" if ended.ok else ended.error_text
    return [_of(machine.name, reported, tracker, error_text) for machine in machines]


def check_same(inventory: Inventory) -> None:
    """Raise WrongInput unless the settings that the cluster has once are the same for all its control planes."""
    first, *others = inventory.control_planes()
    wanted = settings.resolve(inventory.variables(first.name))
    for other in others:
        found = settings.resolve(inventory.variables(other.name))
        for name in _SAME:
            if found[name] != wanted[name]:
                raise WrongInput(
                    f"{name} of {other.name} is not that of {first.name}",
                    "one value for all control planes: the cluster keeps it once",
                    "set it for the group control_plane; gpunodes_kubeadm_patches may differ",
                )


def roll_out(
    fleet: InventoryFleet,
    machines: Sequence[Machine],
    found: Sequence[MachineDrift],
    options: RolloutOptions,
    report: Report,
) -> RolloutResult:
    """Apply the settings to those of ``machines`` that differ; raises as ``commands.roll_out``.

    Raises GpunodesError if one could not be compared: nothing is changed then.
    """
    for each in found:
        if each.problem:
            raise GpunodesError(
                f"{each.machine}: its settings cannot be compared: {each.problem}",
                "control planes that can be compared",
                "correct that, or name the other control planes; nothing was changed",
            )
    pending = {each.machine for each in found if each.pending}
    return _roll_out(fleet, machines, pending, ControlPlaneSettings(fleet.inventory), options, report)


def read_kubelets(inventory: Inventory, machines: Sequence[Machine], view: RunView) -> list[MachineDrift]:
    """How the kubelets of those of these machines that differ do, by the settings that a roll-out applies.

    Machines whose kubelets are unknown are among them, with the problem; those of nodes that gpunodes did not make are
    not compared.
    """
    found = status.run(inventory, view)
    nodes = {node.machine: node.ready for node in found.nodes}
    drift = {each.machine: each.differences for each in found.drift}
    differing = []
    for machine in machines:
        differences = [one for one in drift.get(machine.name, ()) if one.kind == KUBELET]
        problem = found.kubelet_problems.get(machine.name, "")
        if not nodes.get(machine.name):
            none = found.off.get(machine.name) or "it is not a node of the cluster"
            problem = "its node is not Ready" if machine.name in nodes else none
        if differences or problem:
            differing.append(MachineDrift(machine.name, differences, problem=problem))
    return differing


def roll_out_kubelets(
    fleet: InventoryFleet,
    machines: Sequence[Machine],
    found: Sequence[MachineDrift],
    options: RolloutOptions,
    report: Report,
) -> RolloutResult:
    """Apply the settings to the kubelets of those of ``machines`` that differ; raises as ``commands.roll_out``.

    Those that were not compared are skipped.
    """
    unread = {each.machine: each.problem for each in found if each.problem}
    pending = {each.machine for each in found} - unread.keys()
    work = KubeletSettings(fleet.inventory)
    done = _roll_out(fleet, [each for each in machines if each.name not in unread], pending, work, options, report)
    skipped = [MachineRollout(name, RolloutOutcome.SKIPPED, why) for name, why in unread.items()]
    return replace(done, machines=[*done.machines, *skipped])


def _roll_out(
    fleet: InventoryFleet,
    machines: Sequence[Machine],
    pending: Collection[str],
    work: Work,
    options: RolloutOptions,
    report: Report,
) -> RolloutResult:
    unchanged = [
        MachineRollout(machine.name, RolloutOutcome.UNCHANGED, "nothing to do")
        for machine in machines
        if machine.name not in pending
    ]
    if not pending:
        return RolloutResult("", work.name, unchanged)
    chosen = [machine for machine in machines if machine.name in pending]
    done = commands.roll_out(fleet, chosen, work, options, report, COMMAND)
    return replace(done, machines=[*done.machines, *unchanged])


def _of(name: str, reported: dict[str, object], tracker: Tracker, error_text: str) -> MachineDrift:
    failure = tracker.failures.get(name)
    if name not in reported:
        why = events.cause(failure) if failure else error_text
        return MachineDrift(name, problem=why or "it did not report them")
    found = of_report(name, reported[name])
    if not found.managed:
        return replace(found, problem="gpunodes did not make it a control plane, so it does not change its settings")
    return found
