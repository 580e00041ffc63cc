"""gpunodes jupyter open"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.cli.jupyter import place_options
from gpunodes.errors import ExitCode

# The browser gets the name of this file, which only the user can read: a URL with the token would be in its arguments,
# which everyone on this computer sees. Both values have a fixed form, so nothing needs an escape.
_PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}/lab?token={token}">
<title>Notebook</title>
<p><a href="{url}/lab?token={token}">Open the notebook</a>
"""


@click.command()
@place_options
@options.number_option("--port", (1024, 65535), 8888, "The port of this computer, on 127.0.0.1.")
@click.option("--no-browser", is_flag=True, help="Only forward the port; log in with the token of `jupyter up`.")
@options.inventory_option
@options.json_tunnel_option
def command(name: str, namespace: str, port: int, no_browser: bool, inventory_path: Path, as_json: bool) -> int:
    """Open a notebook in the browser, over SSH, until Ctrl-C.

    A port of 127.0.0.1 leads over SSH to a control plane, and from there over the cluster's API to the notebook. The
    browser logs in by itself; the token is not shown.
    """
    from gpunodes.operations import checked, notebooks
    from gpunodes.planner.notebooks import Place, check_place
    from gpunodes.views import document

    place = Place(name, namespace)
    check_place(place)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    with contextlib.ExitStack() as stack:
        opened, token, _ = stack.enter_context(notebooks.reached(inventory, place, port, terminal.progress))
        shown = not no_browser and stack.enter_context(_browser(opened.url, token))
        url = f"{opened.url}/lab"
        if as_json:
            about = {"name": name, "namespace": namespace, "browser": bool(shown)}
            terminal.line(document.tunnel({"url": url, "port": opened.port, **about}))
        else:
            login = "" if shown else "; log in with the token that `jupyter up` printed"
            terminal.line(f"{url} until Ctrl-C{login}")
        try:
            opened.follow()
        except KeyboardInterrupt:
            terminal.progress("closed; the notebook goes on")
    return ExitCode.DONE


@contextlib.contextmanager
def _browser(url: str, token: str) -> Iterator[bool]:
    """Show the notebook in the user's browser, if there is one on a screen; the file for it is deleted at the end."""
    import secrets
    import webbrowser

    from gpunodes.settings import state_home

    if not (terminal.has_screen() or os.environ.get("BROWSER")):
        yield False
        return
    for left in state_home().glob("notebook-*.html"):
        # Of a command that was killed: one that runs has it locked.
        with contextlib.suppress(OSError), left.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    path = state_home() / f"notebook-{secrets.token_hex(8)}.html"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(_PAGE.format(url=url, token=token))
            file.flush()
            yield webbrowser.open(path.as_uri())
    finally:
        path.unlink(missing_ok=True)
