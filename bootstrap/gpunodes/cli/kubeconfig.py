"""gpunodes kubeconfig"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.operations import checked, kubeconfig
from gpunodes.views import document


@click.command()
@click.option("--merge", is_flag=True, help="Add it to the file that kubectl reads, and make it the current context.")
@click.option(
    "--output", type=click.Path(path_type=Path), default="kubeconfig", show_default=True, help="The file to write."
)
@options.inventory_option
@options.json_option
def command(merge: bool, output: Path, inventory_path: Path, as_json: bool) -> int:
    """Fetch the cluster's administrator kubeconfig.

    It is written with mode 0600: it gives full access to the cluster.
    """
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    fetched = kubeconfig.fetch(inventory, lambda each: terminal.line(f"warning: {each}", err=True))
    path = (kubeconfig.user_file() if merge else output).absolute()
    kubeconfig.write(path, fetched, merge=merge)
    context = fetched["current-context"]
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.kubeconfig/1", "path": str(path), "context": context}))
    else:
        terminal.echo(f"{path}: context {context}")
    return 0
