"""gpunodes gpu plan"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gpunodes.cli import common, complete, connections, terminal
from gpunodes.operations import gpu_plan
from gpunodes.views import gpu as view_of
from gpunodes.views import text


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@connections.options
@common.ansible_options
@common.version_option
@common.gpu_options
@common.unsupported_os_setting
@click.option(
    "--driver-source",
    type=click.Choice(["nvidia", "distribution", "existing"]),
    help="Whose driver packages to install, or existing for none; by default the setting gpunodes_driver_source.",
)
@click.option(
    "--from",
    "facts_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plan from a document that --json printed; no machine is contacted.",
)
@common.output_option
def command(
    machines: tuple[str, ...],
    connection: connections.Connection,
    inventory_path: Path,
    kubernetes_version: str | None,
    requested: Mapping[str, Any],
    driver_source: str | None,
    facts_file: Path | None,
    output: str,
) -> int:
    """Show which GPU software machines get, and why.

    MACHINES are names, addresses, groups or patterns of the inventory; by default all machines. With --user, --key or
    --port, or without an inventory, they are addresses. For these, and without the group control_plane, the Kubernetes
    version is that of the settings. Nothing is changed. Exit code 3 when the request is not possible on some machines,
    1 when on all.
    """
    variables = {**requested, **({"gpunodes_driver_source": driver_source} if driver_source else {})}
    if facts_file:
        plans = gpu_plan.from_file(facts_file, machines, kubernetes_version, variables)
    else:
        inventory, addressed = connections.inventory(inventory_path, machines, connection)
        chosen = inventory.select(machines)
        connections.warn_alone(inventory, chosen, addressed=addressed)
        view = text.progress()
        try:
            plans = gpu_plan.run(inventory, chosen, view, kubernetes_version, variables)
        finally:
            view.close()
    common.show_output(output, lambda: view_of.plans_document(plans), lambda columns: view_of.plans(plans, columns))
    if plans.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(plans.exit_code)
