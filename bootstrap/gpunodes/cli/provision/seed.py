"""gpunodes provision seed"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import WrongInput
from gpunodes.operations import public_keys, seed
from gpunodes.views import document

DEFAULT_USER = "gpunodes"


@click.command()
@click.option("--user", metavar="NAME", help="The user; by default that of the inventory's machines, else gpunodes.")
@click.option(
    "--key",
    "keys",
    type=click.Path(path_type=Path),
    metavar="FILE.pub",
    multiple=True,
    required=True,
    help="A file with SSH public keys; may be repeated.",
)
@click.option("--hostname", metavar="NAME", help="The host name, which becomes the node's name; by default DHCP's.")
@click.option(
    "--format",
    "kind",
    type=click.Choice([each.value for each in seed.Format]),
    default=seed.Format.CLOUD_INIT.value,
    show_default=True,
    help="cloud-init for images, preseed for Debian's installer, kickstart for that of the RHEL family.",
)
@click.option("--disk", metavar="PATH", help="The disk that the installer erases; required by preseed and kickstart.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the files into this folder with mode 0600: for cloud-init user-data and meta-data, a NoCloud seed.",
)
@options.inventory_option
@options.json_option
def command(
    user: str | None,
    keys: tuple[Path, ...],
    hostname: str | None,
    kind: str,
    disk: str | None,
    output: Path | None,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Print what makes a bare machine ready for gpunodes: cloud-init, preseed or kickstart.

    A user with these SSH keys and passwordless sudo, Python 3 and an SSH server; no password logins and no swap.
    Nothing is contacted or changed. `gpunodes join ADDRESS --user NAME --key FILE` continues when the machine responds.
    """
    made = seed.Seed(
        user=user if user is not None else _inventory_user(inventory_path),
        keys=public_keys.read(keys),
        hostname=hostname or "",
        disk=disk or "",
    )
    files = seed.render(made, seed.Format(kind))
    paths = seed.write(output, files) if output else []
    if as_json:
        terminal.echo(
            document.dump(
                {
                    "schema": "gpunodes.seed/1",
                    "format": kind,
                    "user": made.user,
                    "hostname": made.hostname,
                    "keys": list(made.keys),
                    "files": files,
                    "paths": [str(path) for path in paths],
                }
            )
        )
    elif output:
        for path in paths:
            terminal.echo(str(path))
    else:
        terminal.echo(next(iter(files.values())).rstrip("\n"))
    return 0


def _inventory_user(path: Path) -> str:
    """The SSH user of the inventory's machines; raises WrongInput if they have several, or for a missing -i file."""
    source = click.get_current_context().get_parameter_source("inventory_path")
    if not path.exists() and source is click.core.ParameterSource.DEFAULT:
        return DEFAULT_USER
    from gpunodes.operations import checked

    inventory = checked.inventory(path, checked.Needs.MACHINES)
    users = {
        str(inventory.rendered(each.name, "ansible_user").get("ansible_user") or "") for each in inventory.machines()
    } - {""}
    if len(users) > 1:
        raise WrongInput(f"the machines of {path} have the users {', '.join(sorted(users))}", "one user", "use --user")
    return next(iter(users), DEFAULT_USER)
