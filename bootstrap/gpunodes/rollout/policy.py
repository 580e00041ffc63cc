"""Which machines of a roll-out are begun now, wait or are skipped, and why.

Pure: machines, nodes and the roll-out's state in, decisions out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.repair import policy
from gpunodes.repair.maintenance import kept_by
from gpunodes.repair.policy import CONTROL_PLANE_POOL, Node, pool_name
from gpunodes.rollout.options import RolloutOptions

_CONTROL_PLANES_FIRST = "control planes come first"
RETURN_S = 120.0
"""Seconds in which a node that stopped being ready is waited for: kubelets lose a control plane that restarts."""


@dataclass(frozen=True, slots=True)
class RolloutCandidate:
    """A machine that waits, with what is known of it."""

    name: str
    node: Node | None
    """None if no node matches it."""
    unmatched: str = ""
    """Why no node matches it."""
    control_plane: bool = False
    busy: str = ""
    """The command that holds its lock, "" if none does."""
    unreadable: str = ""
    """Why its state could not be read."""


class Decision(StrEnum):
    """The decision for a machine."""

    BEGIN = "begin"
    WAIT = "wait"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class MachineDecision:
    """The decision for one machine, and why."""

    machine: str
    decision: Decision
    why: str = ""


def is_control_plane(each: RolloutCandidate) -> bool:
    """Whether a machine is a control plane, by the inventory or by its node."""
    return each.control_plane or (each.node is not None and each.node.control_plane)


# Long: the reasons in the order of their priority, as they change while machines are chosen.
def decide(
    candidates: Sequence[RolloutCandidate],
    nodes: Sequence[Node],
    options: RolloutOptions,
    now: float,
    running: Collection[str] = (),
    canaries_left: int | None = None,
) -> list[MachineDecision]:
    """A decision for each candidate, in order: control planes first, one at a time and alone; then within the budgets.

    ``nodes`` are all nodes, locked ones marked as cordoned. ``running`` are the nodes that the roll-out works on; they
    count as unavailable until their result is known, also those that are given back already, since a result may stop
    the roll-out. ``canaries_left`` is how many canaries may still be begun, None if all may. ``now`` is in seconds
    since 1970.
    """
    busy = set(running)
    sizes, unavailable = _pools(nodes, busy, now)
    control_planes = [each for each in candidates if is_control_plane(each)]
    control_plane_runs = any(node.control_plane for node in nodes if node.name in busy)
    decisions = []
    for each in [*control_planes, *(each for each in candidates if not is_control_plane(each))]:
        node = each.node
        if why := _skipped(each, now):
            decisions.append(MachineDecision(each.name, Decision.SKIP, why))
            continue
        assert node is not None  # noqa: S101 - it is skipped without one; for the type checker
        first = is_control_plane(each)
        pool = CONTROL_PLANE_POOL if first else pool_name(node)
        others = unavailable.get(pool, set()) - {node.name}
        if each.busy:
            why = in_maintenance(node, now) or f"it is being worked on: {each.busy}"
        elif not node.ready:
            why = "its node has not been ready for a short time"
        elif control_plane_runs or (first and busy):
            why = "a control plane is never worked on at the same time as other machines"
        elif not first and control_planes:
            why = _CONTROL_PLANES_FIRST
        elif first and others:
            why = f"{policy.names(others)} of the control plane is unavailable"
        elif not first and canaries_left is not None and canaries_left < 1:
            why = "the canaries come first"
        else:
            why = policy.over_budget(pool, sizes.get(pool, 1), others, options.max_unavailable)
        if why:
            decisions.append(MachineDecision(each.name, Decision.WAIT, why))
            continue
        decisions.append(MachineDecision(each.name, Decision.BEGIN))
        busy.add(node.name)
        unavailable.setdefault(pool, set()).add(node.name)
        control_plane_runs = control_plane_runs or first
        if not first and canaries_left is not None:
            canaries_left -= 1
    return decisions


def forbidden(node: Node | None, rollout: str, now: float) -> str:
    """Why a node must not be worked on, "" if it may be; read again after it was locked."""
    if node is None:
        return "its node no longer exists"
    maintained = in_maintenance(node, now)
    if rollout and node.rollout == rollout:
        return maintained
    # The first that applies.
    cases = (
        (node.rollout, f"the roll-out {node.rollout} left marks on its node; `gpunodes rollout abandon` removes them"),
        (maintained, maintained),
        (node.needs_repair, f"it is marked as needing repair ({node.needs_repair})"),
        (
            node.cordoned_by_repair,
            "an unfinished repair left it cordoned; `gpunodes repair --resume` continues it",
        ),
        (node.cordoned_by_others, "a user or another program cordoned it; `kubectl uncordon` allows work on it"),
        (not node.ready, f"its node is not ready; see `gpunodes health {node.name}`"),
    )
    return next((why for applies, why in cases if applies), "")


def in_maintenance(node: Node | None, now: float) -> str:
    """The maintenance that a node is in, "" if it is in none; also one that a roll-out began with waits for its end."""
    return kept_by(node.maintenance, now) if node else ""


def _skipped(each: RolloutCandidate, now: float) -> str:
    if each.node is None:
        return each.unmatched or "it is no node of the cluster"
    if each.busy:
        return ""  # its lock makes it look cordoned; it is judged when the other command ends
    node = dataclasses.replace(each.node, ready=True) if _may_return(each.node, now) else each.node
    return each.unreadable or forbidden(node, "", now)


def _may_return(node: Node, now: float) -> bool:
    # A moment in the future comes from a clock that is wrong: nothing bounds such a wait.
    return not node.ready and 0 <= now - node.changed < RETURN_S


def _pools(nodes: Sequence[Node], busy: Collection[str], now: float) -> tuple[dict[str, int], dict[str, set[str]]]:
    """The size of each pool, and its nodes that are unavailable: not ready, cordoned, locked, maintained or busy."""
    sizes: dict[str, int] = {}
    unavailable: dict[str, set[str]] = {}
    for node in nodes:
        pool = pool_name(node)
        sizes[pool] = sizes.get(pool, 0) + 1
        if not node.available or in_maintenance(node, now) or node.rollout or node.name in busy:
            unavailable.setdefault(pool, set()).add(node.name)
    return sizes, unavailable
