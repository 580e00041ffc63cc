"""Who is repaired now, who waits, who is refused, and why.

Pure: verdicts, nodes, history and limits in, decisions out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, State, Verdict

CONTROL_PLANE_POOL = "control-plane"
WORKER_POOL = "workers"
"""The pool of workers whose nodes carry no label of one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its cluster shows it."""

    name: str
    addresses: tuple[str, ...] = ()
    ready: bool = True
    boot_id: str = ""
    control_plane: bool = False
    pool: str = WORKER_POOL
    cordoned: bool = False
    cordoned_by_us: str = ""
    """The id of the repair that cordoned it, "" when we did not."""
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
    def expected(self) -> int | None:
        """GPUs that it is to offer when it is well: a device plugin that finds one ill may have let go of it."""
        return max((count for count in (self.capacity, self.labelled) if count is not None), default=None)


@dataclass(frozen=True, slots=True)
class Candidate:
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
    """Who repairs it now, "" when nobody does."""


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
class Limits:
    """What the user and the settings allow."""

    actions: frozenset[Action] = frozenset({Action.REBOOT})
    max_unavailable: Budget = Budget(1)
    sick_percent: int = 30
    """More of a pool than this sick at once: nothing is repaired there. One alone never counts as too many."""
    guard_repairs: int = 2
    guard_hours: float = 24.0
    by_hand: bool = False
    """The user asked for these machines, whatever their verdict: `gpunodes repair NAME`."""


class Ruling(StrEnum):
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
class Decision:
    """What is decided for one machine, and why."""

    machine: str
    ruling: Ruling
    why: str
    give_up: bool = False
    """It needs repair from now on: its node is to be marked."""


def decide(candidates: Sequence[Candidate], nodes: Sequence[Node], limits: Limits, now: float) -> list[Decision]:
    """A decision for each candidate, in the order in which they are to be repaired.

    ``nodes`` are all nodes of the cluster; where none is asked (``--without-cluster``) the candidates themselves are
    taken for the pool. ``now`` is in seconds since 1970.
    """
    pools = _pools(candidates, nodes)
    taken = {pool: _Pool(members) for pool, members in pools.items()}
    decisions = []
    for each in sorted(candidates, key=_order):
        ruling, why = _alone(each, limits, now)
        if ruling is Ruling.REPAIR:
            ruling, why = _together(each, candidates, taken, limits) or (ruling, why)
        if ruling is Ruling.REPAIR:
            taken[_pool(each)].start(each)
        # What asks for a repair and was not given up before has met the loop guard.
        guarded_now = each.verdict.action in limits.actions and not (limits.by_hand or _given_up(each))
        decisions.append(Decision(each.name, ruling, why, ruling is Ruling.NEEDS_REPAIR and guarded_now))
    return decisions


def guarded(repairs: Iterable[float], limits: Limits, now: float) -> int:
    """How many of these repairs count for the loop guard."""
    return sum(now - limits.guard_hours * 3600 < moment <= now for moment in repairs)


def sick(verdict: Verdict) -> bool:
    """Whether a machine counts among the sick of its pool: it asks for a reset or more, or cannot be reached."""
    return verdict.state is State.UNREACHABLE or verdict.action.rank >= Action.RESET_GPU.rank


def _order(each: Candidate) -> tuple[bool, bool, bool, int, str]:
    """Workers before control planes; what is lost already first, then what hangs, then the stronger action."""
    available = each.node is None or each.node.available
    return (_control(each), available, not each.verdict.hung_in_driver, -each.verdict.action.rank, each.name)


def _alone(each: Candidate, limits: Limits, now: float) -> tuple[Ruling, str]:
    """The decision that the machine's own state leads to."""
    verdict = each.verdict
    given_up = _given_up(each)
    past = guarded(
        {round(moment) for moment in (*each.repairs, *(each.node.repairs if each.node else ()))}, limits, now
    )
    asked = limits.by_hand or verdict.action in limits.actions
    answers = [
        (bool(each.busy), Ruling.REFUSE, f"it is being repaired: {each.busy}"),
        (
            bool(given_up) and (asked or sick(verdict)),
            Ruling.NEEDS_REPAIR,
            f"it was given up ({given_up}); `gpunodes uncordon {each.name}` allows repairs again",
        ),
        (
            verdict.action is Action.REPAIR and not limits.by_hand,
            Ruling.NEEDS_REPAIR,
            "its verdict asks for hands, not for a reboot",
        ),
        (
            verdict.state is State.UNREACHABLE and not limits.by_hand,
            Ruling.REFUSE,
            f"it cannot be reached, and nothing says it is sick; `gpunodes repair {each.name} --from bmc` resets it",
        ),
        (not asked, Ruling.NOTHING, f"its verdict asks for {_words(verdict.action)}"),
        (
            _control(each) and not each.named,
            Ruling.REFUSE,
            "it is a control-plane machine; such a machine is repaired only when it is named",
        ),
        (
            past >= limits.guard_repairs,
            Ruling.NEEDS_REPAIR,
            f"it was repaired {past} times in {limits.guard_hours:g} h and is sick again",
        ),
    ]
    for holds, ruling, why in answers:
        if holds:
            return ruling, why
    return Ruling.REPAIR, f"its verdict asks for {_words(verdict.action)}" if not limits.by_hand else "as asked"


def _given_up(each: Candidate) -> str:
    return each.needs_repair or (each.node.needs_repair if each.node else "")


def _words(action: Action) -> str:
    return "nothing" if action is Action.NONE else action.value


class _Pool:
    """The nodes of a pool, and what becomes of them by the decisions taken."""

    def __init__(self, members: Collection[Node]) -> None:
        self.size = len(members)
        self.lost = {node.name for node in members if not node.available}
        self.ours = {node.name for node in members if node.cordoned_by_us and not node.needs_repair}

    def start(self, each: Candidate) -> None:
        self.lost.add(_name(each))
        self.ours.add(_name(each))


def _together(
    each: Candidate, candidates: Sequence[Candidate], pools: dict[str, _Pool], limits: Limits
) -> tuple[Ruling, str] | None:
    """What the others of its pool make of a machine that is to be repaired; None when they let it."""
    name, pool = _name(each), pools[_pool(each)]
    ill = {_name(other) for other in candidates if _pool(other) == _pool(each) and sick(other.verdict)}
    if not limits.by_hand and len(ill) > 1 and len(ill) * 100 > limits.sick_percent * pool.size:
        return Ruling.REFUSE, (
            f"{len(ill)} of {pool.size} machines of pool {_pool(each)} are sick at once, more than "
            f"{limits.sick_percent} %: look for one cause (power, a switch, a driver roll-out); reboots do not cure it"
        )
    others = pool.lost - {name}
    if _control(each) and others:
        return Ruling.WAIT, f"{_some(others)} of the control plane is not available; never two at once"
    most = limits.max_unavailable.of(pool.size)
    # Repairing what is lost already costs the pool nothing; how many we repair at once stays bounded.
    counted = pool.ours - {name} if name in pool.lost else others
    if len(counted) + 1 > most:
        return Ruling.WAIT, f"{_some(counted)} of pool {_pool(each)} not available; at most {most} may be"
    return None


def _some(names: Collection[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")  # noqa: PLR2004 - three are named


def _control(each: Candidate) -> bool:
    return each.control_plane or (each.node is not None and each.node.control_plane)


def _pool(each: Candidate) -> str:
    if _control(each):
        return CONTROL_PLANE_POOL
    return each.node.pool if each.node else WORKER_POOL


def _name(each: Candidate) -> str:
    return each.node.name if each.node else each.name


def _pools(candidates: Sequence[Candidate], nodes: Sequence[Node]) -> dict[str, list[Node]]:
    pools: dict[str, dict[str, Node]] = {}
    for node in nodes:
        pool = CONTROL_PLANE_POOL if node.control_plane else node.pool
        pools.setdefault(pool, {})[node.name] = node
    for each in candidates:
        stand_in = Node(each.name, cordoned_by_us=each.busy, cordoned=bool(each.busy))
        pools.setdefault(_pool(each), {}).setdefault(_name(each), each.node or stand_in)
    return {pool: list(members.values()) for pool, members in pools.items()}
