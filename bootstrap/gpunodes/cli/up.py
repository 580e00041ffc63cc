"""gpunodes up"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common
from gpunodes.inventory import Inventory
from gpunodes.operations.up import OPERATION


@click.command()
@common.gpu_options
@common.reboot_option
@common.run_options(OPERATION)
def command(flags: common.CommonOptions, requested: Mapping[str, Any]) -> int:
    """Bring the whole inventory up: control plane and workers, prepared side by side."""
    inventory = Inventory(flags.inventory)
    inventory.control_plane()
    return common.execute(OPERATION, inventory, inventory.machines(), common.requesting(flags, requested))
