"""gpunodes up"""

from __future__ import annotations

import click

from gpunodes.cli import common
from gpunodes.inventory import Inventory
from gpunodes.operations.up import OPERATION


@click.command()
@common.run_options(OPERATION)
def command(flags: common.Flags) -> int:
    """Bring the whole inventory up: control plane and workers, prepared side by side."""
    inventory = Inventory(flags.inventory)
    inventory.control_plane()
    return common.execute(OPERATION, inventory, inventory.machines(), flags)
