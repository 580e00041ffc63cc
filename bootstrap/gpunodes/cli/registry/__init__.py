"""``gpunodes registry``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
OWN = {
    "up": "Start a registry in the cluster, which all nodes trust.",
    "status": "Show the registry of the cluster.",
    "open": "Forward a port of this computer to the registry, to push.",
    "verify": "Push an image, and let each node pull and run it.",
    "down": "Take the registry away; its images stay on the share.",
}
LOGINS = {
    "login": "Let the pods of namespaces pull images from a private registry.",
    "logout": "Delete a login, and its password from the cluster.",
    "list": "List the logins that gpunodes made.",
}
COMMANDS = {**OWN, **LOGINS}


@click.group(
    cls=LazyGroup,
    listing={"A registry in the cluster": OWN, "Logins at private registries": LOGINS},
    where="gpunodes.cli.registry",
)
def command() -> None:
    """Run a registry in the cluster; log pods in at private image registries."""
