"""gpunodes rollout apply"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal
from gpunodes.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpunodes.inventory import Inventory
    from gpunodes.model import Machine
    from gpunodes.planner.drift import MachineDrift


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@click.option("--dry-run", is_flag=True, help="Show what differs; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.ansible_options
@options.json_option
def command(machines: tuple[str, ...], dry_run: bool, yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Apply changed settings to control planes, one after the other.

    MACHINES are names, addresses, groups or patterns of the inventory's control planes; by default all. What differs
    from the settings is shown first; what was edited by hand is overwritten. Nothing is drained; the static pods that
    differ are restarted one at a time. If one does not become healthy, the control plane gets its earlier settings
    back.

    Exit code 3 when it did not end well on all machines: `gpunodes rollout resume` continues.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.model import Role
    from gpunodes.operations import checked, drift
    from gpunodes.views import drift as view_of

    if not dry_run:
        terminal.check_confirmable(drift.COMMAND, yes=yes)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    chosen = inventory.select(machines, Role.CONTROL_PLANE)
    drift.check_same(inventory)
    found = _read(inventory, chosen)
    shown = view_of.lines(found) or "the control planes have their settings"
    if dry_run:
        terminal.echo(view_of.document_of(found)) if as_json else terminal.report(shown)
        return ExitCode.FAILED if any(each.problem for each in found) else ExitCode.DONE
    terminal.report(shown, err=True)
    fleet = InventoryFleet(inventory)
    wanted = rollout_options.request(rollout_options.RolloutFlags(yes=yes), fleet.settings())
    pending = [each.machine for each in found if each.pending and not each.problem]
    if pending:
        terminal.confirm(
            f"{len(pending)} control planes get their settings, and the static pods that differ are restarted one at a "
            "time",
            yes=yes,
        )
    done = drift.roll_out(fleet, chosen, found, wanted, rollout_options.lines())
    return rollout_options.show(done, as_json=as_json)


def _read(inventory: Inventory, machines: Sequence[Machine]) -> list[MachineDrift]:
    from gpunodes.operations import drift
    from gpunodes.views import text

    view = text.progress()
    try:
        return drift.read(inventory, machines, view)
    finally:
        view.close()
