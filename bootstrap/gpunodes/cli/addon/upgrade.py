"""gpunodes addon upgrade"""

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
    """Bring the network add-on and the device plugin to the versions of this gpunodes.

    Their pods are replaced: those of the device plugin on one node after the other, those of the network add-on on all
    nodes at once. Pods of users keep running. It waits until they run on each node, and until each node offers as many
    GPUs as before. Otherwise the earlier add-on is applied again. `gpunodes upgrade` does the same at its end.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import addons, checked
    from gpunodes.views import addons as view_of

    terminal.check_confirmable("addon upgrade", yes=yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    before = addons.plan(inventory)
    terminal.report(view_of.plan(before), err=True)
    needed = [each.name for each in before if each.needed]
    if needed:
        terminal.confirm(f"the pods of {' and '.join(needed)} are replaced", yes=yes)
        addons.upgrade(InventoryFleet(inventory), inventory, report)
    after = addons.plan(inventory) if needed else before
    if as_json:
        terminal.echo(view_of.plan_document(after))
    elif needed:
        terminal.line(f"updated: {', '.join(needed)}")
    return ExitCode.DONE
