"""gpunodes preflight"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gpunodes.cli import common, complete, connections, options
from gpunodes.operations import preflight
from gpunodes.views import text


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@connections.options
@common.ansible_options
@common.version_option
@common.unsupported_os_setting
@options.json_option
def command(
    machines: tuple[str, ...],
    connection: connections.Connection,
    inventory_path: Path,
    kubernetes_version: str | None,
    requested: Mapping[str, Any],
    as_json: bool,
) -> int:
    """Check what would stop a join; nothing is changed.

    MACHINES are names, addresses, groups or patterns of the inventory; by default all machines. With --user,
    --key or --port, or without an inventory, they are addresses. These, and the machines of an inventory without the
    group control_plane, are checked by themselves: nodes of other clusters may be among them. Exit code 3 when some
    machines fail a check or do not respond, 1 when all do.
    """
    inventory, addressed = connections.inventory(inventory_path, machines, connection)
    chosen = inventory.select(machines)
    connections.warn_alone(inventory, chosen, addressed=addressed)
    view = text.progress()
    try:
        result = preflight.run(inventory, chosen, view, kubernetes_version, requested)
    finally:
        view.close()
    return common.show(result, as_json=as_json)
