"""gpunodes version"""

from __future__ import annotations

import platform
from importlib import metadata

import click

from gpunodes import __version__
from gpunodes.cli import options, terminal

_PACKAGES = ("ansible-core", "ansible-runner")


@click.command()
@options.json_option
def command(as_json: bool) -> None:
    """Show the versions of gpunodes and of the software that it runs on."""
    found = {"gpunodes": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["python"] = platform.python_version()
    if as_json:
        from gpunodes.views import document

        terminal.echo(document.dump({"schema": "gpunodes.version/1", "versions": found}))
        return
    width = max(map(len, found))
    terminal.echo("\n".join(f"{name:<{width}}  {version}" for name, version in found.items()))
