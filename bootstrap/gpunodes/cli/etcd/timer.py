"""gpunodes etcd timer"""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.operations.etcd import timer
from gpunodes.views import document


@click.command()
@options.number_option("--keep", (1, 10_000), 14, "How many backups to keep.")
@click.option(
    "--on-calendar",
    "calendar",
    default="daily",
    show_default=True,
    metavar="EVENT",
    help="When to run, as a calendar event of systemd.",
)
@click.option("--encrypt-to", "recipient", metavar="RECIPIENT", default="", help="As for `gpunodes etcd backup`.")
@options.inventory_path_option
@options.json_option
def command(keep: int, calendar: str, recipient: str, inventory_path: Path, as_json: bool) -> int:
    """Print a systemd service and timer that back the cluster up.

    The service runs `gpunodes etcd backup` as the current user, in the current folder, where the files stay. Save each
    unit as the file that the comment above it names. Nothing is installed.
    """
    if not inventory_path.exists():
        raise WrongInput(f"there is no inventory at {inventory_path}", "an Ansible inventory", "name it with -i")
    argv = [timer.absolute(sys.argv[0]), "etcd", "backup", "-i", timer.absolute(str(inventory_path))]
    units = timer.units(argv, getpass.getuser(), Path.cwd(), keep=keep, calendar=calendar, recipient=recipient)
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.etcd-timer/1", "units": units}))
    else:
        terminal.echo("\n".join(f"# /etc/systemd/system/{name}\n{text}" for name, text in units.items()).rstrip())
    return ExitCode.DONE
