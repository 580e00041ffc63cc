"""gpunodes history"""

from __future__ import annotations

import click

from gpunodes.cli import common, terminal


@click.command()
@click.argument("machine", default="")
@common.json_option
def command(machine: str, as_json: bool) -> int:
    """Show what was found and done about a machine, or about all.

    MACHINE is a name of the inventory. What is shown was recorded by the commands of this user on this machine; the
    Events of a Node tell of the others'.
    """
    import dataclasses

    from gpunodes.errors import ExitCode
    from gpunodes.operations import history
    from gpunodes.views import document, repair

    entries = [dataclasses.asdict(entry) for entry in history.entries(machine)]
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.history/1", "entries": entries}))
    else:
        terminal.echo(repair.history(entries))
    return ExitCode.DONE
