"""gpunodes registry list"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode
from gpunodes.operations import checked, registries
from gpunodes.views import registries as view_of


@click.command()
@options.inventory_option
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """List the logins that gpunodes made.

    Passwords are neither read nor shown.
    """
    found = registries.logins(checked.inventory(inventory_path, checked.Needs.CLUSTER))
    if as_json:
        terminal.echo(view_of.dump(found))
    else:
        terminal.report(view_of.table(found, terminal.columns()))
    return ExitCode.DONE
