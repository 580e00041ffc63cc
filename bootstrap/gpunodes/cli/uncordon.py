"""gpunodes uncordon"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import complete, options, repair_options, terminal
from gpunodes.errors import ExitCode
from gpunodes.model import Kubeconfig


@click.command()
@click.argument("machine", shell_complete=complete.machines)
@click.option("--without-cluster", is_flag=True, help="Clear it, and an unfinished repair, on this controller only.")
@options.kubeconfig_option
@options.inventory_option
@options.json_option
def command(
    machine: str, without_cluster: bool, kubeconfig: Kubeconfig | None, inventory_path: Path, as_json: bool
) -> int:
    """Clear "needs repair" of a machine: pods and repairs are allowed on it again.

    MACHINE is a name or address of the inventory. A cordon that gpunodes did not make stays, and
    so does the cordon of a machine in maintenance.
    """
    import dataclasses

    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, power
    from gpunodes.views import document

    inventory = checked.inventory(inventory_path, checked.Needs.REPAIR, kubeconfig)
    chosen = repair_options.one_machine(inventory, machine)
    done = power.clear(InventoryFleet(inventory), chosen, without_cluster=without_cluster, on_wait=terminal.progress)
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.uncordon/1", **dataclasses.asdict(done)}))
    else:
        message = {
            True: "the node can be scheduled to",
            False: "it stays cordoned: by its maintenance (see `gpunodes maintenance`), a user or another program",
            None: "the node was not changed",
        }
        terminal.echo(f"{done.machine}: cleared; {message[done.schedulable]}")
    return ExitCode.DONE
