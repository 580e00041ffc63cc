"""gpunodes power"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, repair_options
from gpunodes.errors import ExitCode

_ACTIONS = ("status", "on", "off", "cycle")


@click.command()
@click.argument("machine")
@click.argument("action", type=click.Choice(_ACTIONS))
@click.option("--yes", is_flag=True, help="Do not ask.")
@common.inventory_option
@common.json_option
def command(machine: str, action: str, yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Switch a machine on or off by its BMC, or say whether it is on.

    MACHINE is a name or address of the inventory. A cycle takes its power away and gives it back. Nothing is asked of
    the machine's own system, and its node is not emptied: `gpunodes repair` does that.
    """
    import dataclasses

    from gpunodes.inventory import Inventory
    from gpunodes.operations import power
    from gpunodes.operations.repair import World
    from gpunodes.views import document

    inventory = Inventory(inventory_path)
    chosen = repair_options.one_machine(inventory, machine)
    if action in {"off", "cycle"}:
        repair_options.confirm(f"Take the power of {chosen.name} away", yes=yes)
    done = power.power(World(inventory), chosen, power.Action(action))
    if as_json:
        click.echo(document.dump({"schema": "gpunodes.power/1", **dataclasses.asdict(done)}))
    else:
        click.echo(f"{done.machine}: {done.state} ({done.bmc})")
    return ExitCode.DONE
