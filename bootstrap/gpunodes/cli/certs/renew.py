"""gpunodes certs renew"""

from __future__ import annotations

import click

from gpunodes.cli import common, complete, terminal
from gpunodes.model import Outcome, Role
from gpunodes.operations import checked
from gpunodes.operations.certs import renew
from gpunodes.operations.run import carry_out
from gpunodes.views import text


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@click.option("--force", is_flag=True, help="Renew also certificates that have nine tenths of their time left.")
@common.run_options(renew.OPERATION)
def command(machines: tuple[str, ...], force: bool, flags: common.CommonOptions) -> int:
    """Renew the certificates of control planes.

    MACHINES are names, addresses, groups or patterns of the inventory's control planes; by default all of them, one
    after the other; those that do not respond are left out. Their static pods are restarted one at a time: with one
    control plane the API is away for some seconds each. Certificate authorities are never renewed; the kubelets renew
    their own certificates.
    """
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    chosen = inventory.select(machines, Role.CONTROL_PLANE)
    if force:
        flags = common.requesting(flags, {"certificates_renewed_force": True})
    view = text.progress()
    try:
        result = carry_out(renew.OPERATION, inventory, chosen, view, flags.options)
    finally:
        view.close()
    code = common.show(result, as_json=flags.as_json)
    if any(each.outcome is Outcome.CHANGED for each in result.machines) and not result.dry_run:
        terminal.line(renew.refresh(inventory), err=True)
    for each in result.machines:
        if each.outcome is Outcome.UNREACHABLE:
            what = f"start it, then run `gpunodes certs renew {each.name}`"
            terminal.line(f"{each.name} has its old certificates: {what}", err=True)
    return code
