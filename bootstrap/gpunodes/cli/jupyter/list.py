"""gpunodes jupyter list"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode


@click.command()
@options.inventory_option
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """List the notebooks of the cluster.

    Tokens are neither read nor shown.
    """
    from gpunodes.operations import checked, notebooks
    from gpunodes.views import notebooks as view_of

    with notebooks.connected(checked.inventory(inventory_path, checked.Needs.CLUSTER)) as api:
        found = notebooks.listed(api)
    if as_json:
        terminal.echo(view_of.dump_list(found))
    else:
        terminal.report(view_of.table(found, terminal.columns()))
    return ExitCode.DONE
