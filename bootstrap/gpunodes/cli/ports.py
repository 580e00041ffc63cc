"""gpunodes ports"""

from __future__ import annotations

import click

from gpunodes.cli import options, terminal


@click.command()
@options.json_option
def command(as_json: bool) -> None:
    """List the ports that must be open between the machines.

    For those who manage the network: each port with the machines on which it must be open, and from where. No machine
    is contacted. `gpunodes help --page ports` says what gpunodes opens in a machine's own firewall.
    """
    from gpunodes.views import ports

    terminal.echo(ports.document() if as_json else ports.text(terminal.columns()))
