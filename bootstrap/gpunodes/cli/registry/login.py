"""gpunodes registry login"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.operations import checked, registries
from gpunodes.operations.registry_server import login as own_login
from gpunodes.views import registries as view_of

_MOST = 1 << 17


@click.command()
@click.argument("server")
@click.option("--user", metavar="NAME", help="The user; asked for by default.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input; asked for by default.")
@click.option(
    "--namespace", "namespaces", metavar="NAME", multiple=True, help='A namespace; repeatable; "default" by default.'
)
@options.inventory_option
@options.json_option
def command(
    server: str,
    user: str | None,
    password_stdin: bool,
    namespaces: tuple[str, ...],
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Let the pods of namespaces pull images from a private registry.

    SERVER is the registry as the names of images begin, such as registry.example:5000. User and password are stored in
    a Secret of each namespace, which its default service account then names beside those that it has. Run the same
    command again after a change of the password. The password is not tried at the registry. Those of the cluster's own
    registry are known: nothing is asked for.
    """
    chosen = namespaces or ("default",)
    registries.check(server, chosen)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    for each in registries.warnings(inventory, server):
        terminal.progress(f"warning: {each}")
    own = None if user or password_stdin else own_login.stored(inventory, server)
    if not own and not sys.stdin.isatty() and not (user and password_stdin):
        raise WrongInput("no terminal asks for user and password", "both", "add --user NAME --password-stdin")
    name, password = own or _asked(server, user, password_stdin=password_stdin)
    found = registries.login(inventory, server, chosen, name, password)
    own_login.record(inventory, server, chosen)
    if as_json:
        terminal.echo(view_of.dump(found))
    else:
        terminal.report(view_of.table(found, terminal.columns()))
    return ExitCode.DONE


def _asked(server: str, user: str | None, *, password_stdin: bool) -> tuple[str, str]:
    name = user or terminal.question("User")
    return name, _read() if password_stdin else terminal.secret(f"Password of {name} at {server}")


def _read() -> str:
    """The password in standard input, without the end of its line; raises WrongInput if it is no text."""
    try:
        text = sys.stdin.buffer.read(_MOST).decode()
    except UnicodeDecodeError:
        # Without its cause, which quotes the password.
        raise WrongInput("the password in standard input is no text in UTF-8", "one line", "give it again") from None
    return text.removesuffix("\n").removesuffix("\r")
