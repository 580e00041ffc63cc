"""gpunodes gpu burn-in"""

from __future__ import annotations

import click

from gpunodes.cli import common, complete
from gpunodes.operations import checked
from gpunodes.operations.burn_in import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option(
    "--level",
    type=click.Choice(["1", "2", "3", "4"]),
    help="Level of DCGM's diagnostics; by default the setting gpunodes_burn_in_level.",
)
@click.option("--drain", is_flag=True, help="Evict pods that use the GPUs, within their disruption budgets.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], level: str | None, drain: bool, flags: common.CommonOptions) -> int:
    """Test the GPUs of machines before they take work.

    MACHINES are names, addresses, groups or patterns of the inventory. A node has the taint gpunodes.dev/burn-in until
    its GPUs have passed; a failed burn-in leaves it. The test is `dcgmi diag` where DCGM is installed, else a CUDA
    program on each GPU, then NCCL between the nodes if gpunodes_burn_in_nccl_image is set. A node whose GPUs are in
    use is refused. `gpunodes history` shows the results.
    """
    inventory = checked.inventory(flags.inventory)
    requested = {"burn_in_drain": drain, **({"gpunodes_burn_in_level": int(level)} if level else {})}
    return common.execute(OPERATION, inventory, inventory.select(machines), common.requesting(flags, requested))
