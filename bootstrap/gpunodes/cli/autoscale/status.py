"""gpunodes autoscale status"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common
from gpunodes.errors import ExitCode


@click.command()
@common.ansible_options
@common.output_option
def command(inventory_path: Path, output: str) -> int:
    """Show the pools that scale, and what is done with each of their machines.

    Exit code 3 if the autoscaler does not run, or a machine failed.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.autoscale import commands
    from gpunodes.views import autoscale as view_of

    found = commands.status(InventoryFleet(checked.inventory(inventory_path, checked.Needs.CLUSTER)))
    common.show_output(output, lambda: view_of.document_of(found), lambda columns: view_of.status(found, columns))
    return ExitCode.DONE if found.healthy else ExitCode.PARTLY
