"""The one way to the terminal: what commands print passes here, or a view's own stream."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from gpunodes.model import printable, printable_lines
from gpunodes.views.colours import coloured, painted, painted_lines

if TYPE_CHECKING:
    from gpunodes.errors import GpunodesError


INTERRUPTED = "interrupted; run the same command again"
_final: list[str] = []
"""The command's document, once ``final`` has printed it."""


class OutputClosed(Exception):  # noqa: N818 - names what happened
    """The reader of standard output or standard error went away (`gpunodes status | head`)."""


def echo(text: str, *, err: bool = False) -> None:
    """Print lines, to standard error with ``err``. Control characters that a machine reported are replaced.

    Raises OutputClosed where the reader went away.
    """
    _write(printable_lines(text), err=err)


def final(text: str) -> None:
    """Print a command's document although the command fails: that of its error is left out, stdout is one document."""
    _final.append(text)
    echo(text)


def has_final() -> bool:
    """Whether the command's document is printed already."""
    return bool(_final)


def report(text: str, *, err: bool = False) -> None:
    """Print the result of a command for people: as ``echo``, with states in their colours."""
    text = printable_lines(text)
    _write(painted_lines(text) if coloured(sys.stderr if err else sys.stdout) else text, err=err)


def line(text: str, *, err: bool = False) -> None:
    """Print one line: line breaks that a machine reported are replaced."""
    echo(printable(text), err=err)


def progress(text: str) -> None:
    """Print one line about what a command is doing, on standard error."""
    line(text, err=True)


def error(failure: GpunodesError) -> None:
    """Print an error on standard error: each problem on a line ``error:``, then what to do on a line ``hint:``."""
    for each in failure.problems:
        _labelled("error:", each.fact)
    if remedy := failure.problem.remedy:
        _labelled("hint:", remedy)


def columns() -> int | None:
    """The width of the screen that standard output is on; None where it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def has_screen() -> bool:
    """Whether a browser has a window: one in the terminal would hide what is printed there."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def check_confirmable(what: str, *, yes: bool) -> None:
    """Raise WrongInput, before anything is done, where ``what`` needs a confirmation and no terminal can ask for it."""
    from gpunodes.errors import WrongInput

    if not yes and not sys.stdin.isatty():
        raise WrongInput(f"{what} is not confirmed", "a yes", "add --yes to run it without a terminal")


def confirm(consequence: str, *, yes: bool) -> None:
    """Show what will happen and ask whether to continue, on standard error; raises GpunodesError for a no."""
    from gpunodes.errors import ExitCode, GpunodesError

    if not yes and not click.confirm(f"{printable(consequence)}. Continue?", err=True):
        raise GpunodesError("not confirmed; nothing was changed", exit_code=ExitCode.WRONG_INPUT)


def question(text: str) -> str:
    """Ask on standard error for one line."""
    return str(click.prompt(printable(text), err=True))


def secret(text: str) -> str:
    """The same for text that is not shown while it is typed."""
    return str(click.prompt(printable(text), hide_input=True, err=True))


def _labelled(label: str, text: str) -> None:
    styled = painted(label, label.rstrip(":")) if coloured(sys.stderr) else label
    _write(f"{styled} {printable(text)}", err=True)


def _write(text: str, *, err: bool) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError as error:
        raise OutputClosed from error
