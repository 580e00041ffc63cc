"""Which machines are repaired now, wait or are refused, and why.

Pure: verdicts, nodes, history and limits in, decisions out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, State, Verdict
from gpunodes.identity.model import NodeIdentity
from gpunodes.repair.maintenance import Maintenance, kept_by

# The pools of nodes without a pool label; a label's value contains no space (RFC 1123), so none can have these names.
CONTROL_PLANE_POOL = "control plane"
GPU_POOL = "GPU workers"
WORKER_POOL = "workers without GPUs"
HOST_POOL = "GPU hosts"
"""The pool of all machines without a cluster; only --without-cluster repairs them."""


def pool_of(label: str, *, gpus: bool) -> str:
    """The pool of a worker whose pool label is ``label`` ("" for none): GPU workers are separate from the others."""
    return label or (GPU_POOL if gpus else WORKER_POOL)


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the cluster's API reports it."""

    name: str
    addresses: tuple[str, ...] = ()
    ready: bool = True
    changed: float = 0.0
    """When it became ready, or stopped to be; seconds since 1970, 0 if that is unknown."""
    boot_id: str = ""
    machine_id: str = ""
    system_uuid: str = ""
    control_plane: bool = False
    pool: str = GPU_POOL
    """The pool of a worker."""
    cordoned: bool = False
    cordoned_by_repair: str = ""
    """The id of the repair that made its cordon, "" if no repair did."""
    cordon_lifted: str = ""
    """The id of the repair whose cordon others lifted, as `kubectl uncordon` does; "" for none."""
    cordoned_again: bool = False
    """Its cordon is not that of gpunodes, whatever marks of gpunodes it has: others made it later."""
    rollout: str = ""
    """The id of the roll-out that works on it, or was left there unfinished; "" for none."""
    cordoned_by_rollout: bool = False
    rolled_out: str = ""
    """The id of the last roll-out whose work ended well on it."""
    maintenance: Maintenance | None = None
    """Its maintenance; None if it is not in maintenance."""
    needs_repair: str = ""
    """Why a repair marked it as needing manual repair, "" if none did."""
    repairs: tuple[float, ...] = ()
    """Its recent repairs by the node's annotation; seconds since 1970."""
    capacity: int | None = None
    """GPUs, or slices of them, that its device plugins report; None if none does."""
    allocatable: int | None = None
    labelled: int | None = None
    """How many GPUs it had when it joined, by the label gpunodes.dev/gpu-count; None without that label."""
    replicas: int = 1
    """How many times it offers each of them, because pods share its GPUs."""

    @property
    def available(self) -> bool:
        return self.ready and not self.cordoned

    @property
    def cordoned_by_others(self) -> bool:
        """Whether it is cordoned, and neither by a repair, a roll-out nor by `gpunodes maintenance`."""
        by_maintenance = self.maintenance is not None and self.maintenance.cordoned
        by_gpunodes = self.cordoned_by_repair or self.cordoned_by_rollout or self.needs_repair or by_maintenance
        return self.cordoned and (self.cordoned_again or not by_gpunodes)

    @property
    def identity(self) -> NodeIdentity:
        """What identifies its machine."""
        ids = (self.boot_id.lower(), self.machine_id.lower(), self.system_uuid.lower())
        return NodeIdentity(self.name, self.addresses, *ids)

    @property
    def expected(self) -> int | None:
        """GPUs that it offers when healthy: a device plugin may have removed unhealthy GPUs from its capacity."""
        labelled = None if self.labelled is None else self.labelled * self.replicas
        return max((count for count in (self.capacity, labelled) if count is not None), default=None)


def pool_name(node: Node) -> str:
    """The pool that a node counts in."""
    return CONTROL_PLANE_POOL if node.control_plane else node.pool


@dataclass(frozen=True, slots=True)
class RepairCandidate:
    """A machine to decide on, with what is known of it. ``node`` is None if no node matches it."""

    name: str
    verdict: Verdict
    node: Node | None = None
    control_plane: bool = False
    named: bool = False
    """The user named this machine itself, not by a pattern."""
    repairs: tuple[float, ...] = ()
    """Its recent repairs by the controller's history; seconds since 1970."""
    needs_repair: str = ""
    """Why it needs manual repair, by the controller's history."""
    busy: str = ""
    """The command that holds its lock, "" if none does."""
    bmc: bool = False
    """It is unreachable, and has a BMC."""
    unmatched: str = ""
    """Why this machine may not be repaired as a node, "" if it may."""
    off: str = ""
    """Why it is off on purpose, "" if it is not."""


ROLLED_OUT = (
    "an unfinished roll-out works on it; `gpunodes rollout resume` or `gpunodes rollout abandon` ends that first"
)
"""Why a repair refuses a machine."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of a pool may be unavailable: a number, or a percentage of the pool (rounded down, at least one)."""

    number: int
    percent: bool = False

    def limit(self, pool: int) -> int:
        return max(1, pool * self.number // 100) if self.percent else self.number

    def __str__(self) -> str:
        return f"{self.number} %" if self.percent else str(self.number)


def budget(text: str) -> Budget:
    """``2`` or ``10%``; raises WrongInput."""
    found = re.fullmatch(r"([0-9]{1,6})\s*(%?)", str(text).strip())
    if found is None or int(found[1]) < 1 or (found[2] and int(found[1]) > 100):  # noqa: PLR2004 - a percentage
        raise WrongInput(f"{text!r} is not a budget", "a number of machines, or a percentage such as 10%", "correct it")
    return Budget(int(found[1]), bool(found[2]))


@dataclass(frozen=True, slots=True)
class RepairLimits:
    """The limits set by the user and the settings."""

    actions: frozenset[Action] = frozenset({Action.REBOOT})
    max_unavailable: Budget = Budget(1)
    unhealthy_percent: int = 30
    """If more of a pool is unhealthy at once, nothing is repaired there. A single machine never exceeds the limit."""
    guard_repairs: int = 2
    guard_hours: float = 24.0
    by_hand: bool = False
    """The user requested the repair, whatever the verdict: `gpunodes repair NAME`."""


class Decision(StrEnum):
    """The decision for a machine."""

    REPAIR = "repair"
    WAIT = "wait"
    """Not now: other machines of its pool are unavailable."""
    REFUSE = "refuse"
    NEEDS_REPAIR = "needs-repair"
    """It needs manual repair: by its verdict, by the loop guard, or because an earlier repair failed."""
    NOTHING = "nothing"
    """Nothing to do."""


@dataclass(frozen=True, slots=True)
class MachineDecision:
    """The decision for one machine, and why."""

    machine: str
    decision: Decision
    why: str
    give_up: bool = False
    """Its node is to be marked as needing manual repair."""


def decide(
    candidates: Sequence[RepairCandidate],
    nodes: Sequence[Node],
    limits: RepairLimits,
    now: float,
    others: Sequence[RepairCandidate] = (),
) -> list[MachineDecision]:
    """A decision for each candidate, in the order in which they are to be repaired.

    ``nodes`` are all nodes of the cluster. ``others`` are machines with a known verdict for which no decision is
    needed: they count in the pools of their nodes. With ``--without-cluster``, ``nodes`` are stand-ins for the
    inventory's machines. ``now`` is in seconds since 1970.
    """
    pools = _pools([*candidates, *others], nodes)
    decisions = []
    for each in sorted(candidates, key=_order):
        decision, why = _decide_by_own_state(each, limits, now)
        if decision is Decision.REPAIR and each.node:
            pool = pools[_pool(each, each.node)]
            decision, why = _decide_in_pool(each, each.node, pool, limits) or (decision, why)
            if decision is Decision.REPAIR:
                pool.unavailable.add(each.node.name)
        # A machine whose verdict allows a repair and that is not marked yet was stopped by the loop guard.
        guarded_now = each.verdict.action in limits.actions and not (limits.by_hand or _given_up(each))
        decisions.append(MachineDecision(each.name, decision, why, decision is Decision.NEEDS_REPAIR and guarded_now))
    return decisions


def guarded(repairs: Iterable[float], limits: RepairLimits, now: float) -> int:
    """How many of these repairs count for the loop guard; one dated in the future by a fast clock counts too."""
    return sum(now - limits.guard_hours * 3600 < moment for moment in repairs)


def is_unhealthy(verdict: Verdict) -> bool:
    """Whether a machine counts as unhealthy in its pool: it cannot be used or reached, or needs a reset."""
    return verdict.state.rank >= State.SICK.rank or verdict.action.rank >= Action.RESET_GPU.rank


def _order(each: RepairCandidate) -> tuple[bool, bool, bool, int, str]:
    """Workers before control planes; unavailable machines first, then hung drivers, then the stronger action."""
    available = each.node is None or each.node.available
    return (_is_control_plane(each), available, not each.verdict.hung_in_driver, -each.verdict.action.rank, each.name)


def _reset_by_hand(each: RepairCandidate) -> str:
    """What a user can do about an unreachable machine."""
    return f"`gpunodes repair {each.name} --from bmc` resets it" if each.bmc else "it has no BMC that could reset it"


# Long: one case after the other, in the order of their priority.
def _decide_by_own_state(each: RepairCandidate, limits: RepairLimits, now: float) -> tuple[Decision, str]:
    """The decision by the machine's own state, regardless of its pool: the first case that applies.

    All cases are in one table, because their order decides.
    """
    verdict = each.verdict
    given_up = _given_up(each)
    past = guarded(
        {round(moment) for moment in (*each.repairs, *(each.node.repairs if each.node else ()))}, limits, now
    )
    requested = limits.by_hand or verdict.action in limits.actions
    maintained = kept_by(each.node.maintenance, now) if each.node else ""
    cases = [
        (bool(each.off) and limits.by_hand, Decision.REFUSE, f"{each.off}; `gpunodes power {each.name} on` ends that"),
        (bool(each.off), Decision.NOTHING, each.off),
        (bool(each.busy), Decision.REFUSE, f"it is being worked on: {each.busy}"),
        (
            bool(each.node and each.node.rollout) and (requested or is_unhealthy(verdict)),
            Decision.REFUSE,
            ROLLED_OUT,
        ),
        (
            bool(maintained) and (requested or is_unhealthy(verdict)),
            Decision.REFUSE,
            f"{maintained}; `gpunodes maintenance off {each.name}` ends it",
        ),
        (
            bool(given_up) and (requested or is_unhealthy(verdict)),
            Decision.NEEDS_REPAIR,
            f"it is marked as needing repair ({given_up}); `gpunodes uncordon {each.name}` allows repairs again",
        ),
        (
            verdict.action is Action.REPAIR and not limits.by_hand,
            Decision.NEEDS_REPAIR,
            "its verdict requires manual repair, not a reboot",
        ),
        (
            verdict.state is State.UNREACHABLE and not limits.by_hand,
            Decision.REFUSE,
            f"it is unreachable and may still be healthy; {_reset_by_hand(each)}",
        ),
        (not requested, Decision.NOTHING, f"its verdict's action is {verdict.action.value}"),
        (each.node is None or bool(each.unmatched), Decision.REFUSE, each.unmatched or "it has no node"),
        (
            _is_control_plane(each) and not each.named,
            Decision.REFUSE,
            "it is a control-plane machine, which is repaired only if it is named itself",
        ),
        (
            each.node is not None and each.node.cordoned_by_others and not each.named,
            Decision.REFUSE,
            f"a user or another program cordoned it; `gpunodes repair {each.name}` repairs it anyway",
        ),
        (
            past >= limits.guard_repairs,
            Decision.NEEDS_REPAIR,
            f"it was repaired {past} times in {limits.guard_hours:g} h and is unhealthy again",
        ),
    ]
    for applies, decision, why in cases:
        if applies:
            return decision, why
    return (
        Decision.REPAIR,
        "requested by the user" if limits.by_hand else f"its verdict's action is {verdict.action.value}",
    )


def _given_up(each: RepairCandidate) -> str:
    return each.needs_repair or (each.node.needs_repair if each.node else "")


@dataclass(frozen=True, slots=True)
class _Pool:
    """A whole pool, including machines that were not selected. Its sets hold names of nodes."""

    name: str
    size: int
    unhealthy: Collection[str]
    """Not ready, or unhealthy by their verdict."""
    unavailable: set[str]
    """Not ready, or cordoned by anyone; machines are added when their repair is decided."""


def _decide_in_pool(
    each: RepairCandidate, node: Node, pool: _Pool, limits: RepairLimits
) -> tuple[Decision, str] | None:
    """Why the state of its pool forbids the repair of a machine now; None if it allows the repair."""
    unhealthy = len(pool.unhealthy)
    if not limits.by_hand and unhealthy > 1 and unhealthy * 100 > limits.unhealthy_percent * pool.size:
        return Decision.REFUSE, (
            f"{unhealthy} of {pool.size} machines of pool {pool.name} are unhealthy at the same time, more than "
            f"{limits.unhealthy_percent} %: check for a common cause (power, a switch, a driver rollout); reboots "
            "do not fix it"
        )
    others = pool.unavailable - {node.name}
    if _is_control_plane(each) and others:
        return (
            Decision.WAIT,
            f"{names(others)} of the control plane is unavailable; its machines are repaired one by one",
        )
    why = over_budget(pool.name, pool.size, others, limits.max_unavailable)
    return (Decision.WAIT, why) if why else None


def over_budget(pool: str, size: int, unavailable: Collection[str], budget: Budget) -> str:
    """Why one more machine of a pool must not become unavailable, "" if it may.

    ``size`` counts the whole pool; ``unavailable`` are its nodes that are unavailable, without the machine itself.
    """
    most = budget.limit(size)
    if len(unavailable) + 1 <= most:
        return ""
    return f"{names(unavailable)} of pool {pool} unavailable; the limit is {most} (--max-unavailable)"


def names(found: Collection[str]) -> str:
    """Names for a message: at most three of them."""
    first = sorted(found)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")  # noqa: PLR2004 - three are named


def _is_control_plane(each: RepairCandidate) -> bool:
    return each.control_plane or (each.node is not None and each.node.control_plane)


def _pool(each: RepairCandidate, node: Node) -> str:
    return CONTROL_PLANE_POOL if _is_control_plane(each) else pool_name(node)


def _pools(candidates: Sequence[RepairCandidate], nodes: Sequence[Node]) -> dict[str, _Pool]:
    members: dict[str, dict[str, Node]] = {}
    for node in nodes:
        members.setdefault(pool_name(node), {})[node.name] = node
    unhealthy = set()
    for each in candidates:
        # A machine without a node is no part of a pool, nor is one that is off on purpose.
        if each.node and not each.off:
            members.setdefault(_pool(each, each.node), {}).setdefault(each.node.name, each.node)
            unhealthy |= {each.node.name} if is_unhealthy(each.verdict) else set()
    return {
        pool: _Pool(
            pool,
            len(found),
            {name for name, node in found.items() if name in unhealthy or not node.ready},
            {name for name, node in found.items() if not node.available},
        )
        for pool, found in members.items()
    }
