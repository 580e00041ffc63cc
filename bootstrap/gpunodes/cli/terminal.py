"""The one way to the terminal: what commands print passes here, or a view's own stream."""

from __future__ import annotations

import click

from gpunodes.model import printable, printable_lines


def echo(text: str, *, err: bool = False) -> None:
    """Print lines, to standard error with ``err``. What a machine reported in them does not steer the terminal."""
    click.echo(printable_lines(text), err=err)


def line(text: str, *, err: bool = False) -> None:
    """Print one line: what a machine reported in it begins no other."""
    echo(printable(text), err=err)


def confirm(question: str) -> None:
    """Ask on standard error; raises click's Abort for anything but a yes."""
    click.confirm(printable(question), abort=True, err=True)


def secret(question: str) -> str:
    """Ask on standard error for what is not shown while it is typed."""
    return str(click.prompt(printable(question), hide_input=True, err=True))
