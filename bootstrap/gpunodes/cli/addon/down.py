"""gpunodes addon down"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal
from gpunodes.errors import ExitCode


@click.command()
@click.argument("name", shell_complete=complete.addons)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.ansible_options
@options.json_option
def command(name: str, dry_run: bool, yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Remove an optional add-on.

    Exactly the objects that `gpunodes addon up` made are deleted. The command refuses while the add-on is in use, such
    as by volumes that it made.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import addons, checked
    from gpunodes.planner.addons import chosen
    from gpunodes.views import addons as view_of

    addon = chosen(name)
    if not dry_run:
        terminal.check_confirmable("addon down", yes=yes)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    if not dry_run:
        terminal.confirm(f"all objects of {addon.name} are deleted", yes=yes)
    done = addons.down(InventoryFleet(inventory), inventory, addon, rollout_options.lines(), dry_run=dry_run)
    if as_json:
        terminal.echo(view_of.change_document(addon, done, dry_run=dry_run))
    else:
        terminal.echo(view_of.change(addon, done, "removed", dry_run=dry_run))
    return ExitCode.DONE
