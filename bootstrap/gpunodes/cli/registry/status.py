"""gpunodes registry status"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode


@click.command()
@options.inventory_option
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Show the registry of the cluster.

    Its address and state, who may push and which namespaces may pull, where its images are, and when its certificate
    ends. The password is neither read nor shown.
    """
    from gpunodes.operations import checked
    from gpunodes.operations.registry_server import commands
    from gpunodes.views import registry as view_of

    found = commands.status(checked.inventory(inventory_path, checked.Needs.CLUSTER))
    if as_json:
        terminal.echo(view_of.dump_status(found))
    else:
        terminal.report(view_of.status(found))
    return ExitCode.FAILED if found.problem else ExitCode.DONE
