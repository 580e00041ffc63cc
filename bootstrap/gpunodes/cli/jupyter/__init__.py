"""``gpunodes jupyter``: one command a file, loaded only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "up": "Start a notebook with a GPU, and print its token once.",
    "open": "Open a notebook in the browser, over SSH, until Ctrl-C.",
    "list": "List the notebooks of the cluster.",
    "verify": "Run a cell in a notebook, and check that it sees the GPUs.",
    "down": "Remove a notebook; its home on shared storage stays.",
}
_Command = TypeVar("_Command", bound=Callable[..., Any])


def place_options(command: _Command) -> _Command:
    """The argument NAME and --namespace."""
    command = click.option(
        "--namespace", metavar="NAME", default="default", show_default=True, help="The namespace of the notebook."
    )(command)
    return click.argument("name", default="notebook")(command)


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.jupyter")
def command() -> None:
    """Run notebooks with GPUs in the cluster, and open them over SSH."""
