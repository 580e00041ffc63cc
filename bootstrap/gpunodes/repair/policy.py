"""Who is repaired now, who waits, who is refused, and why.

Pure: verdicts, nodes, history and limits in, decisions out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.ansible.module_utils.gpunodes.identity import NodeIdentity
from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, State, Verdict
from gpunodes.repair.maintenance import Maintenance

# The pools that no label names; a label's value holds no blank (RFC 1123), so that none can be called the same.
CONTROL_PLANE_POOL = "control plane"
GPU_POOL = "GPU workers"
WORKER_POOL = "workers without GPUs"


def pool_of(label: str, *, gpus: bool) -> str:
    """The pool of a worker whose pool label is ``label`` ("" for none): GPU workers apart from the others."""
    return label or (GPU_POOL if gpus else WORKER_POOL)


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its cluster shows it."""

    name: str
    addresses: tuple[str, ...] = ()
    ready: bool = True
    boot_id: str = ""
    machine_id: str = ""
    system_uuid: str = ""
    control_plane: bool = False
    pool: str = GPU_POOL
    """The pool of a worker."""
    cordoned: bool = False
    cordoned_by_us: str = ""
    """The id of the repair that cordoned it, "" when we did not."""
    maintenance: Maintenance | None = None
    """What a person keeps it for; None when nobody does."""
    needs_repair: str = ""
    """Why we gave it up, "" when we did not."""
    repairs: tuple[float, ...] = ()
    """When it was repaired lately, as the node itself remembers; seconds since 1970."""
    capacity: int | None = None
    """GPUs, or slices of them, that its device plugins told of; None where none did."""
    allocatable: int | None = None
    labelled: int | None = None
    """How many GPUs it came into the cluster with, by our label; None where it has none."""

    @property
    def available(self) -> bool:
        return self.ready and not self.cordoned

    @property
    def cordoned_by_others(self) -> bool:
        """Whether neither a repair nor `gpunodes maintenance` cordoned it."""
        ours = self.cordoned_by_us or self.needs_repair or (self.maintenance and self.maintenance.cordoned)
        return self.cordoned and not ours

    @property
    def identity(self) -> NodeIdentity:
        """What tells which machine it is."""
        ids = (self.boot_id.lower(), self.machine_id.lower(), self.system_uuid.lower())
        return NodeIdentity(self.name, self.addresses, *ids)

    @property
    def expected(self) -> int | None:
        """GPUs that it is to offer when it is well: a device plugin that finds one ill may have let go of it."""
        return max((count for count in (self.capacity, self.labelled) if count is not None), default=None)


def pool_name(node: Node) -> str:
    """The pool that a node counts in."""
    return CONTROL_PLANE_POOL if node.control_plane else node.pool


@dataclass(frozen=True, slots=True)
class RepairCandidate:
    """A machine under judgement, with what is known of it. ``node`` is None where no cluster is asked."""

    name: str
    verdict: Verdict
    node: Node | None = None
    control_plane: bool = False
    named: bool = False
    """The user named this machine itself, not by a pattern."""
    repairs: tuple[float, ...] = ()
    """When it was repaired lately, as our history says; seconds since 1970."""
    needs_repair: str = ""
    """Why it was given up, as our history says."""
    busy: str = ""
    """Who works on it now, "" when nobody does."""
    unmatched: str = ""
    """Why no node can be told to be this machine, "" where one is, or where no cluster is asked."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of a pool may be unavailable: a number, or a percentage of the pool (rounded down, at least one)."""

    number: int
    percent: bool = False

    def of(self, pool: int) -> int:
        return max(1, pool * self.number // 100) if self.percent else self.number

    def __str__(self) -> str:
        return f"{self.number} %" if self.percent else str(self.number)


def budget(text: str) -> Budget:
    """``2`` or ``10%``; raises WrongInput."""
    found = re.fullmatch(r"([0-9]{1,6})\s*(%?)", str(text).strip())
    if found is None or int(found[1]) < 1 or (found[2] and int(found[1]) > 100):  # noqa: PLR2004 - a percentage
        raise WrongInput(f"{text!r} is no budget", "a number of machines, or a percentage such as 10%", "correct it")
    return Budget(int(found[1]), bool(found[2]))


@dataclass(frozen=True, slots=True)
class RepairLimits:
    """What the user and the settings allow."""

    actions: frozenset[Action] = frozenset({Action.REBOOT})
    max_unavailable: Budget = Budget(1)
    unhealthy_percent: int = 30
    """More of a pool than this unhealthy at once: nothing is repaired there. One alone never counts as too many."""
    guard_repairs: int = 2
    guard_hours: float = 24.0
    by_hand: bool = False
    """The user asked for these machines, whatever their verdict: `gpunodes repair NAME`."""


class Decision(StrEnum):
    """What is decided for a machine."""

    REPAIR = "repair"
    WAIT = "wait"
    """Not now: others of its pool are unavailable."""
    REFUSE = "refuse"
    NEEDS_REPAIR = "needs-repair"
    """No reboot of ours helps it: by its verdict, by the loop guard, or since we gave it up before."""
    NOTHING = "nothing"
    """Nothing to do."""


@dataclass(frozen=True, slots=True)
class MachineDecision:
    """What is decided for one machine, and why."""

    machine: str
    decision: Decision
    why: str
    give_up: bool = False
    """It needs repair from now on: its node is to be marked."""


def decide(
    candidates: Sequence[RepairCandidate],
    nodes: Sequence[Node],
    limits: RepairLimits,
    now: float,
    beside: Sequence[RepairCandidate] = (),
) -> list[MachineDecision]:
    """A decision for each candidate, in the order in which they are to be repaired.

    ``nodes`` are all nodes of the cluster, ``beside`` the machines whose verdict is known and on which nothing is
    decided: they count in their pools. Where no cluster is asked (``--without-cluster``), ``nodes`` stand for the
    inventory's machines. ``now`` is in seconds since 1970.
    """
    pools = _pools([*candidates, *beside], nodes)
    decisions = []
    for each in sorted(candidates, key=_order):
        decision, why = _decide_alone(each, limits, now)
        if decision is Decision.REPAIR:
            decision, why = _decide_in_pool(each, pools[_pool(each)], limits) or (decision, why)
        if decision is Decision.REPAIR:
            pools[_pool(each)].unavailable.add(_name(each))
        # What asks for a repair and was not given up before has met the loop guard.
        guarded_now = each.verdict.action in limits.actions and not (limits.by_hand or _given_up(each))
        decisions.append(MachineDecision(each.name, decision, why, decision is Decision.NEEDS_REPAIR and guarded_now))
    return decisions


def guarded(repairs: Iterable[float], limits: RepairLimits, now: float) -> int:
    """How many of these repairs count for the loop guard; one that a fast clock dated after now counts as now."""
    return sum(now - limits.guard_hours * 3600 < moment for moment in repairs)


def is_unhealthy(verdict: Verdict) -> bool:
    """Whether a machine counts among the unhealthy of its pool: it cannot be used or reached, or asks for a reset."""
    return verdict.state.rank >= State.SICK.rank or verdict.action.rank >= Action.RESET_GPU.rank


def _order(each: RepairCandidate) -> tuple[bool, bool, bool, int, str]:
    """Workers before control planes; what is lost already first, then what hangs, then the stronger action."""
    available = each.node is None or each.node.available
    return (_control(each), available, not each.verdict.hung_in_driver, -each.verdict.action.rank, each.name)


def _decide_alone(each: RepairCandidate, limits: RepairLimits, now: float) -> tuple[Decision, str]:
    """The decision that the machine's own state leads to."""
    verdict = each.verdict
    given_up = _given_up(each)
    past = guarded(
        {round(moment) for moment in (*each.repairs, *(each.node.repairs if each.node else ()))}, limits, now
    )
    asked = limits.by_hand or verdict.action in limits.actions
    found = each.node.maintenance if each.node else None
    kept = found.described() if found and found.holds(now) else ""
    answers = [
        (bool(each.busy), Decision.REFUSE, f"it is being worked on: {each.busy}"),
        (
            bool(kept) and (asked or is_unhealthy(verdict)),
            Decision.REFUSE,
            f"it is in maintenance: {kept}; `gpunodes maintenance off {each.name}` ends that",
        ),
        (
            bool(given_up) and (asked or is_unhealthy(verdict)),
            Decision.NEEDS_REPAIR,
            f"it was given up ({given_up}); `gpunodes uncordon {each.name}` allows repairs again",
        ),
        (
            verdict.action is Action.REPAIR and not limits.by_hand,
            Decision.NEEDS_REPAIR,
            "its verdict asks for hands, not for a reboot",
        ),
        (
            verdict.state is State.UNREACHABLE and not limits.by_hand,
            Decision.REFUSE,
            f"it cannot be reached, and nothing says it is sick; `gpunodes repair {each.name} --from bmc` resets it",
        ),
        (not asked, Decision.NOTHING, f"its verdict asks for {_words(verdict.action)}"),
        (bool(each.unmatched), Decision.REFUSE, each.unmatched),
        (
            _control(each) and not each.named,
            Decision.REFUSE,
            "it is a control-plane machine; such a machine is repaired only when it is named",
        ),
        (
            each.node is not None and each.node.cordoned_by_others and not each.named,
            Decision.REFUSE,
            f"somebody cordoned it, and may be at work there; `gpunodes repair {each.name}` repairs it all the same",
        ),
        (
            past >= limits.guard_repairs,
            Decision.NEEDS_REPAIR,
            f"it was repaired {past} times in {limits.guard_hours:g} h and is sick again",
        ),
    ]
    for holds, decision, why in answers:
        if holds:
            return decision, why
    return Decision.REPAIR, f"its verdict asks for {_words(verdict.action)}" if not limits.by_hand else "as asked"


def _given_up(each: RepairCandidate) -> str:
    return each.needs_repair or (each.node.needs_repair if each.node else "")


def _words(action: Action) -> str:
    return "nothing" if action is Action.NONE else action.value


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool as a whole, whatever was selected of it. Its sets hold names of nodes."""

    name: str
    size: int
    unhealthy: Collection[str]
    """Not ready, or judged sick."""
    unavailable: set[str]
    """Not ready or cordoned, whoever cordoned them; those whose repair is decided are added."""


def _decide_in_pool(each: RepairCandidate, pool: _Pool, limits: RepairLimits) -> tuple[Decision, str] | None:
    """What the others of its pool make of a machine that is to be repaired; None when they let it."""
    ill = len(pool.unhealthy)
    if not limits.by_hand and ill > 1 and ill * 100 > limits.unhealthy_percent * pool.size:
        return Decision.REFUSE, (
            f"{ill} of {pool.size} machines of pool {pool.name} are unhealthy at the same time, more than "
            f"{limits.unhealthy_percent} %: look for a common cause (power, a switch, a driver rollout); reboots "
            "do not cure it"
        )
    others = pool.unavailable - {_name(each)}
    if _control(each) and others:
        return Decision.WAIT, f"{_names(others)} of the control plane is not available; never two at once"
    most = limits.max_unavailable.of(pool.size)
    if len(others) + 1 > most:
        return Decision.WAIT, (
            f"{_names(others)} of pool {pool.name} not available; at most {most} may be (--max-unavailable)"
        )
    return None


def _names(names: Collection[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")  # noqa: PLR2004 - three are named


def _control(each: RepairCandidate) -> bool:
    return each.control_plane or (each.node is not None and each.node.control_plane)


def _pool(each: RepairCandidate) -> str:
    if _control(each):
        return CONTROL_PLANE_POOL
    return pool_name(each.node) if each.node else GPU_POOL


def _name(each: RepairCandidate) -> str:
    return each.node.name if each.node else each.name


def _pools(candidates: Sequence[RepairCandidate], nodes: Sequence[Node]) -> dict[str, _Pool]:
    members: dict[str, dict[str, Node]] = {}
    for node in nodes:
        members.setdefault(pool_name(node), {})[node.name] = node
    for each in candidates:
        stand_in = Node(each.name, cordoned=bool(each.busy))
        members.setdefault(_pool(each), {}).setdefault(_name(each), each.node or stand_in)
    ill = {_name(each) for each in candidates if is_unhealthy(each.verdict)}
    return {
        pool: _Pool(
            pool,
            len(found),
            {name for name, node in found.items() if name in ill or not node.ready},
            {name for name, node in found.items() if not node.available},
        )
        for pool, found in members.items()
    }
