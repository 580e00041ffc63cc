"""gpunodes adopt"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gpunodes.cli import common, connections, terminal
from gpunodes.inventory.names import check_address
from gpunodes.operations import adopt
from gpunodes.planner.adoption import AdoptedNode
from gpunodes.views import adoption as view_of
from gpunodes.views import text


@click.command()
@click.argument("address")
@connections.options
@click.option("--no-inventory", is_flag=True, help="Only compare; write no inventory.")
@click.option("--yes", is_flag=True, help="Do not ask before the machines that the cluster names are contacted.")
@common.ansible_options
@common.output_option
def command(
    address: str,
    connection: connections.Connection,
    no_inventory: bool,
    yes: bool,
    inventory_path: Path,
    output: str,
) -> int:
    """Compare a cluster that kubeadm made with one of gpunodes, and write its inventory.

    ADDRESS is that of one of its control planes; --user, --key and --port are for all its machines, which are listed
    first: the cluster names them, and they get the same credentials. Each is read once, and nothing is changed. The
    table shows what is as gpunodes has it and what differs. The inventory, a new file, has the machines and the
    settings that the cluster has. Exit code 3 when something must be changed before machines join.
    """
    check_address(address)
    terminal.check_confirmable("a login to each machine that the cluster names", yes=yes)

    def confirm(nodes: Sequence[AdoptedNode]) -> None:
        listed = ", ".join(f"{each.name} ({each.address})" for each in nodes)
        terminal.confirm(f"These machines get a login over SSH, with the same credentials: {listed}", yes=yes)

    view = text.progress()
    try:
        found = adopt.run(address, connection.variables, inventory_path, view, confirm, write=not no_inventory)
    finally:
        view.close()
    common.show_output(
        output,
        lambda: view_of.dump(found.rows, found.document, found.path),
        lambda columns: view_of.table(found.rows, columns),
    )
    if found.path:
        terminal.progress(f"{found.path}: written; read it, then see `gpunodes status`")
    return int(found.exit_code)
