"""The commands that begin or resume a roll-out, from its lock to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpunodes.engine.fleet import Fleet
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.holders import user_at_host
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine, Role
from gpunodes.operations.rolling import context, works
from gpunodes.operations.rolling.context import Report, RolloutCommand
from gpunodes.operations.rolling.engine import Engine
from gpunodes.operations.rolling.work import Work
from gpunodes.rollout import state
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.result import RolloutResult
from gpunodes.rollout.state import Following, Rollout

LastParts = Mapping[str, Callable[[RolloutCommand], None]]
"""What can follow a roll-out and concerns no single machine, by its name in records; raises GpunodesError."""


def roll_out(
    fleet: Fleet,
    machines: Sequence[Machine],
    work: Work,
    options: RolloutOptions,
    report: Report,
    command: str,
    then: Sequence[Following] = (),
) -> RolloutResult:
    """Roll a work out to ``machines``; returns when it has ended on all, or no further machine can be begun.

    ``command`` is the command as it is typed. If it ends well, the record of the first of ``then`` replaces its own,
    for ``resume`` (``following.py``). Raises GpunodesError before anything is changed: if another roll-out runs
    or is unfinished, the control plane does not respond, or the record is too long.
    """
    with context.opened(fleet, command, report) as opened, locked(opened) as text:
        check_finished(text)
        order = _ordered(machines)
        rollout = Rollout(
            id=context.new_id(work.name),
            work=work.name,
            parameters=dict(work.parameters),
            options=options,
            started=float(int(opened.now())),
            by=user_at_host(),
            waiting=[machine.name for machine in order],
            then=then,
        )
        return Engine(opened, work, rollout).run()


def resume(
    fleet: Fleet, report: Report, command: str = "rollout resume", last: LastParts | None = None
) -> RolloutResult:
    """Go on with the roll-out that stands in the cluster; raises as ``roll_out``, and WrongInput if there is none."""
    with context.opened(fleet, command, report) as opened, locked(opened) as text:
        rollout = recorded(text)
        if last and rollout.work in last:
            last[rollout.work](opened)
            opened.leases.release_rollout(keep=False)
            return RolloutResult(rollout.id, rollout.work, [])
        work = works.make(fleet, rollout.work, rollout.parameters)
        order = [machine.name for machine in _ordered(list(opened.machines.values()))]
        gone = [name for name in rollout.machines if name not in opened.machines and name not in rollout.done]
        if gone:
            raise WrongInput(
                f"{state.names(gone)} of the roll-out are not in the inventory",
                "an inventory with all of its machines",
                "add them, or forget the roll-out: `gpunodes rollout abandon`",
            )
        report("", f"resuming the roll-out {rollout.id} of {rollout.work}")
        return Engine(opened, work, rollout.resumed(order)).run(resumed=True)


def recorded(text: str) -> Rollout:
    """The roll-out that a record describes; raises WrongInput without a valid one."""
    if not text:
        raise WrongInput("no roll-out is unfinished", "one", "begin one; `gpunodes rollout status` shows it")
    try:
        return state.parse(text)
    except ValueError as error:
        raise WrongInput(str(error), "a record of this version", "`gpunodes rollout abandon` removes it") from error


@contextlib.contextmanager
def locked(command: RolloutCommand) -> Iterator[str]:
    """Hold the lock of the cluster's roll-out while inside; yields the record of an unfinished one. Raises Held."""
    text = command.leases.take_rollout()
    try:
        yield text
    finally:
        # The command that wrote a record has removed it if nothing is left; one that was only found stays.
        with contextlib.suppress(GpunodesError):
            command.leases.release_rollout(keep=True)


def check_finished(text: str) -> None:
    """Raise WrongInput if ``text`` is the record of an unfinished roll-out; "" is none."""
    if not text:
        return
    what = "a roll-out with an unreadable record"
    with contextlib.suppress(ValueError):
        found = state.parse(text)
        what = f"the roll-out {found.id} of {found.work} by {found.by}"
    raise WrongInput(
        f"{what} is unfinished",
        "one roll-out at a time",
        "`gpunodes rollout resume` continues it, `gpunodes rollout abandon` gives its nodes back and forgets it",
    )


def check_free(fleet: Fleet, report: Report) -> None:
    """Raise as ``roll_out`` if another roll-out runs or is unfinished, without taking the lock."""
    with context.opened(fleet, "rollout status", report) as opened:
        seen = opened.leases.observe_rollout()
    if seen and seen.live:
        raise Held("the roll-out of this cluster", seen.holder, seen.since)
    check_finished(seen.record if seen else "")


def _ordered(machines: Sequence[Machine]) -> list[Machine]:
    return sorted(machines, key=lambda machine: machine.role is not Role.CONTROL_PLANE)
