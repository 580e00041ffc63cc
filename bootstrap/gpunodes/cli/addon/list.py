"""gpunodes addon list"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common
from gpunodes.errors import ExitCode
from gpunodes.operations import addons, checked
from gpunodes.planner.addons import optional
from gpunodes.views import addons as view_of


@click.command()
@common.ansible_options
@common.output_option
def command(inventory_path: Path, output: str) -> int:
    """List the optional add-ons, and which are installed."""
    found = addons.listed(checked.inventory(inventory_path, checked.Needs.CLUSTER))
    known = optional()
    common.show_output(
        output, lambda: view_of.list_document(known, found), lambda columns: view_of.listing(known, found, columns)
    )
    return ExitCode.DONE
