"""gpunodes reset"""

from __future__ import annotations

import click

from gpunodes.cli import common
from gpunodes.inventory import Inventory
from gpunodes.operations.reset import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], yes: bool, flags: common.CommonOptions) -> int:
    """Bring machines back to what they were before us.

    MACHINES are names, addresses, groups or patterns of the inventory. A control plane's cluster is lost with it. Each
    machine's node is shown before anything is changed; it is not drained, which `gpunodes remove` does.
    """
    inventory = Inventory(flags.inventory)
    chosen = inventory.select(machines)
    question = "Reset {}? What Kubernetes keeps there is lost"
    # Where the cluster is broken, this is the way out.
    return common.execute_confirmed(OPERATION, inventory, chosen, flags, question, yes=yes, needs_cluster=False)
