"""The options that almost every command has. Nothing heavy is imported here: `gpunodes version` and
`gpunodes health --from` must stay quick.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpunodes.cli import passwords
from gpunodes.errors import WrongInput
from gpunodes.model import Kubeconfig

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A finite number with limits, by this name in errors."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click: fails for a value out of range."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


class Whole(click.IntRange):
    """A whole number with limits, by this name in errors."""

    name = "whole number"


DEFAULT_INVENTORY = Path("inventory/hosts.yml")


def inventory_path_option(command: _Command) -> _Command:
    """-i/--inventory, passed as ``inventory_path``."""
    return click.option(
        "-i",
        "--inventory",
        "inventory_path",
        type=click.Path(path_type=Path),
        default=DEFAULT_INVENTORY,
        show_default=True,
        help="The Ansible inventory.",
    )(command)


def inventory_option(command: _Command) -> _Command:
    """The same, and the passwords that reading it and reaching its machines may need."""
    return inventory_path_option(passwords.options(command))


def kubeconfig_option(command: _Command) -> _Command:
    """--kubeconfig and --context, passed as ``kubeconfig``: None, or the user's kubeconfig."""

    @click.option(
        "--kubeconfig",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Reach the API with this kubeconfig, not over control planes of the inventory; by default the setting "
        "gpunodes_api_kubeconfig.",
    )
    @click.option("--context", metavar="NAME", default="", help="With --kubeconfig: a context other than its current.")
    @functools.wraps(command)
    def wrapped(*args: Any, file: Path | None, context: str, **kwargs: Any) -> Any:
        if context and not file:
            raise WrongInput("--context without --kubeconfig", "both", "add --kubeconfig FILE")
        found = Kubeconfig(file.expanduser(), context) if file else None
        return command(*args, kubeconfig=found, **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


def json_option(command: _Command) -> _Command:
    """--json, passed as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")(command)


def json_tunnel_option(command: _Command) -> _Command:
    """--json of a command that stays open, passed as ``as_json``."""
    description = "Print one line of JSON on standard output when the tunnel is there; the command stays open."
    return click.option("--json", "as_json", is_flag=True, help=description)(command)


def number_option(
    flag: str, limits: tuple[int, int | None], default: int, description: str
) -> Callable[[_Command], _Command]:
    """An option for a whole number between two limits; None: no upper one."""
    return click.option(
        flag, type=Whole(*limits), default=default, show_default=True, metavar="NUMBER", help=description
    )
