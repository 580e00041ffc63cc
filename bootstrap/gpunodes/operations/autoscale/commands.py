"""Install, show and remove the autoscaler of a cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale import plan as plans
from gpunodes.autoscale.decisions import World, unusable
from gpunodes.autoscale.nodes import SeenNode, is_own
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.engine import control_planes, events, journal, runner
from gpunodes.engine.fleet import InventoryFleet, match_nodes, repair_settings
from gpunodes.engine.leases.errors import Lost
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import GpunodesError, Interrupted, WrongInput
from gpunodes.model import Event, TaskEnded
from gpunodes.operations.autoscale import registering, removal
from gpunodes.operations.autoscale.gathering import Gathered, cluster_settings, gather
from gpunodes.operations.autoscale.objects import Objects
from gpunodes.operations.autoscale.registering import Chosen
from gpunodes.operations.repair.context import Report
from gpunodes.operations.tracker import RunView
from gpunodes.planner import autoscale, versions

_PLAYBOOK = "autoscale.yml"
_READY_S = 600.0
"""Time limit in seconds for the autoscaler's pod, whose image is pulled, and for its first look at all machines."""
_POLL_S = 3.0
_FAILED = frozenset({Phase.FAILED, Phase.GIVING_UP})
_STAY = frozenset({Phase.ON, Phase.LEFT_ALONE})
"""Phases in which an error is one of the machine as it is, not of an order."""


class NoAutoscaler(WrongInput):
    """The cluster has no autoscaler."""


@dataclass(frozen=True, slots=True)
class ScaledMachineStatus:
    """One machine of a pool that scales."""

    node: str
    pool: str
    phase: str
    """As the power server has it, "unknown" before its first look."""
    since: float | None = None
    """In seconds since 1970."""
    reason: str = ""
    """Why it is in this phase, or what went wrong."""
    unusable: str = ""
    """Why it is not switched on for pods, "" if it is."""
    failed: bool = False
    """Whether it did not come into service, something is wrong with it while it is on, or its BMC does not answer."""


@dataclass(frozen=True, slots=True)
class AutoscaleStatus:
    """The pools that scale, and their machines."""

    running: bool
    """Whether the autoscaler's pod is ready."""
    pools: Mapping[str, Mapping[str, int]]
    """min, max, and how many machines are on."""
    machines: Sequence[ScaledMachineStatus] = field(default_factory=list)
    changes: Sequence[str] = field(default_factory=list)
    """What `autoscale up` or `down` changes, with --dry-run."""
    behind: str = ""
    """A sentence about machines that are off, and whose kubelet is older than the API server; "" without any."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Machines that do not respond, or whose BMCs do not, why, and what they lack: another run completes them."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Machines of pools that scale that are off, or in maintenance, and why: they are as they were."""

    @property
    def healthy(self) -> bool:
        """Whether the autoscaler runs, and no machine failed."""
        return self.running and not any(each.failed for each in self.machines)


@contextlib.contextmanager
def _connected(fleet: InventoryFleet, command: str) -> Iterator[tuple[Objects, Leases]]:
    """A session with the API while inside, and the locks of this command; raises NoResponse without one."""
    given = repair_settings(fleet.settings())
    with contextlib.ExitStack() as held:
        session = fleet.session()
        held.callback(session.close)
        objects = Objects(session, str(given["gpunodes_repair_pool_label"]))
        leases = Leases(objects, command)
        held.callback(leases.close)
        objects.call_once("GET", "/version")
        yield objects, leases


def up(fleet: InventoryFleet, view: RunView, report: Report, *, dry_run: bool = False) -> AutoscaleStatus:
    """Install the autoscaler, or bring it to the settings; returns what it does with each machine.

    Raises WrongInput for every machine of a pool that scales which cannot be switched, before anything is changed; Held
    while another command works on such a machine or on a control plane; GpunodesError for a machine that responds and
    cannot be prepared, and if the pod does not become ready. Machines that are off, in maintenance or silent are left
    as they are.
    """
    given = cluster_settings(fleet)
    archive = _archive(given)
    with _connected(fleet, "autoscale up") as (objects, _):
        nodes = objects.seen_nodes()
        states = objects.states(create=False)
        gathered = gather(fleet, objects, nodes, states, removal.planned(objects))
        pools = autoscale.role_pools(given, gathered.plan, objects.daemon_sets())
        chosen = registering.choose(fleet, gathered.machines, nodes, objects.switched_off(), view)
        silent = {name: f"{why}; it keeps its labels, taints and registration" for name, why in chosen.silent.items()}
        if dry_run:
            shown = _seen(objects, plans.parse(dict(gathered.plan)), nodes, states)
            changes = _changes(gathered, chosen, nodes)
            return replace(shown, changes=changes, left_out=silent, passed_over=chosen.passed_over)
    registering.register(fleet, list(chosen.machines.values()), view)
    with _connected(fleet, "autoscale up") as (objects, leases):
        with _locked(fleet, objects, leases) as choice:
            report("", "writing the plan, and installing the autoscaler on the control planes")
            objects.write_plan(gathered.plan, gathered.passwords)
            dead = _run(fleet, choice, leases.lost, pools, archive, state="present")
        report("", f"waiting for the autoscaler, at most {_READY_S:.0f} s")
        _wait(objects, set(gathered.machines) - chosen.strangers)
        lacks = "it has no image of the power server, which cannot run there"
        silent |= {name: f"{why}; {lacks}" for name, why in dead.items()}
        found = _status(objects)
        return replace(found, left_out=silent | _unknown(found, gathered), passed_over=chosen.passed_over)


def status(fleet: InventoryFleet) -> AutoscaleStatus:
    """What the autoscaler does with each machine; raises WrongInput where there is none."""
    with _connected(fleet, "autoscale status") as (objects, _):
        return _status(objects)


def down(fleet: InventoryFleet, report: Report, *, dry_run: bool = False) -> AutoscaleStatus:
    """Remove the autoscaler; returns the machines as they are from then on. Nothing is switched on or off.

    Without it nobody ends what it began: nodes that serve are given back (``removal.py``), and only machines that are
    off keep their states, so that `gpunodes health` knows why. It may be run again while there are such states, or
    after an interruption: the plan is deleted last, and stays while a control plane is left out. Raises Held while
    another command works on a control plane.
    """
    with _connected(fleet, "autoscale down") as (objects, leases):
        if objects.plan() is None and not objects.switched_off() and not objects.is_installed():
            raise _no_autoscaler()
        found = removal.planned(objects)
        if dry_run:
            removed = removal.read(fleet, objects)
            shown = _status(objects) if found else AutoscaleStatus(False, {}, _shown(removed))
            return replace(shown, changes=_removals(removed))
        with _locked(fleet, objects, leases) as choice:
            report("", "removing the autoscaler")
            dead = _run(fleet, choice, leases.lost, {}, None, state="absent")
            objects.delete_passwords()
            # What it wrote before it ended counts, not what was there before.
            removal.wait_for_end(objects, report)
            removed = removal.settle(fleet, objects, report)
            objects.delete_kept_off()
            if not dead:
                objects.delete_plan()
        pools = _pools(found, objects.seen_nodes(), objects.states(create=False)) if found else {}
    left_out = {name: f"{why}; the image of the power server stays there" for name, why in dead.items()}
    return AutoscaleStatus(False, pools, _shown(removed), left_out=left_out)


def _shown(machines: Sequence[removal.Removed]) -> list[ScaledMachineStatus]:
    found = [
        ScaledMachineStatus(
            each.name,
            each.pool,
            each.phase,
            each.after.since if each.after else None,
            (each.after.error or each.after.reason) if each.after else "",
        )
        for each in machines
    ]
    return sorted(found, key=lambda each: (each.pool, each.node))


def _archive(given: Mapping[str, Any]) -> Path | None:
    """The archive with our image; None if the settings name an image. Raises WrongInput if there is neither."""
    if given["gpunodes_power_image"]:
        return None
    from gpunodes import __version__

    path = Path(str(given["gpunodes_power_archive"] or f"gpunodes-image-{__version__}.oci.tar")).expanduser()
    if not path.is_file():
        raise WrongInput(
            f"there is no image of the power server at {path}",
            "the archive that `make image` builds, in gpunodes_power_archive, or an image in gpunodes_power_image",
            "build it, or name a registry's image; see `gpunodes help --page scaling`",
        )
    return path.absolute()


@contextlib.contextmanager
def _locked(fleet: InventoryFleet, objects: Objects, leases: Leases) -> Iterator[control_planes.Choice]:
    """Hold the Leases of the control planes that respond while inside; yields which these are. Raises Held and Taken.

    The machines that the autoscaler switches stay free: it holds their Leases meanwhile.
    """
    choice = control_planes.choose(fleet.inventory, every=True)
    matches, names = match_nodes(fleet, objects.nodes(), {}), set[str]()
    for machine in control_planes.responding(fleet.inventory, choice):
        node = matches[machine.name].node
        # Both, as claims.py does: its node may be deleted meanwhile.
        names |= {machine.name.lower(), node.name if node else machine.name.lower()}
    leases.take_all(names)
    try:
        yield choice
    finally:
        leases.release_all()


def _run(
    fleet: InventoryFleet,
    choice: control_planes.Choice,
    lost: Callable[[], Lost | None],
    pools: Mapping[str, Any],
    archive: Path | None,
    *,
    state: str,
) -> dict[str, str]:
    """Run the playbook on the control planes that respond; raises GpunodesError with the first cause.

    ``lost`` returns why the locks are lost, None while they are held: it is asked all the time. Returns the others
    that lack something for it, with why they do not respond.
    """
    silent = dict(choice.failures)
    failures: list[TaskEnded] = []

    def on_event(event: Event) -> None:
        if isinstance(event, TaskEnded) and event.outcome.is_failure:
            failures.append(event)

    variables = {
        "autoscaler_state": state,
        "autoscaler_archive": str(archive or ""),
        "autoscaler_pools": pools,
    }
    names = [each.name for each in control_planes.responding(fleet.inventory, choice)]
    play = runner.Play(_PLAYBOOK, fleet.inventory, names, variables=variables, control=choice.machine.name)
    ended = runner.run(play, journal.open_run("autoscale"), on_event, lambda: lost() is not None)
    if ended.interrupted:
        raise lost() or Interrupted
    if not ended.ok:
        cause = f"{failures[0].machine}: {events.cause(failures[0])}" if failures else ended.error_text
        raise GpunodesError(
            cause, "an autoscaler that is installed whole", f"run the same command again; the log is {ended.log}"
        )
    # An image of a registry is pulled when a pod needs it.
    return silent if archive or state == "absent" else {}


def _wait(objects: Objects, names: Set[str]) -> None:
    """Wait until the power server runs, and knows the machines of these nodes; raises GpunodesError."""
    deadline = time.monotonic() + _READY_S
    while not objects.is_running() or not names <= set(objects.states(create=False)):
        if time.monotonic() > deadline:
            unknown = sorted(names - set(objects.states(create=False)))
            found, wanted = "its pod is not ready", "a pod of the Deployment gpunodes-autoscaler that is ready"
            if unknown and objects.is_running():
                found = f"the power server knows nothing of {', '.join(unknown)}"
                wanted = "a look of the power server at each machine"
            raise GpunodesError(
                f"the autoscaler is installed, but {found} after {_READY_S:.0f} s",
                wanted,
                "see `kubectl -n kube-system logs deployment/gpunodes-autoscaler --all-containers`",
            )
        time.sleep(_POLL_S)


def _unknown(found: AutoscaleStatus, gathered: Gathered) -> dict[str, str]:
    """The machines whose BMCs do not say whether they are on, by name, and why."""
    names = {node: machine.name for node, machine in gathered.machines.items()}
    return {
        # Another command may have written a plan with more machines meanwhile.
        names.get(each.node, each.node): f"{each.reason}; {each.unusable}: it is not used until then"
        for each in found.machines
        if each.phase == Phase.LEFT_ALONE and each.failed
    }


def _status(objects: Objects) -> AutoscaleStatus:
    document = objects.plan()
    if document is None:
        raise _no_autoscaler()
    nodes, states, found = objects.seen_nodes(), objects.states(create=False), plans.parse(document)
    return _seen(objects, found, nodes, states)


def _seen(
    objects: Objects, found: Plan, nodes: Mapping[str, SeenNode], states: Mapping[str, MachineState]
) -> AutoscaleStatus:
    version = objects.api_version()
    off = {name: states[name].kubelet for name in found.machines if name in states and name not in nodes}
    behind = versions.behind(version, {name: each for name, each in off.items() if each}) if version else ""
    pools, machines = _pools(found, nodes, states), _machines(found, nodes, states, version)
    return AutoscaleStatus(objects.is_running(), pools, machines, behind=behind and f"{behind} with --wake")


def _no_autoscaler() -> NoAutoscaler:
    return NoAutoscaler(
        "this cluster has no autoscaler", "one that `gpunodes autoscale up` installed", "install it first"
    )


def _pools(found: Plan, nodes: Mapping[str, SeenNode], states: Mapping[str, MachineState]) -> dict[str, dict[str, int]]:
    # The node of a machine that someone switched off stays.
    off = {name for name, each in states.items() if each.phase is Phase.BY_HAND}
    on = {name for name, each in nodes.items() if each.node.ready or name not in off}
    return {
        name: {
            "min": pool.least,
            "max": pool.most,
            "machines": len(found.of_pool[name]),
            "on": sum(each in on for each in found.of_pool[name]),
        }
        for name, pool in found.pools.items()
    }


def _machines(
    found: Plan, nodes: Mapping[str, SeenNode], states: Mapping[str, MachineState], version: str
) -> list[ScaledMachineStatus]:
    named = {name: each for name, each in nodes.items() if name in found.machines}
    own = {name: each for name, each in named.items() if is_own(each, found.machines[name])}
    world = World(found, states, own, time.time(), named.keys() - own.keys(), version=version)
    return [
        ScaledMachineStatus(
            name,
            machine.pool,
            state.phase.value if (state := states.get(name)) else "unknown",
            state.since if state else None,
            (state.error or state.reason) if state else "",
            unusable(world, name),
            state is not None and (state.phase in _FAILED or (state.phase in _STAY and bool(state.error))),
        )
        for name, machine in sorted(found.machines.items(), key=lambda each: (each[1].pool, each[0]))
    ]


def _changes(gathered: Gathered, chosen: Chosen, nodes: Mapping[str, SeenNode]) -> list[str]:
    new = sorted(name for name in chosen.machines if nodes[name].provider != PROVIDER + name)
    found = [f"{name}: its node is marked as a machine of a pool that scales" for name in new]
    if gathered.passwords:
        found.append("the passwords of its BMCs leave this controller: they go into a Secret of the cluster")
    if gathered.plan["jumps"]:
        found.append("the keys for jump hosts before its BMCs leave this controller, into the same Secret")
    return found


def _removals(machines: Sequence[removal.Removed]) -> list[str]:
    return [
        "the autoscaler and the power server are removed from the control planes",
        "the plan, and the passwords and keys for BMCs, are deleted from the cluster",
        *(f"{each.name}: {each.line}" for each in machines if each.line),
    ]
