"""gpunodes power"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunodes.cli import bmc_settings, complete, connections, options, repair_options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.model import Kubeconfig, Machine

if TYPE_CHECKING:
    from gpunodes.inventory import Inventory
    from gpunodes.operations.power import PowerResult

_ACTIONS = ("status", "on", "off", "cycle", "rotate-password")


@click.command()
@click.argument("machine", shell_complete=complete.machines)
@click.argument("action", type=click.Choice(_ACTIONS))
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="For rotate-password: file of the new password. If it does not exist, it is made with a random one.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="For off: drain the node and shut the system down first. The node is in maintenance until on --wait.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="For on: wait until the node is ready with its GPUs, then end that maintenance. A machine that never joined: "
    "wait until it responds over SSH.",
)
@click.option(
    "--bmc",
    "bmc",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting gpunodes_bmc_NAME of a machine that is given by its address; repeatable.",
)
@connections.options
@options.kubeconfig_option
@options.inventory_option
@options.json_option
def command(
    machine: str,
    action: str,
    yes: bool,
    password_file: Path | None,
    drain: bool,
    wait: bool,
    bmc: tuple[str, ...],
    connection: connections.Connection,
    kubeconfig: Kubeconfig | None,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Show a machine's power state, switch it through its BMC, or change the BMC's password.

    MACHINE is a name or address of the inventory. Without --drain the operating system is not shut down first, and the
    node is not drained. A machine without a BMC, which Wake-on-LAN switches on, is always shut down, and cannot be
    cycled. Nothing is switched if the BMC reports the UUID, serial number or MAC addresses of another machine; status
    shows what both report.

    A worker that is not needed: `gpunodes power worker-3 off --drain`, later `gpunodes power worker-3 on --wait`. In
    between no repair switches it on.

    Without an inventory: `gpunodes power 10.0.0.5 status --bmc type=redfish --bmc address=10.0.9.5 --bmc user=admin`.
    The password is asked for, unless GPUNODES_BMC_PASSWORD has it. MACHINE is then an address, as with --user, --key or
    --port.

    rotate-password gives the BMC's user the password in --password-file, and verifies it. Then put it into the
    inventory. Run it again after an interruption: it continues with the same file.
    """
    import dataclasses

    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import bmc_password, checked, power, switching
    from gpunodes.operations.storage import findings
    from gpunodes.views import document

    _check_file(action, password_file)
    _check_flags(action, drain=drain, wait=wait)

    given = bmc_settings.parsed(bmc)
    inventory, addressed = connections.inventory(
        inventory_path, [machine], connection, checked.Needs.MACHINES, kubeconfig, given
    )
    _check_cluster(known=bool(kubeconfig) or not addressed, drain=drain, wait=wait)
    chosen = repair_options.one_machine(inventory, machine)
    if drain:
        findings.check_leaving(inventory, [chosen])
    if action in {"off", "cycle"}:
        terminal.check_confirmable(f"power {action} of {chosen.name}", yes=yes)
        terminal.confirm(
            f"The power of {chosen.name} is switched off, {_consequence(inventory, chosen, drain=drain)}", yes=yes
        )
    fleet, asked, report = InventoryFleet(inventory), power.PowerAction(action), repair_options.lines().report
    named = repair_options.named(chosen, [machine])
    if password_file:
        done = bmc_password.rotate(fleet, chosen, password_file, named=named, report=report)
    elif drain or wait:
        done = (switching.off if drain else switching.on)(fleet, chosen, report, named=named)
    else:
        done = power.power(fleet, chosen, asked, named=named, report=report)
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.power/1", **dataclasses.asdict(done)}))
    else:
        _show(done)
    return ExitCode.DONE


def _consequence(inventory: Inventory, machine: Machine, *, drain: bool) -> str:
    """How the machine is switched off, and what that stops on others."""
    from gpunodes.operations import power
    from gpunodes.operations.storage import findings

    how = "by a shutdown" if power.only_wakes(inventory, machine) else "without a shutdown of its system"
    how = "after its node was drained" if drain else how
    if shares := findings.shares_lost(inventory, [machine]):
        how += f"; programs on other nodes that use {', '.join(shares)} hang until it is on again"
    return how


def _show(done: PowerResult) -> None:
    terminal.line(f"{done.machine}: {done.state} ({done.bmc})")
    if done.waited:
        what = {"node": "its node is ready", "ssh": "it responds over SSH, and no node was waited for"}
        terminal.line(f"{done.machine}: {what[done.waited]}")
    if done.identities:
        whose = {True: "its own", False: "another machine's", None: "not verified to be its own"}[done.own]
        terminal.line(f"{done.machine}: the BMC is {whose}: {done.identities}")


def _check_flags(action: str, *, drain: bool, wait: bool) -> None:
    for flag, given, fits in (("--drain", drain, "off"), ("--wait", wait, "on")):
        if given and action != fits:
            raise WrongInput(f"{flag} with {action}", f"{flag} with {fits}", "leave the option out")


def _check_cluster(*, known: bool, drain: bool, wait: bool) -> None:
    if not known and (drain or wait):
        flag = "--drain" if drain else "--wait"
        raise WrongInput(f"{flag} for an address", "the cluster whose node it is", "add --kubeconfig FILE")


def _check_file(action: str, password_file: Path | None) -> None:
    if (action == "rotate-password") != (password_file is not None):
        missing = password_file is None
        raise WrongInput(
            f"{action} without --password-file" if missing else f"--password-file with {action}",
            "rotate-password and --password-file together",
            "name a file for the new password" if missing else "leave the option out",
        )
