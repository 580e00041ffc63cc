"""What the commands that repair share: their options, the confirmation, and the display of the result.

Nothing heavy is imported here: `gpunodes health --from` must stay quick.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpunodes.cli import terminal
from gpunodes.errors import WrongInput

if TYPE_CHECKING:
    from gpunodes.engine.fleet import Fleet
    from gpunodes.inventory import Inventory
    from gpunodes.model import Machine
    from gpunodes.repair.request import RepairRequest
    from gpunodes.repair.result import RepairResult
    from gpunodes.views.repair import RepairLines

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """The options that every repair has."""

    dry_run: bool
    yes: bool
    max_unavailable: str | None
    force_drain: bool
    bug_report: bool
    without_cluster: bool

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in dataclasses.asdict(self).items() if value]


def options(command: _Command) -> _Command:
    """The options of every repair, passed as ``repair_flags``."""

    @click.option("--dry-run", is_flag=True, help="Show what would be repaired, how and why; change nothing.")
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    @click.option(
        "--max-unavailable",
        metavar="NUMBER|PERCENT",
        help="How many machines of a pool may be unavailable at once; by default the setting "
        "gpunodes_repair_max_unavailable.",
    )
    @click.option(
        "--force-drain",
        is_flag=True,
        help="Delete pods that do not end, regardless of disruption budgets; only on nodes that hang or are not ready.",
    )
    @click.option(
        "--bug-report", is_flag=True, help="Also save the report of nvidia-bug-report.sh as evidence; it takes minutes."
    )
    @click.option(
        "--without-cluster", is_flag=True, help="Repair machines without their cluster: no cordon, no drain, no Lease."
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        dry_run: bool,
        yes: bool,
        max_unavailable: str | None,
        force_drain: bool,
        bug_report: bool,
        without_cluster: bool,
        **kwargs: Any,
    ) -> Any:
        flags = RepairOptions(dry_run, yes, max_unavailable, force_drain, bug_report, without_cluster)
        return command(*args, repair_flags=flags, **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


def request(
    flags: RepairOptions,
    command: str,
    fleet: Fleet,
    patterns: Sequence[str],
    *,
    actions: str = "reboot",
    by_hand: bool = False,
    first: str = "",
    reason: str = "",
) -> RepairRequest:
    """The user's request, with the limits of the settings; raises WrongInput."""
    from gpunodes.operations.repair import commands
    from gpunodes.repair.request import RepairRequest

    limits = commands.limits(fleet.settings(), flags.max_unavailable, actions, by_hand=by_hand)
    return RepairRequest(
        command=command,
        limits=limits,
        named=frozenset(machine.name for machine in fleet.all_machines() if named(machine, patterns)),
        first=first,
        reason=reason,
        force_drain=flags.force_drain,
        bug_report=flags.bug_report,
        without_cluster=flags.without_cluster,
        dry_run=flags.dry_run,
    )


def carry_out(
    fleet: Fleet,
    machines: Sequence[Machine],
    request: RepairRequest,
    *,
    yes: bool,
    as_json: bool,
    ended: Callable[[RepairResult], None] | None = None,
) -> int:
    """Repair machines, after the plan and a confirmation; returns the exit code.

    ``ended`` is called with the result of a command that was not interrupted.
    """
    from gpunodes.operations.repair import commands
    from gpunodes.views import repair as views

    report = lines().report
    if not request.dry_run and not yes:
        terminal.check_confirmable(f"{request.command} of {', '.join(machine.name for machine in machines)}", yes=False)
        plan = commands.run(fleet, machines, dataclasses.replace(request, dry_run=True), report)
        terminal.report(views.summary(plan), err=True)
        names = [each.machine for each in plan.machines if each.decision in ("repair", "wait")]
        if names:
            terminal.confirm(f"{', '.join(names)} will be repaired as planned", yes=False)
        request = dataclasses.replace(request, confirmed=frozenset(names))
    result = commands.run(fleet, machines, request, report)
    if ended and not result.interrupted:
        ended(result)
    return show(result, as_json=as_json)


def show(result: RepairResult, *, as_json: bool) -> int:
    """Print the result of a repair; returns its exit code."""
    from gpunodes.views import document
    from gpunodes.views import repair as views

    if as_json:
        terminal.echo(document.dump(views.document(result)))
    else:
        terminal.report(views.summary(result))
    if result.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(result.exit_code)


def lines() -> RepairLines:
    """Progress, on standard error."""
    from gpunodes.views import repair as views

    return views.RepairLines(sys.stderr)


def one_machine(inventory: Inventory, name: str) -> Machine:
    """The one machine that ``name`` selects; raises WrongInput."""
    found = inventory.select([name])
    if len(found) != 1:
        raise WrongInput(f"{name!r} selects {len(found)} machines", "one", "name one machine")
    return found[0]


def named(machine: Machine, patterns: Sequence[str]) -> bool:
    """Whether a machine was named, and not only selected by a pattern or group."""
    return machine.name in patterns or machine.address in patterns
