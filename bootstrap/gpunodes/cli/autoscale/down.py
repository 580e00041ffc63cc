"""gpunodes autoscale down"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, options, rollout_options, terminal
from gpunodes.errors import ExitCode


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.ansible_options
@options.json_option
def command(yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Remove the autoscaler; machines stay as they are.

    The passwords of BMCs are removed from the cluster. A machine that is off comes back by `gpunodes power NAME on` and
    `gpunodes join NAME`.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.autoscale import commands
    from gpunodes.views import autoscale as view_of

    terminal.check_confirmable("autoscale down", yes=yes)
    fleet = InventoryFleet(checked.inventory(inventory_path, checked.Needs.CLUSTER))
    terminal.confirm("machines that are off stay off", yes=yes)
    before = commands.down(fleet, rollout_options.lines())
    off = [each.node for each in before.machines if each.phase != "on"]
    if as_json:
        terminal.echo(view_of.document_of(before))
    else:
        terminal.line(f"removed; not on: {', '.join(off)}" if off else "removed")
    return ExitCode.DONE
