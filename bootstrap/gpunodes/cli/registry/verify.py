"""gpunodes registry verify"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import exit_code_for


@click.command()
@options.inventory_option
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Push an image, and let each node pull and run it.

    The image is new and some hundred bytes small. It is pushed over SSH with the registry's login; a pod on each ready
    node pulls it with the Secret of that login, and must have run exactly what was pushed. Pods and image are deleted.
    """
    from gpunodes.operations import checked
    from gpunodes.operations.registry_server import verify
    from gpunodes.views import registry as view_of

    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    found = verify.run(inventory, terminal.progress)
    if as_json:
        terminal.echo(view_of.dump_pulled(found))
    else:
        terminal.report(view_of.pulled(found))
    return exit_code_for(sum(bool(each.problem) for each in found), len(found))
