"""gpunodes power"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import complete, options, repair_options, terminal
from gpunodes.errors import ExitCode, WrongInput

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
@options.inventory_option
@options.json_option
def command(
    machine: str, action: str, yes: bool, password_file: Path | None, inventory_path: Path, as_json: bool
) -> int:
    """Show a machine's power state, switch it through its BMC, or change the BMC's password.

    MACHINE is a name or address of the inventory. The operating system is not shut down first, and the node is not
    drained: `gpunodes repair` does that. Nothing is switched if the BMC reports the UUID, serial number or MAC
    addresses of another machine; status shows what both report.

    rotate-password gives the BMC's user the password in --password-file, and verifies it. Then put it into the
    inventory. Run it again after an interruption: it continues with the same file.
    """
    import dataclasses

    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import bmc_password, checked, power
    from gpunodes.views import document

    _check_file(action, password_file)

    inventory = checked.inventory(inventory_path, checked.Needs.MACHINES)
    chosen = repair_options.one_machine(inventory, machine)
    if action in {"off", "cycle"}:
        terminal.check_confirmable(f"power {action} of {chosen.name}", yes=yes)
        terminal.confirm(f"The power of {chosen.name} is switched off, without a shutdown of its system", yes=yes)
    fleet, asked, report = InventoryFleet(inventory), power.PowerAction(action), repair_options.lines().report
    named = repair_options.named(chosen, [machine])
    if password_file:
        done = bmc_password.rotate(fleet, chosen, password_file, named=named, report=report)
    else:
        done = power.power(fleet, chosen, asked, named=named, report=report)
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.power/1", **dataclasses.asdict(done)}))
    else:
        terminal.line(f"{done.machine}: {done.state} ({done.bmc})")
        if done.identities:
            whose = {True: "its own", False: "another machine's", None: "not verified to be its own"}[done.own]
            terminal.line(f"{done.machine}: the BMC is {whose}: {done.identities}")
    return ExitCode.DONE


def _check_file(action: str, password_file: Path | None) -> None:
    if (action == "rotate-password") != (password_file is not None):
        missing = password_file is None
        raise WrongInput(
            f"{action} without --password-file" if missing else f"--password-file with {action}",
            "rotate-password and --password-file together",
            "name a file for the new password" if missing else "leave the option out",
        )
