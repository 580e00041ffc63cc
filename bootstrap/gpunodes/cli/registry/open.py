"""gpunodes registry open"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode


@click.command()
@options.number_option("--port", (1024, 65535), 5000, "The port of this computer, on 127.0.0.1.")
@options.inventory_option
@options.json_tunnel_option
def command(port: int, inventory_path: Path, as_json: bool) -> int:
    """Forward a port of this computer to the registry, to push.

    A port of 127.0.0.1 leads over SSH to a control plane, and from there over the cluster's API to the registry, until
    Ctrl-C. Docker takes a registry on 127.0.0.1 without its CA.
    """
    from gpunodes.operations import checked
    from gpunodes.operations.registry_server import verify
    from gpunodes.views import document

    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    with verify.reached(inventory, port, terminal.progress) as (opened, address, _):
        push = f"127.0.0.1:{opened.port}"
        if as_json:
            terminal.line(document.tunnel({"port": opened.port, "push": push, "pull": address}))
        else:
            terminal.line(f"push to {push}/NAME:TAG until Ctrl-C; pods use {address}/NAME:TAG")
        try:
            opened.follow()
        except KeyboardInterrupt:
            terminal.progress("closed; the registry goes on")
    return ExitCode.DONE
