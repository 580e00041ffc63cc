"""gpunodes rollout apply"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal
from gpunodes.errors import ExitCode, WrongInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpunodes.inventory import Inventory
    from gpunodes.planner.drift import MachineDrift


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@click.option("--kubelets", is_flag=True, help="The settings of kubelets instead, on control planes and workers.")
@click.option("--dry-run", is_flag=True, help="Show what differs; change nothing.")
@rollout_options.rollout_options
@common.ansible_options
@options.json_option
def command(
    machines: tuple[str, ...],
    kubelets: bool,
    dry_run: bool,
    rollout_flags: rollout_options.RolloutFlags,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Apply changed settings to control planes, or with --kubelets to kubelets, one node after the other.

    MACHINES are names, addresses, groups or patterns of the inventory; by default all. What differs from the settings
    is shown first. Nothing is drained.

    On control planes what was edited by hand is overwritten, and the static pods that differ are restarted one at a
    time. If one does not become healthy, the control plane gets its earlier settings back. Kubelets get their feature
    gates and limits, and are restarted; if a node is not ready afterwards, the roll-out stops.

    Exit code 3 when it did not end well on all machines: `gpunodes rollout resume` continues.
    """
    from gpunodes.operations import checked, drift

    if not dry_run:
        terminal.check_confirmable(drift.COMMAND, yes=rollout_flags.yes)
    _check(rollout_flags, kubelets=kubelets)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    run = _kubelets if kubelets else _control_planes
    return run(inventory, machines, rollout_flags, dry_run=dry_run, as_json=as_json)


def _check(flags: rollout_options.RolloutFlags, *, kubelets: bool) -> None:
    """Raise WrongInput for options that would have no effect."""
    if flags.wait_for_jobs:
        raise WrongInput("--wait-for-jobs waits before a drain", "a roll-out that drains nodes", "leave it out")
    if flags.changes and not kubelets:
        raise WrongInput(
            "control planes get their settings one at a time, without canaries and budgets",
            "names of MACHINES alone",
            "leave the other options out, or add --kubelets",
        )


def _control_planes(
    inventory: Inventory,
    patterns: Sequence[str],
    flags: rollout_options.RolloutFlags,
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.model import Role
    from gpunodes.operations import drift
    from gpunodes.views import text

    chosen = inventory.select(patterns, Role.CONTROL_PLANE)
    drift.check_same(inventory)
    view = text.progress()
    try:
        found = drift.read(inventory, chosen, view)
    finally:
        view.close()
    if dry_run:
        _show(found, "the control planes have their settings", as_json=as_json)
        return ExitCode.FAILED if any(each.problem for each in found) else ExitCode.DONE
    _show(found, "the control planes have their settings", err=True)
    fleet = InventoryFleet(inventory)
    wanted = rollout_options.request(flags, fleet.settings())
    pending = [each.machine for each in found if each.pending and not each.problem]
    if pending:
        terminal.confirm(
            f"{len(pending)} control planes get their settings, and the static pods that differ are restarted one at a "
            "time",
            yes=flags.yes,
        )
    done = drift.roll_out(fleet, chosen, found, wanted, rollout_options.lines())
    return rollout_options.show(done, as_json=as_json)


def _kubelets(
    inventory: Inventory,
    patterns: Sequence[str],
    flags: rollout_options.RolloutFlags,
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import drift
    from gpunodes.views import text

    chosen = rollout_options.select(inventory, patterns, flags)
    fleet, report = InventoryFleet(inventory), rollout_options.lines()
    wanted = rollout_options.request(flags, fleet.settings())
    if not dry_run:
        rollout_options.wake(fleet, chosen, flags, report)
    view = text.progress()
    try:
        found = drift.read_kubelets(inventory, chosen, view)
    finally:
        view.close()
    if dry_run:
        _show(found, "the kubelets have their settings", as_json=as_json)
        return ExitCode.FAILED if any(each.problem for each in found) else ExitCode.DONE
    _show(found, "the kubelets have their settings", err=True)
    if pending := sum(not each.problem for each in found):
        terminal.confirm(f"{pending} kubelets get their settings, and are restarted; pods stay", yes=flags.yes)
    done = drift.roll_out_kubelets(fleet, chosen, found, wanted, report)
    return rollout_options.show(done, as_json=as_json)


def _show(found: Sequence[MachineDrift], none: str, *, as_json: bool = False, err: bool = False) -> None:
    from gpunodes.views import drift as view_of

    if as_json:
        terminal.echo(view_of.document_of(found))
    else:
        terminal.report(view_of.lines(found) or none, err=err)
