"""gpunodes playbook"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gpunodes import settings
from gpunodes.cli import options, passwords
from gpunodes.errors import WrongInput


def _names() -> list[str]:
    """The playbooks, by the names under which the command takes them."""
    return sorted(path.stem for path in (settings.content() / "playbooks").glob("*.yml"))


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's signature
    return [CompletionItem(name) for name in _names() if name.startswith(incomplete)]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.inventory_path_option
@click.argument("name", shell_complete=_complete)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ANSIBLE_ARGUMENTS]...")
def command(inventory_path: Path, name: str, arguments: tuple[str, ...]) -> None:
    """Run a playbook of gpunodes with ansible-playbook.

    NAME is a file in the folder playbooks of `gpunodes content`, without .yml. Everything after NAME is passed to
    ansible-playbook, as in `gpunodes playbook join --limit worker-1`. Your ansible.cfg does not apply.

    A playbook takes no locks, asks no questions and prints no result for each machine: the other commands add these.
    Do not run it at the same time as another command.
    """
    from gpunodes.engine import runner
    from gpunodes.inventory import Inventory
    from gpunodes.inventory.arguments import read

    if name not in _names():
        raise WrongInput(f"gpunodes has no playbook {name!r}", f"one of {', '.join(_names())}")
    # Asked here, they also count for what gpunodes itself reads, and for the command that the playbook health runs.
    asked = [word for word in arguments if word in passwords.FLAGS and hasattr(os, "memfd_create")]
    for word in asked:
        passwords.ask(passwords.FLAGS[word])
    playbook = settings.content() / "playbooks" / f"{name}.yml"
    given = read(playbook, [word for word in arguments if word not in asked])
    if len(given.inventories) > 1:
        raise WrongInput("several inventories", "one: a file or a folder", "put them into one folder, and name that")
    inventory = Inventory(Path(given.inventories[0]) if given.inventories else inventory_path)
    sys.exit(runner.run_at_terminal(inventory, playbook, given.rest))
