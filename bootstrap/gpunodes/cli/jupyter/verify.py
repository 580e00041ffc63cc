"""gpunodes jupyter verify"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.cli.jupyter import place_options
from gpunodes.errors import ExitCode


@click.command()
@place_options
@options.inventory_option
@options.json_option
def command(name: str, namespace: str, inventory_path: Path, as_json: bool) -> int:
    """Run a cell in a notebook, and check that it sees the GPUs.

    The cell runs in a kernel of its own, by the API that browsers use: it starts nvidia-smi, and counts GPUs by CUDA.
    The kernel is removed.
    """
    from gpunodes.operations import checked, notebooks
    from gpunodes.planner.notebooks import Place, check_place
    from gpunodes.views import notebooks as view_of

    place = Place(name, namespace)
    check_place(place)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    seen, request = notebooks.verify(inventory, place, terminal.progress)
    if as_json:
        terminal.echo(view_of.dump_seen(place, seen, request))
    else:
        terminal.report(view_of.seen(seen))
    return ExitCode.DONE
