"""gpunodes addon up"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal
from gpunodes.errors import ExitCode


@click.command()
@click.argument("name", shell_complete=complete.addons)
@click.option(
    "--manifest",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The objects of an add-on that gpunodes has no objects of, as its publisher offers them.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be changed; change nothing.")
@common.ansible_options
@options.json_option
def command(name: str, manifest: Path | None, dry_run: bool, inventory_path: Path, as_json: bool) -> int:
    """Install an optional add-on, and wait until it runs.

    NAME is one of `gpunodes addon list`. A second run changes nothing. Objects of the same names that gpunodes did
    not make are never changed: the command ends before it changes anything.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import addons, checked
    from gpunodes.planner.addons import chosen
    from gpunodes.views import addons as view_of

    addon = chosen(name)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    done = addons.up(InventoryFleet(inventory), inventory, addon, manifest, rollout_options.lines(), dry_run=dry_run)
    if as_json:
        terminal.echo(view_of.change_document(addon, done, dry_run=dry_run))
    else:
        terminal.echo(view_of.change(addon, done, view_of.running(done), dry_run=dry_run))
    return ExitCode.DONE
