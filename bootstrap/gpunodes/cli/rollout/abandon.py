"""gpunodes rollout abandon"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, rollout_options, terminal


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.inventory_option
@options.json_option
def command(yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Give the nodes of an unfinished roll-out back, and forget it.

    A node on which the work was begun is given back if it is healthy; otherwise it is marked as needing repair, until
    `gpunodes uncordon`. Nothing that was applied is taken back.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.rolling import abandon

    terminal.check_confirmable("rollout abandon", yes=yes)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    terminal.confirm("the nodes of the unfinished roll-out are given back as they are, and it is forgotten", yes=yes)
    return rollout_options.show(abandon.abandon(InventoryFleet(inventory), rollout_options.lines()), as_json=as_json)
