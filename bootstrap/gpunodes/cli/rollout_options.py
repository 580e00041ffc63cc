"""What the commands that roll something out share: their options, and the display of the result.

Nothing heavy is imported here, so that `--help` stays quick.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpunodes.cli import complete, options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.rollout.options import MOST_CANARIES

if TYPE_CHECKING:
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.inventory import Inventory
    from gpunodes.model import Machine
    from gpunodes.operations.rolling.context import Report
    from gpunodes.rollout.options import RolloutOptions
    from gpunodes.rollout.result import RolloutResult

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RolloutFlags:
    """The options that every roll-out has, as they were typed."""

    max_unavailable: str | None = None
    canary: int = 0
    soak: str | None = None
    wait_for_jobs: str | None = None
    only: tuple[str, ...] = ()
    yes: bool = False
    wake: bool = False

    @property
    def changes(self) -> bool:
        """Whether an option says how to roll out: a roll-out that is resumed keeps those that it began with."""
        return bool(self.max_unavailable or self.canary or self.soak or self.wait_for_jobs or self.only or self.wake)


# Long: one decorator for each option.
def rollout_options(command: _Command) -> _Command:
    """The options of every command that rolls something out, passed as ``rollout_flags``."""

    @click.option(
        "--max-unavailable",
        metavar="NUMBER|PERCENT",
        help="How many nodes of a pool may be unavailable at once; by default the setting "
        "gpunodes_rollout_max_unavailable.",
    )
    @click.option(
        "--canary",
        type=options.Whole(1, MOST_CANARIES),
        metavar="NUMBER",
        help="So many workers first; the others follow when these stayed healthy.",
    )
    @click.option("--soak", metavar="TIME", help="How long the canaries must stay healthy: 10m, 2h; by default 10m.")
    @click.option(
        "--wait-for-jobs",
        metavar="TIME",
        help="Let pods of Jobs on a cordoned node end by themselves, at most so long: 2h, 1d12h.",
    )
    @click.option(
        "--only",
        multiple=True,
        metavar="GROUP",
        shell_complete=complete.machines,
        help="Only machines of this group, or of this pattern of the inventory; may be repeated.",
    )
    @click.option(
        "--wake",
        is_flag=True,
        help="First switch on those of the machines that are off on purpose; without it they are skipped.",
    )
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        max_unavailable: str | None,
        canary: int | None,
        soak: str | None,
        wait_for_jobs: str | None,
        only: tuple[str, ...],
        yes: bool,
        wake: bool,
        **kwargs: Any,
    ) -> Any:
        flags = RolloutFlags(max_unavailable, canary or 0, soak, wait_for_jobs, only, yes, wake)
        if soak and not canary:
            raise WrongInput("--soak has no canary to watch", "--canary with it", "add --canary 1")
        return command(*args, rollout_flags=flags, **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


_SOAK = "10m"


def request(flags: RolloutFlags, settings: Mapping[str, Any]) -> RolloutOptions:
    """The options of a roll-out by the user and the cluster-wide settings; raises WrongInput."""
    from gpunodes.repair import policy
    from gpunodes.rollout import times
    from gpunodes.rollout.options import RolloutOptions

    return RolloutOptions(
        max_unavailable=policy.budget(str(flags.max_unavailable or settings["gpunodes_rollout_max_unavailable"])),
        canary=flags.canary,
        soak_s=times.duration(flags.soak or _SOAK) if flags.canary else 0.0,
        windows=tuple(times.window(each) for each in settings["gpunodes_rollout_windows"]),
        wait_for_jobs_s=times.duration(flags.wait_for_jobs) if flags.wait_for_jobs else 0.0,
    )


def select(inventory: Inventory, patterns: Sequence[str], flags: RolloutFlags) -> list[Machine]:
    """The machines of ``patterns`` (by default all nodes' machines) that are in one of --only; raises WrongInput."""
    from gpunodes.model import Role

    chosen = inventory.select(patterns, Role.CONTROL_PLANE, Role.WORKER)
    if not flags.only:
        return chosen
    wanted = {machine.name for machine in inventory.select(flags.only, Role.CONTROL_PLANE, Role.WORKER)}
    found = [machine for machine in chosen if machine.name in wanted]
    if not found:
        raise WrongInput("--only leaves no machine", "at least one", "correct the pattern or --only")
    return found


def wake(
    fleet: InventoryFleet,
    machines: Sequence[Machine],
    flags: RolloutFlags,
    report: Report,
    check: Callable[[], object] = lambda: None,
) -> None:
    """With --wake, switch on those of ``machines`` that are off on purpose; one that does not start is skipped later.

    Before the machines are read: what a roll-out does to them is planned from that. No machine is switched on for a
    roll-out that is refused: another one is unfinished, or ``check``, with the machines that are on, raises.
    """
    if not flags.wake:
        return
    from gpunodes.operations import waking
    from gpunodes.operations.rolling import commands

    if not (off := waking.asleep(fleet, machines)):
        report("", "none of the machines is off on purpose")
        return
    commands.check_free(fleet, report)
    check()
    names = ", ".join(machine.name for machine in off)
    terminal.confirm(f"{len(off)} machines are switched on: {names}", yes=flags.yes)
    waking.wake(fleet, off, report)


def show(result: RolloutResult, *, as_json: bool) -> int:
    """Print the result of a roll-out; returns its exit code."""
    from gpunodes.views import document
    from gpunodes.views import rollout as views

    if as_json:
        terminal.echo(document.dump(views.document(result)))
    else:
        terminal.report(views.summary(result))
    if result.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(result.exit_code)


def show_all(results: Sequence[RolloutResult], *, as_json: bool, none: str = "") -> int:
    """Print the results of a roll-out of several parts; returns the exit code. ``none``: what to say without any."""
    from gpunodes.rollout.state import ADDONS
    from gpunodes.views import document
    from gpunodes.views import rollout as views

    code = next((result.exit_code for result in results if result.exit_code is not ExitCode.DONE), ExitCode.DONE)
    if as_json:
        rollouts = [views.document(result) for result in results]
        terminal.echo(document.dump({"schema": "gpunodes.upgrade/1", "exit_code": int(code), "rollouts": rollouts}))
        return int(code)
    for result in results:
        if result.work == ADDONS:
            terminal.report("add-ons: updated")
        else:
            show(result, as_json=False)
    if not results and none:
        terminal.line(none)
    return int(code)


def lines() -> Report:
    """Progress, on standard error."""
    from gpunodes.views import repair as views

    return views.RepairLines(sys.stderr).report
