"""gpunodes os upgrade"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option("--security", is_flag=True, help="Only packages with a security update.")
@click.option(
    "--reboot",
    type=click.Choice(["never", "if-needed"]),
    default="never",
    show_default=True,
    help="Whether a machine is rebooted when its kernel or a running service needs it.",
)
@rollout_options.rollout_options
@common.ansible_options
@options.json_option
def command(
    machines: tuple[str, ...],
    security: bool,
    reboot: str,
    rollout_flags: rollout_options.RolloutFlags,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Upgrade the packages of nodes, one node after the other.

    MACHINES are names, addresses, groups or patterns of the inventory. Each node is drained, upgraded, verified and
    given back. Packages that gpunodes installed stay as they are. A kernel for which the GPU driver does not build is
    held.

    Exit code 3 when it did not end well on all machines: `gpunodes rollout resume` continues.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.rolling import commands, upgrades

    terminal.check_confirmable("os upgrade", yes=rollout_flags.yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    fleet = InventoryFleet(inventory)
    chosen = rollout_options.select(inventory, machines, rollout_flags)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    rebooted = ", and rebooted if needed" if reboot == "if-needed" else ""
    terminal.confirm(f"{len(chosen)} nodes are drained, their packages upgraded{rebooted}", yes=rollout_flags.yes)
    work = upgrades.SystemUpgrade(inventory, security=security, reboot=reboot == "if-needed")
    done = commands.roll_out(fleet, chosen, work, wanted, report, "os upgrade")
    return rollout_options.show(done, as_json=as_json)
