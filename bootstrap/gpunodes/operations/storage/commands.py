"""Set up, verify and take down shared storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.engine import control_planes, journal, runner
from gpunodes.errors import ExitCode, GpunodesError, WrongInput, together
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineResult, Outcome, PreflightFinding, Role, RunResult
from gpunodes.operations import phases, switched_off
from gpunodes.operations.repair.context import Report
from gpunodes.operations.run import Operation, RunOptions, carry_out
from gpunodes.operations.storage import findings, leaving, server
from gpunodes.operations.storage.objects import connected
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import storage, storage_access

UP = Operation(
    name="storage up",
    playbook="storage_up.yml",
    phases=(phases.NFS_CLIENT, phases.STORAGE, phases.STORAGE_VERIFIED),
    needs_cluster=True,
)
DOWN = Operation(
    name="storage down",
    playbook="storage_down.yml",
    phases=(phases.STORAGE_IDLE, phases.STORAGE_REMOVED, phases.NFS_CLIENT_REMOVED),
    needs_cluster=True,
)
VERIFY = Operation(name="storage verify", playbook="storage_verify.yml", phases=(phases.STORAGE_VERIFIED,))


def up(inventory: Inventory, view: RunView, report: Report, options: RunOptions) -> RunResult:
    """Serve the shares, install the NFS client on all nodes, make volumes and claims, and verify them.

    Raises WrongInput for settings that the cluster contradicts, before anything is changed, and GpunodesError if the
    machine of the group storage cannot serve.
    """
    value = setting(inventory)
    machine = _server(inventory, value)
    address = _address(inventory, machine)
    wanted = storage.objects(value, address)
    with connected(inventory) as objects:
        objects.check_namespaces(sorted({each["namespace"] for each in storage.claims(value)}))
        present = objects.present(wanted)
        # Without a machine that serves, no export is changed.
        departed = leaving.departed(value, address, objects.own()[0]) if machine else []
        if wrong := [*storage.conflicts(wanted, present), *departed]:
            raise together(wrong)
        if not options.dry_run and (released := objects.delete_released(present)):
            report("", f"deleted volumes whose claims were deleted: {', '.join(released)}")
    served: list[MachineResult] = []
    warnings: Sequence[PreflightFinding] = ()
    if machine:
        report("", f"{machine.name}: serving the shares")
        facts, result = server.run(inventory, machine, UP.name, state="present", dry_run=options.dry_run)
        warnings = findings.of_server(inventory, machine, facts)
        served = [result]
    nodes, left = _nodes(inventory)
    for name, why in left.items():
        report(name, why)
    ended = carry_out(UP, inventory, nodes, view, options)
    view.findings(warnings)
    return replace(ended, machines=_with_servers(served, ended.machines), findings=[*ended.findings, *warnings])


def verify(inventory: Inventory, view: RunView) -> RunResult:
    """Verify that each node reaches the servers, that the claims are bound, and that pods write and read."""
    setting(inventory)
    nodes, _ = _nodes(inventory)
    tracker = Tracker(nodes, VERIFY.phases, view)
    view.begin(VERIFY.name, nodes)
    control = control_planes.choose(inventory).machine.name
    names = list(dict.fromkeys([*(each.name for each in nodes), control]))
    play = runner.Play(VERIFY.playbook, inventory, names, control=control)
    ended = runner.run(play, journal.open_run(VERIFY.name), tracker.on_event)
    tracker.check_controller(ended)
    results = tracker.results(
        ok=ended.ok, interrupted=ended.interrupted, error_text="" if ended.ok else ended.error_text
    )
    return RunResult(VERIFY.name, results, log=str(ended.log), interrupted=ended.interrupted)


def down(inventory: Inventory, view: RunView, report: Report, options: RunOptions) -> RunResult:
    """Remove volumes and claims, then the NFS clients, then the server; data is never removed.

    Raises GpunodesError while a pod uses a claim, before anything is changed; a node that has a share mounted fails
    first, and stops all. The server stays while it has any client.
    """
    machines = _group(inventory)
    given, addresses = _given(inventory), [_address(inventory, each) for each in machines]
    with connected(inventory) as objects:
        volumes, claims = objects.own()
        users, pods = objects.users(claims)
        if users:
            more = f" and {len(users) - 3} more" if len(users) > 3 else ""  # noqa: PLR2004 - as many are shown
            raise GpunodesError(
                f"{', '.join(users[:3])}{more} use{'' if len(users) > 1 else 's'} shared storage",
                "no pod that uses a claim which is removed: its processes would hang",
                "delete these pods, also ended ones, or scale their workloads down; then run the command again",
            )
    nodes, left = _nodes(inventory)
    for name, why in left.items():
        report(name, why)
    if why := leaving.behind(given, addresses, volumes):
        report("", why)
    # Those of the setting, too: a share without claims, or a folder that a user mounts otherwise, has no volume here.
    mounted = dict.fromkeys([*storage.sources(volumes), *leaving.folders(given, addresses)])
    removed = [*storage_access.names(), *_removed(volumes, claims, pods)]
    variables = {"storage_objects": removed, "storage_idle_shares": list(mounted)}
    ended = carry_out(DOWN, inventory, nodes, view, replace(options, variables=variables))
    # The next run continues: a node that may still have it mounted keeps its server.
    if ended.exit_code is not ExitCode.DONE:
        return ended
    served = []
    for machine in machines:
        report("", f"{machine.name}: stopping to serve; the data stays")
        _, result = server.run(inventory, machine, DOWN.name, state="absent", dry_run=options.dry_run)
        served.append(result)
    return replace(ended, machines=_with_servers(served, ended.machines))


def _with_servers(served: Sequence[MachineResult], nodes: Sequence[MachineResult]) -> list[MachineResult]:
    """The results of servers that are no nodes, then those of nodes.

    With the changes and notes of a server that is one.
    """
    servers = {each.name: each for each in served}
    names = {each.name for each in nodes}
    found = [each for each in served if each.name not in names]
    for each in nodes:
        own = servers.get(each.name, MachineResult(each.name, Outcome.UNCHANGED))
        outcome = Outcome.CHANGED if own.changes and each.outcome is Outcome.UNCHANGED else each.outcome
        notes = (*own.notes, *each.notes)
        found.append(replace(each, outcome=outcome, changes=(*own.changes, *each.changes), notes=notes))
    return found


def setting(inventory: Inventory) -> Sequence[Mapping[str, Any]]:
    """The value of gpunodes_storage for the cluster, rendered and checked; raises WrongInput without shares."""
    found = _given(inventory)
    if not storage.shares(found):
        raise WrongInput(
            f"{storage.SETTING} has no share",
            "at least one, such as [{name: training, server: nas.example, path: /export/training, size: 900Gi}]",
            "see `gpunodes help --page storage`",
        )
    return found


def _given(inventory: Inventory) -> Sequence[Mapping[str, Any]]:
    """The same, and not checked; empty without shares."""
    found: Any = inventory.rendered(inventory.control_plane().name, storage.SETTING).get(storage.SETTING)
    value: Sequence[Mapping[str, Any]] = found or ()
    return value


def own_server(inventory: Inventory, value: Any) -> str:
    """The address of the machine that serves shares; "" if none does. Raises WrongInput without exactly one machine."""
    return _address(inventory, _server(inventory, value))


def _server(inventory: Inventory, value: Any) -> Machine | None:
    """The machine that serves shares; None if none is to be served. Raises WrongInput without exactly one machine."""
    own = storage.own_names(value)
    machines = _group(inventory)
    if not own:
        return None
    if len(machines) != 1:
        found = ", ".join(each.name for each in machines) or "no machine"
        raise WrongInput(
            f"the group {storage.GROUP} has {found}, and the share {own[0]} names no server",
            f"one machine in the group {storage.GROUP}",
            "correct the inventory, or name the share's server",
        )
    return machines[0]


def _group(inventory: Inventory) -> list[Machine]:
    """The machines of the group storage; one that is a node has that role, so that its Lease is taken."""
    nodes = {each.name: each for each in inventory.machines()}
    return [nodes.get(each.name, each) for each in inventory.machines(Role.STORAGE)]


def _address(inventory: Inventory, machine: Machine | None) -> str:
    if machine is None:
        return ""
    given = inventory.rendered(machine.name, "gpunodes_node_address").get("gpunodes_node_address")
    return storage.address(machine.address, str(given or ""))


def _nodes(inventory: Inventory) -> tuple[list[Machine], dict[str, str]]:
    """The machines of the cluster, and of those that are off on purpose why they are left out."""
    return switched_off.split(inventory, inventory.machines(Role.CONTROL_PLANE, Role.WORKER))


def _removed(
    volumes: Sequence[Mapping[str, Any]], claims: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The objects that the playbook deletes, the last ones first."""
    kinds = (("PersistentVolume", volumes), ("PersistentVolumeClaim", claims), ("Pod", pods))
    return [
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {key: str(each["metadata"][key]) for key in ("name", "namespace") if key in each["metadata"]},
        }
        for kind, found in kinds
        for each in found
    ]
