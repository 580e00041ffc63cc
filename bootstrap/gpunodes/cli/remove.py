"""gpunodes remove"""

from __future__ import annotations

import dataclasses

import click

from gpunodes.cli import common
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.operations.remove import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True)
@click.option(
    "--drain-timeout", type=click.IntRange(1), metavar="SECONDS", help="Most seconds to wait for pods to end."
)
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], drain_timeout: int | None, flags: common.Flags) -> int:
    """Empty a node, delete it from the cluster and reset its machine.

    MACHINES are names, addresses, groups or patterns of the inventory's workers.
    """
    inventory = Inventory(flags.inventory)
    chosen = inventory.select(machines, Role.WORKER)
    variables = {"gpunodes_drain_timeout": drain_timeout} if drain_timeout else {}
    options = dataclasses.replace(flags.options, variables=variables)
    return common.execute(OPERATION, inventory, chosen, dataclasses.replace(flags, options=options))
