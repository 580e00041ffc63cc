"""--user, --key and --port: machines that are given by their addresses. Nothing heavy is imported here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpunodes.cli import terminal
from gpunodes.cli.options import Whole
from gpunodes.errors import WrongInput
from gpunodes.model import Role

if TYPE_CHECKING:
    from gpunodes.inventory import Inventory
    from gpunodes.model import Kubeconfig, Machine
    from gpunodes.operations.checked import Needs

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Connection:
    """SSH connection of machines that the inventory does not have."""

    variables: dict[str, object]


def options(command: _Command) -> _Command:
    """--user, --key and --port, passed as ``connection``; raises WrongInput for invalid values."""

    @click.option("--user", metavar="NAME", help="SSH user of machines that are not in the inventory.")
    @click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Their SSH private key.")
    @click.option("--port", type=Whole(1, 65535), metavar="PORT", help="Their SSH port.")
    @functools.wraps(command)
    def wrapped(*args: Any, user: str | None, key: Path | None, port: int | None, **kwargs: Any) -> Any:
        return command(*args, connection=_connection(user, key, port), **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


def inventory(
    path: Path,
    machines: Sequence[str],
    connection: Connection,
    needs: Needs | None = None,
    kubeconfig: Kubeconfig | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Inventory, bool]:
    """The inventory of a command, and whether it is none but one of the addresses ``machines``.

    It is that with --user, --key, --port or ``settings`` of these machines, and if there is no inventory while all
    machines are addresses. Raises WrongInput.
    """
    from gpunodes.inventory import addressed
    from gpunodes.inventory.names import is_address
    from gpunodes.operations import checked

    given = bool(connection.variables or settings)
    if not given and (path.exists() or not machines or not all(map(is_address, machines))):
        return checked.inventory(path, needs or checked.Needs.NEW_CLUSTER, kubeconfig), False
    if not machines:
        raise WrongInput(
            "--user, --key or --port without a machine",
            "addresses of machines: the inventory is not read with these options",
            "name the addresses, or leave the options out",
        )
    return addressed.inventory(machines, connection.variables, kubeconfig, settings or {}), True


def warn_alone(inventory: Inventory, machines: Sequence[Machine], *, addressed: bool) -> None:
    """Print a warning where an inventory may lack its control planes: its workers are checked by themselves."""
    workers = any(machine.role is Role.WORKER for machine in machines)
    if workers and not addressed and not inventory.machines(Role.CONTROL_PLANE) and not inventory.kubeconfig:
        found = f"{inventory.title} has no machine in the group control_plane"
        terminal.line(f"warning: {found}: the machines are checked by themselves, without a cluster", err=True)


def check_cluster(*, addressed: bool, kubeconfig: Kubeconfig | None, without_cluster: bool) -> None:
    """Raise WrongInput for addresses without an inventory whose cluster is not known."""
    if addressed and not kubeconfig and not without_cluster:
        raise WrongInput(
            "addresses without an inventory, and neither --kubeconfig nor --without-cluster",
            "the cluster whose nodes they are",
            "add --kubeconfig FILE, or --without-cluster for machines without one",
        )


def _connection(user: str | None, key: Path | None, port: int | None) -> Connection:
    variables: dict[str, object] = {}
    if user:
        if not all(character.isalnum() or character in "._-" for character in user):
            raise WrongInput(f"{user!r} is not a user name", "letters, digits, dots and dashes", "correct --user")
        variables["ansible_user"] = user
    if key:
        variables["ansible_ssh_private_key_file"] = str(_readable_key(key))
    if port:
        variables["ansible_port"] = port
    return Connection(variables)


def _readable_key(key: Path) -> Path:
    path = key.expanduser().absolute()
    try:
        beginning = path.read_text(encoding="utf-8", errors="replace")[:100]
    except OSError as error:
        raise WrongInput(
            f"the key {key} cannot be read: {error.strerror}", "a readable private key", "correct --key"
        ) from error
    if "PRIVATE KEY" not in beginning:
        raise WrongInput(
            f"{key} is not an SSH private key", "a file that begins with -----BEGIN ... PRIVATE KEY", "correct --key"
        )
    return path
