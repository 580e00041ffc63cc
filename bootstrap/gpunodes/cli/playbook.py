"""gpunodes playbook"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gpunodes import settings
from gpunodes.cli import options
from gpunodes.errors import WrongInput


def _names() -> list[str]:
    """The playbooks, by the names under which the command takes them."""
    return sorted(path.stem for path in (settings.content() / "playbooks").glob("*.yml"))


def _names_inventory(argument: str) -> bool:
    return argument.startswith(("-i", "--inventory"))


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's signature
    return [CompletionItem(name) for name in _names() if name.startswith(incomplete)]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.inventory_path_option
@click.argument("name", shell_complete=_complete)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ANSIBLE_ARGUMENTS]...")
def command(inventory_path: Path, name: str, arguments: tuple[str, ...]) -> None:
    """Run a playbook of gpunodes with ansible-playbook.

    NAME is a file in the folder playbooks of `gpunodes content`, without .yml. Everything after NAME is passed to
    ansible-playbook, as in `gpunodes playbook join --limit worker-1`.

    A playbook takes no locks, asks no questions and prints no result for each machine: the other commands add these.
    Do not run it at the same time as another command.
    """
    from gpunodes.engine import runner

    if name not in _names():
        raise WrongInput(f"gpunodes has no playbook {name!r}", f"one of {', '.join(_names())}")
    inventory = [] if any(_names_inventory(argument) for argument in arguments) else ["-i", str(inventory_path)]
    if inventory and not inventory_path.exists():
        raise WrongInput(f"{inventory_path} does not exist", "an Ansible inventory", "name one with -i")
    playbook = str(settings.content() / "playbooks" / f"{name}.yml")
    os.environ.update(runner.environment(inventory_path), PATH=runner.search_path())
    os.execvp("ansible-playbook", ["ansible-playbook", *inventory, playbook, *arguments])  # noqa: S606 - no shell needed
