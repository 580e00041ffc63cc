"""The machines of pools that scale: their nodes, BMCs and passwords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.plan import Plan, PlannedMachine, bytes_of_one
from gpunodes.autoscale.state import MachineState
from gpunodes.engine import identities
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import InventoryFleet, match_nodes
from gpunodes.engine.power import Access, kinds
from gpunodes.errors import WrongInput, together
from gpunodes.identity.model import MachineIdentity, NodeIdentity
from gpunodes.model import Machine, Role
from gpunodes.operations.autoscale.jumps import Jumps
from gpunodes.operations.storage import findings
from gpunodes.planner import autoscale
from gpunodes.planner.autoscale import ScaledMachine
from gpunodes.planner.pools import POOL_LABEL
from gpunodes.planner.scaled_pools import any_scales, scaled
from gpunodes.repair.switched_off import of_machines
from gpunodes.setting_forms import are_taints

_MAX_CA = 64 << 10
"""Bytes of a CA file that go into the plan, which is one object of the cluster."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The plan of the power server, and what goes beside it."""

    plan: Mapping[str, Any]
    passwords: Mapping[str, str] = field(repr=False)
    """The passwords of BMCs, by node, and the keys for jump hosts before them."""
    machines: Mapping[str, Machine]
    """The machine of each node."""


def cluster_settings(fleet: InventoryFleet) -> Mapping[str, Any]:
    """The settings that the whole cluster has once; raises WrongInput if no pool scales."""
    found = fleet.settings()
    if not any_scales(found["gpunodes_pools"]):
        raise WrongInput(
            "no pool scales",
            "a pool with max in gpunodes_pools, such as {h100: {min: 0, max: 4}}",
            "see `gpunodes help --page scaling`",
        )
    return found


def gather(
    fleet: InventoryFleet,
    cluster: Cluster,
    nodes: Mapping[str, SeenNode],
    states: Mapping[str, MachineState],
    last: Plan | None,
) -> Gathered:
    """Read what the power server must know; raises WrongInput for every machine that it cannot switch, at once.

    ``last`` is the present plan: another controller may have made it, which knew more of the machines.
    """
    given = cluster_settings(fleet)
    pools = scaled(given["gpunodes_pools"])
    machines = {
        machine.name: machine
        for machine in fleet.inventory.machines(Role.WORKER)
        if fleet.labels(machine.name).get(POOL_LABEL) in pools
    }
    known = identities.recall_all(fleet.cluster_name, {name: each.address for name, each in machines.items()})
    matches = match_nodes(fleet, cluster.nodes(), {})
    off = of_machines({node: node for node in states}, known, matches)
    most, serving = bytes_of_one(len(machines)), findings.servers(fleet.inventory)
    found = []
    for name, machine in machines.items():
        match, own = matches[name], known[name]
        if match.contradiction:
            raise WrongInput(f"{name}: {match.contradiction}", "one machine for each node", "see `gpunodes status`")
        # The node of a machine that is off was deleted; its name was recorded, or is that of the machine.
        node = match.node.name if match.node else off.get(name, "")
        rendered = fleet.inventory.rendered(name, "gpunodes_bmc_", "gpunodes_node_taints")
        found.append(
            ScaledMachine(
                name,
                fleet.labels(name)[POOL_LABEL],
                settings.resolve(fleet.inventory.connection(name) | rendered),
                _identity(own, last.machines.get(node) if last else None, match.node),
                node,
                match.node.addresses[0] if match.node and match.node.addresses else machine.address,
                _template(nodes.get(node), states.get(node), most),
                labels=fleet.labels(name),
                serves=name in serving,
            )
        )
    _check(found, own_image=bool(given["gpunodes_power_image"]))
    accesses = {each.node: _access(fleet, each) for each in found}
    found = [_with_own_macs(each, accesses[each.node]) for each in found]
    jumps = Jumps()
    found = [replace(each, jump=jumps.add(each.name, accesses[each.node])) for each in found]
    passwords = {node: access.password for node, access in accesses.items() if access and access.password}
    return Gathered(
        autoscale.document(given, found, _authorities(found), jumps.documents, _templates(last)),
        passwords | jumps.keys,
        {each.node: machines[each.name] for each in found},
    )


def _templates(last: Plan | None) -> dict[str, Any]:
    """The templates of the pools in the present plan."""
    return {name: pool.template.document() for name, pool in last.pools.items()} if last else {}


def _access(fleet: InventoryFleet, machine: ScaledMachine) -> Access | None:
    """The access to the BMC of a machine; raises WrongInput for one that reported only addresses of others to wake."""
    is_woken = machine.settings["gpunodes_bmc_type"] == kinds.WOL
    others = fleet.macs_of_others(machine.name) if is_woken else {}
    found = kinds.access(machine.name, machine.settings, macs=machine.identity.macs, others=others)
    if found and found.shared:
        raise WrongInput(
            found.shared, "an address that no other machine has", f"set gpunodes_bmc_mac of {machine.name}"
        )
    return found


def _with_own_macs(machine: ScaledMachine, access: Access | None) -> ScaledMachine:
    """A machine that is woken, with no address of another one: the power server knows only machines that scale."""
    if access is None or access.kind != kinds.WOL or machine.settings["gpunodes_bmc_mac"]:
        return machine
    return replace(machine, identity=replace(machine.identity, macs=access.macs))


def _check(machines: Sequence[ScaledMachine], *, own_image: bool) -> None:
    """Raise WrongInput for every machine that cannot be switched, or whose taints cannot be read, at once."""
    wrong = [
        WrongInput(f"{name} of a pool that scales: {why}")
        for name, why in autoscale.problems(machines, own_image=own_image)
    ]
    wrong += [
        WrongInput(
            f"{each.name} of a pool that scales: gpunodes_node_taints is no list of taints",
            "taints with key, value and effect",
            "correct it",
        )
        for each in machines
        if not are_taints(each.settings["gpunodes_node_taints"])
    ]
    if wrong:
        raise together(wrong)


def _identity(own: MachineIdentity, planned: PlannedMachine | None, node: NodeIdentity | None) -> MachineIdentity:
    """The recorded identity of a machine; if this controller recorded none, that of the present plan or of its node."""
    if own.has_hardware:
        return own
    machine_id = own.machine_id or (node.machine_id if node else "")
    known = planned.identity if planned else MachineIdentity("")
    # A node of another board is newer than the plan.
    uuids = {known.system_uuid.lower(), node.system_uuid.lower() if node else ""} - {""}
    if known.has_hardware and len(uuids) <= 1:
        return replace(known, name=own.name, machine_id=machine_id or known.machine_id)
    return replace(own, machine_id=machine_id, system_uuid=node.system_uuid if node else "")


def _template(node: SeenNode | None, state: MachineState | None, most: int) -> dict[str, Any] | None:
    saved = node.saved(most) if node and node.node.ready else state.saved if state else None
    return saved.shape.document() if saved else None


def _authorities(machines: Sequence[ScaledMachine]) -> dict[str, str]:
    """The texts of the CA files that settings name, by path; raises WrongInput for one that cannot be read."""
    found: dict[str, str] = {}
    for each in machines:
        text = str(each.settings["gpunodes_bmc_verify"] or "").strip()
        if text.lower() in ("", "true", "false") or text in found:
            continue
        try:
            found[text] = Path(text).expanduser().read_text(encoding="ascii")[:_MAX_CA]
        except (OSError, UnicodeDecodeError) as error:
            raise WrongInput(
                f"gpunodes_bmc_verify of {each.name} is {text!r}: {error}", "a CA file in PEM", "correct it"
            ) from error
    return found
