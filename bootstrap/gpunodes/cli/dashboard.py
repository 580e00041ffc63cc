"""gpunodes dashboard"""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.operations import checked, dashboard
from gpunodes.views import document


@click.command()
@click.option(
    "--port",
    type=options.Whole(1, 65535),
    default=4466,
    show_default=True,
    metavar="NUMBER",
    help="Port of this computer's loopback address.",
)
@click.option("--no-browser", is_flag=True, help="Show the address only; open no browser.")
@options.inventory_option
@options.json_tunnel_option
def command(port: int, no_browser: bool, inventory_path: Path, as_json: bool) -> int:
    """Open the dashboard of the cluster in a browser, over SSH.

    It is Headlamp, the add-on headlamp. The command prints a token for its login, which may view nodes, and what is in
    namespaces except Secrets; it ends after an hour. Ctrl-C ends the connection.
    """
    if terminal.columns() is None and not as_json:
        raise WrongInput(
            "the output is not a terminal",
            "a terminal: the output has a token",
            "do not redirect it; or add --json, for a program that keeps the token to itself",
        )

    def show(found: dashboard.Dashboard) -> None:
        if as_json:
            token = {"token": found.token.text, "token_end": found.token.end}
            terminal.line(document.tunnel({"url": found.url, "port": port, **token}))
        else:
            end = time.strftime("%H:%M", time.localtime(found.token.end))
            terminal.line(found.url)
            terminal.progress(f"token for the login, until {end}; it is shown once:")
            terminal.line(found.token.text)
        terminal.progress("Ctrl-C ends the connection")
        if not no_browser and terminal.has_screen():
            webbrowser.open(found.url)

    dashboard.run(checked.inventory(inventory_path, checked.Needs.CLUSTER), port, show)
    return ExitCode.DONE
