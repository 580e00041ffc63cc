"""gpunodes health"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from gpunodes.errors import ExitCode, WrongInput
from gpunodes.health.model import State, Verdict


@click.command()
@click.argument("patterns", nargs=-1)
@click.option("--from", "files", multiple=True, metavar="FILE", help="A saved log of one machine; may be given again.")
@click.option(
    "-i",
    "--inventory",
    "inventory_path",
    type=click.Path(path_type=Path),
    default=Path("inventory/hosts.yml"),
    show_default=True,
    help="The Ansible inventory.",
)
@click.option("--watch", type=click.FloatRange(min=1), metavar="SECONDS", help="Ask again every so many seconds.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="When to end, answers or not. By default 60, and a quarter more for each machine.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    metavar="NUMBER",
    help="How many machines to talk to at once.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    patterns: tuple[str, ...],
    files: tuple[str, ...],
    inventory_path: Path,
    watch: float | None,
    deadline: float | None,
    parallel: int,
    as_json: bool,
) -> int:
    """Say of each GPU machine whether it is well, what to do, and why.

    PATTERNS name machines of the inventory; without one, all of them are asked. Exit code 3 when one is not well or
    does not answer.
    """
    if not files:
        if watch and as_json:
            raise WrongInput("--watch goes on, and --json gives one document", "one of them", "leave one out")
        return _live(patterns, inventory_path, watch, deadline, parallel, as_json=as_json)
    if patterns or watch:
        raise WrongInput("--from judges saved logs", "no machines and no --watch beside it", "leave them out")
    from gpunodes.operations import health

    return _show([health.of_files(files)], as_json=as_json)


def _live(
    patterns: tuple[str, ...],
    inventory_path: Path,
    watch: float | None,
    deadline: float | None,
    parallel: int,
    *,
    as_json: bool,
) -> int:
    """Ask the machines of the inventory, once or for ever; returns the exit code."""
    from gpunodes.inventory import Inventory
    from gpunodes.operations import sweep
    from gpunodes.views import health_map

    inventory = Inventory(inventory_path)
    targets = sweep.targets(inventory, inventory.select(patterns))
    view = health_map.progress(colour="NO_COLOR" not in os.environ)
    while True:
        began = time.monotonic()
        try:
            verdicts = sweep.run(
                targets, view, deadline_s=deadline or sweep.deadline_for(len(targets)), parallel=parallel
            )
        finally:
            view.close()
        code = _show(verdicts, as_json=as_json)
        if watch is None:
            return code
        time.sleep(max(0.0, began + watch - time.monotonic()))
        click.clear()


def _show(verdicts: list[Verdict], *, as_json: bool) -> int:
    """Print verdicts; returns the exit code."""
    from gpunodes.views import health as view

    if as_json:
        import json

        click.echo(json.dumps(view.document(verdicts), indent=2))
    else:
        click.echo(view.listing(verdicts))
    return ExitCode.DONE if all(verdict.state is State.WELL for verdict in verdicts) else ExitCode.PARTLY
