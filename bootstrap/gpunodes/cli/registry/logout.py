"""gpunodes registry logout"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode
from gpunodes.operations import checked, registries
from gpunodes.operations.registry_server import login as own_login
from gpunodes.views import registries as view_of


@click.command()
@click.argument("server")
@click.option(
    "--namespace", "namespaces", metavar="NAME", multiple=True, help="Only there; repeatable; all by default."
)
@options.inventory_option
@options.json_option
def command(server: str, namespaces: tuple[str, ...], inventory_path: Path, as_json: bool) -> int:
    """Delete a login, and its password from the cluster.

    Pods that use its images run until one of their containers restarts: from Kubernetes 1.35 on that needs the login,
    also where the machine has the image already. The password stays valid for who has read it: change it at the
    registry, that of the cluster by `gpunodes registry up --new-password`.
    """
    registries.check(server, namespaces)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    is_own = own_login.forget(inventory, server, namespaces)
    gone = registries.logout(inventory, server, namespaces)
    if as_json:
        terminal.echo(view_of.dump([], gone))
    else:
        terminal.line(f"no login at {server} any more in {', '.join(each.namespace for each in gone)}")
    terminal.progress(view_of.UNTIL_RESTART)
    if is_own:
        terminal.progress(view_of.STILL_VALID)
    return ExitCode.DONE
