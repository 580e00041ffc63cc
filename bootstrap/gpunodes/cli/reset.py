"""gpunodes reset"""

from __future__ import annotations

import sys

import click

from gpunodes.cli import common, terminal
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations.reset import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], yes: bool, flags: common.Flags) -> int:
    """Bring machines back to what they were before us.

    MACHINES are names, addresses, groups or patterns of the inventory. A control plane's cluster is lost with it.
    """
    inventory = Inventory(flags.inventory)
    chosen = inventory.select(machines)
    names = ", ".join(machine.name for machine in chosen)
    if not yes and not flags.options.dry_run:
        if not sys.stdin.isatty():
            raise WrongInput(f"reset of {names} is not confirmed", "a yes", "add --yes where nobody can be asked")
        terminal.confirm(f"Reset {names}? What Kubernetes keeps there is lost")
    return common.execute(OPERATION, inventory, chosen, flags)
