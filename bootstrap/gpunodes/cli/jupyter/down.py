"""gpunodes jupyter down"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.cli.jupyter import place_options
from gpunodes.errors import ExitCode


@click.command()
@place_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.inventory_option
@options.json_option
def command(name: str, namespace: str, yes: bool, inventory_path: Path, as_json: bool) -> int:
    """Remove a notebook; its home on shared storage stays.

    Its kernels end, its GPUs are free, and its token is deleted: a later notebook of this name has another one, and the
    same home.
    """
    from gpunodes.operations import checked, notebooks
    from gpunodes.planner.notebooks import Place, check_place
    from gpunodes.views import notebooks as view_of

    place = Place(name, namespace)
    check_place(place)
    terminal.check_confirmable("jupyter down", yes=yes)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    with notebooks.connected(inventory) as api:
        removed, request, home = notebooks.down(api, place, lambda what: terminal.confirm(what, yes=yes))
    if as_json:
        terminal.echo(view_of.dump_removed(place, removed, request))
    elif removed:
        terminal.line(f"removed {', '.join(removed)}; {home}")
    else:
        terminal.line(f"there is no notebook {place}")
    return ExitCode.DONE
