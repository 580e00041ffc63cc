"""``gpunodes registry``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "login": "Let the pods of namespaces pull images from a private registry.",
    "logout": "Delete a login, and its password from the cluster.",
    "list": "List the logins that gpunodes made.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.registry")
def command() -> None:
    """Log pods in at private image registries."""
