"""gpunodes autoscale down"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, options, rollout_options, terminal
from gpunodes.errors import ExitCode


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be changed; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.ansible_options
@options.json_option
def command(dry_run: bool, yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Remove the autoscaler; no machine is switched on or off.

    The passwords of BMCs are removed from the cluster. Ready nodes lose the taints that only the autoscaler would
    remove. A machine that is off comes back by `gpunodes power NAME on` and `gpunodes join NAME`. After an
    interruption, and while a machine counts as off, the same command may be run again. Exit code 3 if a control plane
    does not respond: its image stays until the same command was run again.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.autoscale import commands
    from gpunodes.views import autoscale as view_of

    if not dry_run:
        terminal.check_confirmable("autoscale down", yes=yes)
    fleet = InventoryFleet(checked.inventory(inventory_path, checked.Needs.CLUSTER))
    if not dry_run:
        terminal.confirm("machines that are off stay off", yes=yes)
    before = commands.down(fleet, rollout_options.lines(), dry_run=dry_run)
    if as_json:
        terminal.echo(view_of.document_of(before))
    else:
        terminal.report(view_of.status(before) if dry_run else view_of.removed(before))
    return ExitCode.PARTLY if before.left_out else ExitCode.DONE
