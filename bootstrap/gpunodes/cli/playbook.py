"""gpunodes playbook"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
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


_JOINED = re.compile("-[bCDv]*[kKJ][bCDkKJv]*")
"""Flags of ansible-playbook in one word, with one that asks for a password, as in -bKJ."""


def _one_by_one(arguments: Sequence[str]) -> list[str]:
    """The arguments, with such flags as words of their own."""
    return [
        flag
        for word in arguments
        for flag in ([f"-{letter}" for letter in word[1:]] if _JOINED.fullmatch(word) else [word])
    ]


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
    words = _one_by_one(arguments)
    asked = [word for word in words if word in passwords.FLAGS and hasattr(os, "memfd_create")]
    for option in dict.fromkeys(passwords.FLAGS[word] for word in asked):
        passwords.ask(option)
    playbook = settings.content() / "playbooks" / f"{name}.yml"
    given = read(playbook, [word for word in words if word not in asked])
    if len(given.inventories) > 1:
        raise WrongInput(
            f"several inventories: {', '.join(given.inventories)}",
            "one: a file or a folder",
            "put them into one folder, and name that with -i",
        )
    path = Path(given.inventories[0]) if given.inventories else inventory_path
    if "," in str(path) and not path.exists():
        raise WrongInput(
            f"the list of machines {path}",
            "an inventory: a file or a folder",
            "write the machines into a file, and name that with -i",
        )
    sys.exit(runner.run_at_terminal(Inventory(path), playbook, given.rest))
