"""gpunodes rollout resume"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, rollout_options


@click.command()
@options.inventory_option
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Continue an unfinished roll-out, on any controller.

    What is rolled out, to which machines and with which options stands in the cluster. Machines on which it failed, and
    those that were skipped, are tried again. What follows in an upgrade of Kubernetes is done, too.

    Exit code 3 when it did not end well on all machines.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.rolling import following

    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    results = following.resume(InventoryFleet(inventory), rollout_options.lines())
    if as_json and len(results) == 1:
        return rollout_options.show(results[0], as_json=as_json)
    return rollout_options.show_all(results, as_json=as_json)
