"""gpunodes autoscale up"""

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
    """Switch machines on when pods wait for them, and off when they are idle.

    For the pools of the setting gpunodes_pools that have a max. Kubernetes' cluster-autoscaler decides, and a power
    server beside it orders the machines' BMCs. Their passwords are stored in a Secret of the cluster. Run the same
    command again after a change of settings, of passwords or of machines. Machines that are off or in maintenance are
    passed over. Exit code 3 if a machine of the pools or a control plane does not respond: it is left as it was until
    the same command was run again.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.autoscale import commands
    from gpunodes.views import autoscale as view_of
    from gpunodes.views import text

    if not dry_run:
        terminal.check_confirmable("autoscale up", yes=yes)
    fleet = InventoryFleet(checked.inventory(inventory_path, checked.Needs.CLUSTER))
    report = rollout_options.lines()
    if not dry_run:
        terminal.confirm(
            "machines are switched off when they are idle, and the passwords of their BMCs are stored in the cluster",
            yes=yes,
        )
    view = text.progress()
    try:
        found = commands.up(fleet, view, report, dry_run=dry_run)
    finally:
        view.close()
    if as_json:
        terminal.echo(view_of.document_of(found))
    else:
        terminal.report(view_of.status(found))
    return ExitCode.PARTLY if found.left_out else ExitCode.DONE
