"""-k, -K and -J: passwords that the user types, for this command and the programs that it starts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpunodes.cli import terminal
from gpunodes.errors import WrongInput

_Command = TypeVar("_Command", bound=Callable[..., Any])


def options(command: _Command) -> _Command:
    """--ask-pass, --ask-become-pass and --ask-vault-pass, for every command that reads an inventory.

    Ansible and the SSH connections of gpunodes read them from the files that Ansible's environment variables name.
    """
    for short, name, variable, title, text in (
        ("-J", "--ask-vault-pass", "ANSIBLE_VAULT_PASSWORD_FILE", "Vault password", "the vault password"),
        (
            "-K",
            "--ask-become-pass",
            "ANSIBLE_BECOME_PASSWORD_FILE",
            "sudo password",
            "the machines' sudo password",
        ),
        ("-k", "--ask-pass", "ANSIBLE_CONNECTION_PASSWORD_FILE", "SSH password", "the machines' SSH password"),
    ):
        command = click.option(
            short,
            name,
            is_flag=True,
            expose_value=False,
            callback=functools.partial(_ask, variable=variable, title=title),
            help=f"Ask for {text}; {variable} names a file that holds it.",
        )(command)
    return command


def _ask(context: click.Context, parameter: click.Parameter, value: bool, *, variable: str, title: str) -> None:
    if not value or context.resilient_parsing:
        return
    if not hasattr(os, "memfd_create"):
        raise WrongInput(
            f"{parameter.opts[-1]} needs Linux", "a file with the password, of mode 0600", f"name it in {variable}"
        )
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
