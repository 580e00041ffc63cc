"""gpunodes rollout status"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, rollout_options, terminal
from gpunodes.errors import ExitCode


@click.command()
@options.inventory_option
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Show the cluster's roll-out: what, by whom, how far, and what comes next.

    It is read from the cluster; the controller that began it also shows stages of machines whose API was away.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.rolling import status
    from gpunodes.views import document
    from gpunodes.views import rollout as views

    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    found = status.read(InventoryFleet(inventory), rollout_options.lines())
    if as_json:
        terminal.echo(document.dump(views.status_document(found)))
    else:
        terminal.report(views.status(found))
    return ExitCode.DONE
