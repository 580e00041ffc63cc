"""Query the control plane for its nodes, and compare them with the inventory."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes import settings
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import control_planes, identities, journal, runner
from gpunodes.engine.cluster.errors import check
from gpunodes.engine.cluster.listed import Listed
from gpunodes.errors import GpunodesError, Interrupted
from gpunodes.identity.matcher import Matcher
from gpunodes.identity.model import MachineIdentity, described
from gpunodes.inventory import Inventory
from gpunodes.model import MachineCertificates, Role
from gpunodes.operations import kubelets, phases, switched_off
from gpunodes.operations.certs import ends
from gpunodes.operations.preflight import checked_cluster, not_read
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import endpoint, kubelet_drift, reports, versions
from gpunodes.planner.drift import MachineDrift, of_report
from gpunodes.repair import maintenance

PHASES = (phases.STATUS, phases.CERTIFICATE_ENDS)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of the cluster. ``machine`` is its name in the inventory, "" for a node that is not in the inventory."""

    name: str
    machine: str
    role: str
    ready: bool
    reason: str
    """Why it is not ready; whether it is in maintenance or cordoned."""
    version: str
    address: str


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """A member of etcd as the member on the control plane reports it."""

    id: str
    name: str
    """"" for a member that was added and has never started."""
    learner: bool
    leader: bool
    healthy: bool
    db_size: int
    """In bytes; 0 where the member does not respond."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as its control plane reports it."""

    endpoint: str
    """"" if it was read by a kubeconfig."""
    version: str
    nodes: Sequence[NodeStatus]
    missing: Sequence[str]
    """Machines of the inventory that are not nodes yet."""
    off: Mapping[str, str] = field(default_factory=dict)
    """The machines that the autoscaler keeps off, with a sentence about each; they are not ``missing``."""
    gpu_hosts: Sequence[str] = ()
    """Machines of the inventory that are not meant to be nodes."""
    etcd: Sequence[EtcdMember] = ()
    etcd_problem: str = ""
    """Why its members are unknown."""
    certificates: Sequence[MachineCertificates] = ()
    """Those of each control plane that responds."""
    warnings: Sequence[str] = ()
    """Certificates of control planes that end soon, control planes that do not respond, older kubelets, and those
    whose settings are unknown."""
    virtual_address: str = ""
    """The address of the setting gpunodes_control_plane_vip, "" for none."""
    holders: Sequence[str] = ()
    """The control planes that have it: one, unless something is wrong."""
    unread_kubelets: str = ""
    """Which kubelets' settings are unknown, and why; a warning, too."""
    kubelet_problems: Mapping[str, str] = field(default_factory=dict)
    """The same by machine."""
    drift: Sequence[MachineDrift] = ()
    """How the control planes and kubelets that respond differ from their settings; none for one that does not."""


def run(inventory: Inventory, view: RunView) -> ClusterStatus:
    """Read the cluster; raises GpunodesError if there is none, or if no control plane responds."""
    hosts = [machine.name for machine in inventory.machines(Role.GPU_HOST)]
    choice = control_planes.choose(inventory, every=True)
    control = choice.machine
    vip = str(settings.resolve(inventory.with_rendered(control.name, [endpoint.VIP]))[endpoint.VIP])
    tracker, cluster = _read(inventory, choice, view)
    found = assemble(_identities(inventory), cluster)
    dead = [f"{name} does not respond as a control plane: {why}" for name, why in choice.failures]
    names = [machine.name for machine in control_planes.responding(inventory, choice)]
    certificates = ends.reported(tracker, names, "")
    owners = {node.name: node.machine for node in found.nodes}
    own = kubelets.compared(inventory, owners, cluster, tracker.answers.get("kubelet_settings", {}).get(control.name))
    etcd, etcd_problem = known_members(tracker.answers.get("etcd", {}), control.name)
    held = tracker.answers.get("has_virtual_address", {})
    off = {name: each.described for name, each in switched_off.read(inventory).items()}
    return replace(
        found,
        missing=[name for name in found.missing if name not in off],
        off=off,
        gpu_hosts=hosts,
        etcd=etcd,
        virtual_address=vip,
        holders=[name for name, answer in held.items() if answer is True],
        etcd_problem=etcd_problem,
        certificates=certificates,
        unread_kubelets=own.unknown,
        kubelet_problems=own.unread,
        drift=kubelet_drift.merged(differing(tracker), own.machines),
        warnings=[
            *dead,
            *found.warnings,
            *(f"{each.machine}: {warning}" for each in certificates for warning in each.warnings),
            *([own.unknown] if own.unknown else ()),
        ],
    )


def by_kubeconfig(inventory: Inventory) -> ClusterStatus:
    """The nodes by the inventory's kubeconfig, without what control planes alone know. Raises GpunodesError."""
    with contextlib.closing(control_planes.session(inventory)) as session:
        cluster = Listed(session, patience_s=0.0).read()
    check(cluster["nodes"], reports.NODES, "its nodes")
    found = assemble(_identities(inventory), cluster)
    hosts = [machine.name for machine in inventory.machines(Role.GPU_HOST)]
    etcd = "they are read over SSH, on control planes in the inventory"
    # The warning about older kubelets names `gpunodes upgrade`, which needs control planes.
    return replace(found, gpu_hosts=hosts, etcd_problem=etcd, warnings=())


def _identities(inventory: Inventory) -> list[MachineIdentity]:
    """Those of the machines that are meant to be nodes, as they were recorded."""
    machines = {machine.name: machine.address for machine in inventory.machines() if machine.role is not Role.GPU_HOST}
    return list(identities.recall_all(inventory.cluster, machines).values())


def _read(inventory: Inventory, choice: control_planes.Choice, view: RunView) -> tuple[Tracker, Mapping[str, Any]]:
    """What the control planes that respond report, and the cluster as the chosen one does; raises as ``run``."""
    control = choice.machine
    asked = control_planes.responding(inventory, choice)
    tracker = Tracker(asked, PHASES, view)
    view.begin("status", asked)
    folder = journal.open_run("status")
    names = [machine.name for machine in asked]
    play = runner.Play(
        "status.yml", inventory, names, variables={"kubelet_fields": kubelets.fields(inventory)}, control=control.name
    )
    ended = runner.run(play, folder, tracker.on_event)
    if ended.interrupted:
        raise Interrupted
    tracker.check_controller(ended)
    cluster = checked_cluster(tracker, control.name)
    # Other control planes may be down.
    if control.name in tracker.failures or not cluster:
        failure = tracker.failures.get(control.name)
        again = "correct that, then run the same command again"
        problem = not_read(failure) if failure else Problem(ended.error_text, "", again)
        raise GpunodesError(
            f"{control.name}: {problem.found}", problem.wanted, f"{problem.remedy}; the log is {ended.log}"
        )
    return tracker, cluster


def differing(tracker: Tracker) -> list[MachineDrift]:
    """How the control planes differ from their settings, as they reported it."""
    found = [of_report(name, each) for name, each in tracker.answers.get("control_plane_drift", {}).items()]
    return [each for each in found if each.differs]


def known_members(reported: Mapping[str, Mapping[str, Any]], control: str) -> tuple[Sequence[EtcdMember], str]:
    """The members as the control plane in use reports them, or as another one does if that one does not know them."""
    own = members(reported.get(control))
    others = (members(each) for name, each in reported.items() if name != control) if own[1] else ()
    return next((each for each in others if not each[1]), own)


def members(report: Mapping[str, Any] | None) -> tuple[Sequence[EtcdMember], str]:
    """The members of etcd from the control plane's report, and why they are unknown, "" otherwise."""
    if report is None:
        return (), "they were not reported"
    if found := reports.etcd_problem(report):
        return (), found
    fields = [field.name for field in dataclasses.fields(EtcdMember)]
    return [EtcdMember(**{name: each[name] for name in fields}) for each in report["members"]], str(report["problem"])


def assemble(machines: Sequence[MachineIdentity], cluster: Mapping[str, Any]) -> ClusterStatus:
    """Match the cluster's nodes and the inventory's machines by recorded identities; no machine is queried."""
    matcher = Matcher([described(node) for node in cluster["nodes"]], machines)
    matches = [(machine.name, matcher.match(machine, confirmed=False).node) for machine in machines]
    machine_of = {node.name: name for name, node in matches if node}
    nodes, now = [], time.time()
    for node in cluster["nodes"]:
        machine = machine_of.get(node["name"], "")
        nodes.append(
            NodeStatus(
                name=node["name"],
                machine=machine,
                role=node["role"],
                ready=node["ready"],
                reason="; ".join(part for part in (node["reason"], _plugin(node), _maintenance(node, now)) if part),
                version=node["version"],
                address=node["address"],
            )
        )
    present = {node.machine for node in nodes}
    missing = [machine.name for machine in machines if machine.name not in present]
    old = versions.behind(cluster["version"], {node.name: node.version for node in nodes})
    return ClusterStatus(cluster["endpoint"], cluster["version"], nodes, missing, warnings=[old] if old else [])


def _plugin(node: Mapping[str, Any]) -> str:
    """That the node's GPUs are not offered because a command took it from the device plugin, "" if it has it."""
    if not node.get("plugin_away"):
        return ""
    return (
        "its GPUs are not offered while a command works on the driver; if none does, `gpunodes rollout resume` or "
        f"`rollout abandon`, else `gpunodes uncordon {node['name']}` brings the device plugin back"
    )


def _maintenance(node: Mapping[str, Any], now: float) -> str:
    """The node's maintenance or cordon, "" without one."""
    found = maintenance.parse(node["maintenance"])
    cordoned = "" if node["schedulable"] else "cordoned"
    if found is None:
        return cordoned
    state = "in maintenance" if found.holds(now) else f"its maintenance has expired, it is {cordoned or 'schedulable'}"
    return f"{state}: {found.described()}"
