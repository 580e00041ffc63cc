"""-k, -K and -J: passwords that the user types, for this command and the programs that it starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpunodes.cli import terminal
from gpunodes.errors import WrongInput

_Command = TypeVar("_Command", bound=Callable[..., Any])


_QUESTIONS = {
    "--ask-vault-pass": ("-J", "ANSIBLE_VAULT_PASSWORD_FILE", "Vault password", "the vault password"),
    "--ask-become-pass": ("-K", "ANSIBLE_BECOME_PASSWORD_FILE", "sudo password", "the machines' sudo password"),
    "--ask-pass": ("-k", "ANSIBLE_CONNECTION_PASSWORD_FILE", "SSH password", "the machines' SSH password"),
}
"""By option: its short form, Ansible's variable for the file, the question, and what is asked for."""
FLAGS = {"--ask-vault-password": "--ask-vault-pass"} | {
    flag: name for name, (short, *_) in _QUESTIONS.items() for flag in (short, name)
}
"""By every form of it in ansible-playbook: the option."""


def options(command: _Command) -> _Command:
    """--ask-pass, --ask-become-pass and --ask-vault-pass, for every command that reads an inventory.

    Ansible and the SSH connections of gpunodes read them from the files that Ansible's environment variables name.
    """
    for name, (short, variable, _, text) in _QUESTIONS.items():
        command = click.option(
            short,
            name,
            is_flag=True,
            expose_value=False,
            callback=_asked,
            help=f"Ask for {text}; {variable} names a file that holds it.",
        )(command)
    return command


def _asked(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        ask(parameter.opts[-1])


def ask(option: str) -> None:
    """Ask for the password of this option, and name the file that holds it in Ansible's environment variable."""
    _, variable, title, _ = _QUESTIONS[option]
    if not hasattr(os, "memfd_create"):
        raise WrongInput(f"{option} needs Linux", "a file with the password, of mode 0600", f"name it in {variable}")
    # A file in memory: it is on no disk, and ends with this process.
    descriptor = os.memfd_create("gpunodes")
    os.write(descriptor, f"{terminal.secret(title)}\n".encode())
    os.environ[f"GPUNODES_{variable}"] = f"/proc/{os.getpid()}/fd/{descriptor}"
    # Ansible resolves the path of a password file, which fails for this one; a program is run as it is.
    os.environ[variable] = str(_program(f"GPUNODES_{variable}"))


def _program(variable: str) -> Path:
    """A program that prints the file that this environment variable names."""
    from gpunodes import settings

    path = settings.state_home() / variable.lower()
    text = f'#!/bin/sh\nexec cat "${variable}"\n'
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        # Replaced as a whole: other commands may be running it.
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(0o700)
        fresh.replace(path)
    return path
