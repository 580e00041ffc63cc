"""gpunodes gpu verify"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, terminal
from gpunodes.errors import ExitCode
from gpunodes.operations import checked, gpu_verify
from gpunodes.views import gpu_verification, text


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@common.ansible_options
@options.json_option
def command(machines: tuple[str, ...], inventory_path: Path, as_json: bool) -> int:
    """Verify GPUs level by level: host, container, kubelet, pod.

    MACHINES are names, addresses, groups or patterns of the inventory; by default all machines. Machines without GPUs
    pass. The first level that fails is shown with its remedy. Exit code 3 when a level fails.
    """
    inventory = checked.inventory(inventory_path)
    chosen = inventory.select(machines)
    view = text.progress()
    try:
        found = gpu_verify.run(inventory, chosen, view, {})
    finally:
        view.close()
    code = int(ExitCode.DONE if all(each.healthy for each in found) else ExitCode.PARTLY)
    if as_json:
        terminal.echo(gpu_verification.verification_document(found, code))
    else:
        terminal.report(gpu_verification.table(found))
    return code
