"""gpunodes addon verify"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, terminal
from gpunodes.errors import ExitCode


@click.command()
@click.argument("name", shell_complete=complete.addons)
@common.ansible_options
@options.json_option
def command(name: str, inventory_path: Path, as_json: bool) -> int:
    """Verify that an optional add-on runs and answers.

    It waits for that for gpunodes_ready_timeout, watches it for 20 seconds, and changes nothing.
    """
    from gpunodes.operations import addons, checked
    from gpunodes.planner.addons import chosen
    from gpunodes.views import addons as view_of

    addon = chosen(name)
    done = addons.verify(checked.inventory(inventory_path, checked.Needs.CLUSTER), addon)
    if as_json:
        terminal.echo(view_of.change_document(addon, done, dry_run=False))
    else:
        terminal.line(f"{addon.name}: {view_of.running(done)}")
    return ExitCode.DONE
