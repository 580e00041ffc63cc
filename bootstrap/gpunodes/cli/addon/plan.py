"""gpunodes addon plan"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common
from gpunodes.errors import ExitCode
from gpunodes.operations import addons, checked
from gpunodes.views import addons as view_of


@click.command()
@common.ansible_options
@common.output_option
def command(inventory_path: Path, output: str) -> int:
    """Show which images the add-ons run, and which this gpunodes has; nothing is changed.

    The image of the device plugin is the setting gpunodes_device_plugin_image. What is not installed is left out.
    """
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    found = addons.plan(inventory)
    common.show_output(output, lambda: view_of.plan_document(found), lambda columns: view_of.plan(found, columns))
    return ExitCode.DONE
