"""One machine switched off and on by hand together with its node: drained before, verified before pods return.

A machine that is off on purpose is in maintenance: no repair switches it on, and `gpunodes health` says why it is off.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpunodes.engine import history
from gpunodes.engine import power as powers
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoCluster
from gpunodes.engine.fleet import InventoryFleet, match_nodes, missing, repair_settings
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.holders import user_at_host
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Order, PowerState
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine, Role
from gpunodes.operations import drain, power, without_node
from gpunodes.operations.autoscale import switched_on
from gpunodes.operations.power import PowerResult, required
from gpunodes.operations.repair.context import Report, connected
from gpunodes.repair import verification
from gpunodes.repair.flow import DrainResult, pod_list
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Node

REASON = "switched off by `gpunodes power`"
"""The reason of the maintenance: only that one ends when the machine is on again."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long things may take, in seconds."""

    drain: float
    verify: float
    shutdown: float = 300.0
    """Of the operating system, before the power is switched off."""
    poll: float = 5.0


def time_limits(fleet: InventoryFleet) -> TimeLimits:
    """The limits of the settings, which roll-outs have too."""
    given = repair_settings(fleet.settings())
    return TimeLimits(
        drain=float(given["gpunodes_rollout_drain_timeout"]), verify=float(given["gpunodes_rollout_verify_timeout"])
    )


def off(fleet: InventoryFleet, machine: Machine, report: Report, *, named: bool = False) -> PowerResult:
    """Drain a worker, shut its system down, and switch it off; its node is in maintenance from then on.

    ``named``: the user named the machine itself. Raises WrongInput for a machine without BMC or node, for a control
    plane and for a node that a roll-out or a repair holds, and GpunodesError if pods cannot leave: then its node is
    given back. Raises Held if another command works on it.
    """
    limits = time_limits(fleet)
    runs = required(machine, fleet.machine_control(machine).power()).state() is not PowerState.OFF
    seen = fleet.scan([machine]) if runs else {}
    # Made after the scan: the BMC must be that of the machine that responds now, not only of the recorded one.
    control = _control(fleet, machine, report, named=named)
    bmc = control.own_power()
    with connected(fleet, repair_settings(fleet.settings()), "power off") as (cluster, leases):
        node = _node(fleet, cluster, machine, seen)
        with _held(leases, node.name):
            # Another command may have changed it before it was locked.
            node = _node(fleet, cluster, machine, seen)
            _check_free(machine, node)
            began = _begin_maintenance(cluster, leases, node, machine, report)
            if runs:
                _drain(cluster, leases, node, limits, machine, report, began=began)
                boot_id = seen[machine.name].verdict.boot_id or ""
                _switch_off(control, lambda: leases.confirm(node.name), boot_id, limits, machine, report)
                cluster.event(node.name, "SwitchedOff", f"by {user_at_host()}", warning=False)
            switched_on.keep_off(fleet, machine, cluster.session, report)
    return _done(fleet, machine, Order.OFF, bmc)


def on(
    fleet: InventoryFleet,
    machine: Machine,
    report: Report,
    *,
    named: bool = False,
    stop: threading.Event | None = None,
) -> PowerResult:
    """Switch a machine on, wait until its node is ready with all its GPUs, and end the maintenance of ``off``.

    Of a machine without a node, waits for what can be expected of it (``without_node.py``). Raises as ``off``, and
    GpunodesError if it is not ready in time, or ``stop`` is set before: then it stays in maintenance.
    """
    stop = stop or threading.Event()
    control = _control(fleet, machine, report, named=named)
    bmc = control.own_power()
    limits = time_limits(fleet)
    with contextlib.ExitStack() as held:
        if machine.role is Role.GPU_HOST:
            return _on_without_node(fleet, machine, control, bmc, report, None, stop)
        try:
            given = repair_settings(fleet.settings())
            cluster, leases = held.enter_context(connected(fleet, given, "power on"))
        except NoCluster:
            return _on_without_node(fleet, machine, control, bmc, report, None, stop)
        match = match_nodes(fleet, cluster.nodes(), {})[machine.name]
        if match.node is None and not match.contradiction:
            return _on_without_node(fleet, machine, control, bmc, report, cluster, stop)
        node = _node(fleet, cluster, machine, {})
        with _held(leases, node.name):
            powers.change(bmc, Order.ON, lambda: leases.confirm(node.name))
            switched_on.end_off(fleet, machine, cluster.session, report)
            report(machine.name, f"waiting until its node is ready, at most {limits.verify:.0f} s")
            _wait_ready(fleet, cluster, leases, machine, node, limits, stop)
            leases.confirm(node.name)
            _end_maintenance(cluster, _node(fleet, cluster, machine, {}), machine, report)
    return _done(fleet, machine, Order.ON, bmc, without_node.NODE)


def _on_without_node(
    fleet: InventoryFleet,
    machine: Machine,
    control: MachineControl,
    bmc: powers.Power,
    report: Report,
    cluster: Cluster | None,
    stop: threading.Event,
) -> PowerResult:
    limits = time_limits(fleet)
    # By its names, as a join locks it: its node may be created meanwhile.
    with power.locked(fleet, machine, power.PowerAction.ON, report) as confirm:
        wait = without_node.Wait(fleet, machine, control, report, confirm, limits.verify, limits.poll, stop)
        found = without_node.switch_on(wait, bmc, cluster)
        if found and cluster:
            _end_maintenance(cluster, found, machine, report)
    waited = without_node.NODE if found else without_node.SSH
    return _done(fleet, machine, Order.ON, bmc, waited)


def _end_maintenance(cluster: Cluster, node: Node, machine: Machine, report: Report) -> None:
    maintained = node.maintenance
    if maintained and maintained.reason == REASON:
        cluster.end_maintenance(node.name)
        cluster.event(node.name, "SwitchedOn", f"by {user_at_host()}", warning=False)
    elif maintained:
        report(machine.name, f"it stays in maintenance: {maintained.described()}")


def _control(fleet: InventoryFleet, machine: Machine, report: Report, *, named: bool) -> MachineControl:
    found = fleet.machine_control(machine, named=named, report=lambda text: report(machine.name, text))
    required(machine, found.power())
    return found


def _node(fleet: InventoryFleet, cluster: Cluster, machine: Machine, seen: Mapping[str, MachineScan]) -> Node:
    """The machine's node, as it is now; raises WrongInput without one."""
    nodes = cluster.nodes()
    match = match_nodes(fleet, nodes, seen)[machine.name]
    if match.node is None:
        raise WrongInput(f"{machine.name}: {missing(match)}", "a machine with a node", "leave --drain or --wait out")
    return next(each for each in nodes if each.name == match.node.name)


@contextlib.contextmanager
def _held(leases: Leases, node: str) -> Iterator[None]:
    # A record of a dead command stays: it belongs to an unfinished repair or roll-out.
    leases.take(node)
    try:
        yield
    finally:
        leases.release_unused(node)


def _check_free(machine: Machine, node: Node) -> None:
    if node.control_plane:
        raise WrongInput(
            f"{machine.name} is a control plane",
            "a worker: a control plane is no place for pods that move",
            "leave --drain out, after you checked that the others are a majority",
        )
    if node.rollout or node.cordoned_by_repair:
        what, resume = ("roll-out", "rollout resume") if node.rollout else ("repair", "repair --resume")
        raise WrongInput(
            f"an unfinished {what} holds {machine.name}", "a node that no command holds", f"`gpunodes {resume}` ends it"
        )


def _begin_maintenance(cluster: Cluster, leases: Leases, node: Node, machine: Machine, report: Report) -> bool:
    """Put the node into maintenance, and cordon it; False if others did both, which stays."""
    now = leases.now()
    present = node.maintenance if node.maintenance and node.maintenance.holds(now) else None
    # Without a cordon new pods would come to a machine that is switched off.
    if present is None or not node.cordoned:
        made = present or Maintenance(REASON, user_at_host(), float(int(now)))
        cluster.begin_maintenance(node.name, made, cordon=True)
    if other := _of_others(node, now):
        end = "" if other.until is None else "; when that ends, a repair may switch the machine on"
        report(machine.name, f"its node stays in maintenance, and cordoned: {other.described()}{end}")
    return not (other and node.cordoned)


def _of_others(node: Node, now: float) -> Maintenance | None:
    """The maintenance of a node that has another reason, and stays."""
    found = node.maintenance
    return found if found and found.holds(now) and found.reason != REASON else None


def _drain(
    cluster: Cluster,
    leases: Leases,
    node: Node,
    limits: TimeLimits,
    machine: Machine,
    report: Report,
    *,
    began: bool,
) -> None:
    report(machine.name, f"draining its node, at most {limits.drain:.0f} s")
    done = False
    try:
        # Nothing is evicted for a machine that is not switched off because of another pod.
        result = DrainResult(unmanaged=drain.unmanaged(cluster, node.name))
        if not result.unmanaged:
            result = drain.drain(cluster, node.name, limits.drain, force=False, check=lambda: leases.check(node.name))
        remaining = pod_list([*result.refused, *result.terminating, *result.unmanaged])
        done = not remaining
    finally:
        # Also after Ctrl-C: nothing was switched off yet. If the lock is lost, another command may use the node.
        if began and not done:
            with contextlib.suppress(GpunodesError):
                leases.confirm(node.name, wait=False)
                cluster.end_maintenance(node.name, _of_others(node, leases.now()))
    if remaining:
        raise GpunodesError(
            f"pods of {machine.name} cannot leave: {remaining}",
            "a drained node",
            "nothing was switched off; ask the owners of these pods, or end them",
        )


def _switch_off(
    control: MachineControl,
    confirm: powers.Confirm,
    boot_id: str,
    limits: TimeLimits,
    machine: Machine,
    report: Report,
) -> None:
    """Shut the system down, or switch the power off if it does not end, or cannot be asked to.

    ``confirm`` renews the lock before each of both; it raises if another command may hold it.
    """
    bmc = control.own_power()
    if boot_id:
        report(machine.name, "shutting its system down")
        confirm()
        control.shut_down(boot_id)
        if powers.off_within(bmc, limits.shutdown, limits.poll):
            return
        report(machine.name, f"its system did not end within {limits.shutdown:.0f} s: switching its power off")
        bmc = control.own_power()
    powers.change(bmc, Order.OFF, confirm)


def _wait_ready(
    fleet: InventoryFleet,
    cluster: Cluster,
    leases: Leases,
    machine: Machine,
    node: Node,
    limits: TimeLimits,
    stop: threading.Event,
) -> None:
    deadline = time.monotonic() + limits.verify
    while why := _not_ready(fleet, cluster, machine, node):
        leases.check(node.name)
        if time.monotonic() > deadline:
            raise GpunodesError(
                f"{machine.name} is on, but not ready after {limits.verify:.0f} s: {why}",
                "a ready node with all its GPUs",
                f"it stays in maintenance; see `gpunodes health {machine.name}`, then run the same command again",
            )
        if stop.wait(limits.poll):
            raise without_node.stopped(machine, "in maintenance")


def _not_ready(fleet: InventoryFleet, cluster: Cluster, machine: Machine, node: Node) -> str:
    seen = fleet.scan([machine], full=False)[machine.name]
    why, _ = verification.unhealthy(seen.verdict, seen.facts, None)
    if why:
        return why
    try:
        found = _node(fleet, cluster, machine, {machine.name: seen})
    except WrongInput as problem:
        return problem.problem.found
    if found.name != node.name:
        return f"it is the machine of the node {found.name}, not of {node.name}"
    return verification.unready(found, node.expected, seen.verdict.boot_id or "")


def _done(fleet: InventoryFleet, machine: Machine, order: Order, bmc: powers.Power, waited: str = "") -> PowerResult:
    state = bmc.state().value
    history.note(machine.name, fleet.cluster_name, history.EntryKind.POWER, order.value, state)
    return PowerResult(machine.name, order.value, state, bmc.name, waited=waited)
