"""gpunodes jupyter up"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpunodes.cli import options, terminal
from gpunodes.cli.jupyter import place_options
from gpunodes.errors import ExitCode, WrongInput


@click.command()
@place_options
@click.option("--gpus", type=options.Whole(0, 64), metavar="NUMBER", help="How many GPUs it gets; by default 1.")
@click.option("--cpus", type=options.Whole(1, 1024), metavar="NUMBER", help="Its limit of processors; by default 4.")
@click.option(
    "--memory", type=options.Whole(1, 65536), metavar="GIB", help="Its limit of memory in GiB; by default 16."
)
@click.option(
    "--storage",
    metavar="CLAIM",
    help="The claim with its home; by default the only share of `gpunodes storage`.",
)
@click.option("--scratch", is_flag=True, help="No shared storage: its files end with its pod.")
@click.option("--image", metavar="IMAGE", help="By default that of the setting gpunodes_jupyter_image.")
@click.option("--pool", metavar="NAME", help="Only on nodes of this pool; by default on any.")
@click.option("--node-port", is_flag=True, help="Serve it at a port of every node, too, without encryption.")
@options.number_option("--timeout", (1, None), 1200, "Seconds until it must be ready; the image is large.")
@click.option("--dry-run", is_flag=True, help="Show what would be made; the API server checks it.")
@options.inventory_option
@options.json_option
def command(
    *,
    name: str,
    namespace: str,
    scratch: bool,
    node_port: bool,
    timeout: int,
    dry_run: bool,
    inventory_path: Path,
    as_json: bool,
    **given: Any,
) -> int:
    """Start a notebook with a GPU, and print its token once.

    NAME is "notebook" by default. Its home is a folder of shared storage, which later notebooks of this name find
    again. Nothing in the cluster's network reaches it: use `gpunodes jupyter open`. The same command again waits for it
    and changes nothing, not even the token; options of a notebook that exists cannot be changed.
    """
    from gpunodes.operations import checked, notebooks
    from gpunodes.planner.notebooks import Place, Request, check, check_place
    from gpunodes.views import notebooks as view_of

    if scratch and given["storage"]:
        raise WrongInput("--scratch and --storage", "one of them", "leave the other one out")
    requested = {key: value for key, value in given.items() if value is not None}
    if node_port:
        requested["node_port"] = True
    place = Place(name, namespace)
    check_place(place)
    check(Request(**{"image": "x", **requested}))
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    image = notebooks.image(inventory)
    with notebooks.connected(inventory) as api:
        started = notebooks.up(api, place, requested, image, terminal.progress, scratch=scratch, dry_run=dry_run)
        # Printed before the wait: a command that is interrupted must not lose it.
        if not as_json:
            terminal.report(view_of.made(started, dry_run=dry_run))
        try:
            if not dry_run:
                notebooks.wait(api, place, timeout, terminal.progress)
        except BaseException:
            if as_json and started.token:
                terminal.final(view_of.dump(started, dry_run=False, ready=False))
            raise
    if as_json:
        terminal.echo(view_of.dump(started, dry_run=dry_run, ready=not dry_run))
    elif not dry_run:
        terminal.report(view_of.ready(started))
    return ExitCode.DONE
