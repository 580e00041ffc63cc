"""gpunodes storage verify"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, options


@click.command()
@common.ansible_options
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Check the shares from the server up to pods on two nodes.

    The storage server answers each node, each claim is bound, and a pod on one node reads what a pod on another one
    wrote. The pods and their files are removed.
    """
    from gpunodes.operations import checked
    from gpunodes.operations.storage import commands
    from gpunodes.views import text

    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    view = text.progress()
    try:
        result = commands.verify(inventory, view)
    finally:
        view.close()
    return common.show(result, as_json=as_json)
