"""gpunodes maintenance on"""

from __future__ import annotations

import time
from pathlib import Path

import click

from gpunodes.cli import complete, options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.model import Kubeconfig
from gpunodes.repair import maintenance as times


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option("--reason", required=True, metavar="TEXT", help="The reason; shown wherever the machine is skipped.")
@click.option(
    "--until",
    metavar="TIME",
    help="When repairs are allowed again: 4h, 1d12h, or 2030-01-31T18:00 (local, or with a zone); by default never.",
)
@click.option("--no-cordon", is_flag=True, help="Do not cordon the nodes; only prevent repairs.")
@options.kubeconfig_option
@options.inventory_option
@options.json_option
def command(
    machines: tuple[str, ...],
    reason: str,
    until: str | None,
    no_cordon: bool,
    kubeconfig: Kubeconfig | None,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Begin maintenance: no repairs, and the node is cordoned.

    MACHINES are names, addresses, groups or patterns of the inventory. Running pods stay. After TIME repairs are
    allowed again; the cordon stays until `maintenance off`.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, maintenance
    from gpunodes.views import maintenance as views

    if not reason.strip():
        raise WrongInput("the reason is empty", "a few words for other users", "add --reason")
    ends = times.end(until, time.time()) if until is not None else None
    inventory = checked.inventory(inventory_path, checked.Needs.NODES, kubeconfig)
    kept = maintenance.begin(
        InventoryFleet(inventory),
        inventory.select(machines),
        " ".join(reason.split()),
        ends,
        cordon=not no_cordon,
        on_wait=terminal.progress,
    )
    terminal.echo(views.document(kept) if as_json else views.table(kept))
    return ExitCode.DONE
