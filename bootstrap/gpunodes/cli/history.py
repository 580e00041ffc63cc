"""gpunodes history"""

from __future__ import annotations

import click

from gpunodes.cli import common, complete, terminal


@click.command()
@click.argument("machine", default="", shell_complete=complete.machines)
@common.json_option
def command(machine: str, as_json: bool) -> int:
    """Show the recorded verdicts and repairs of one machine, or of all.

    MACHINE is a name of the inventory. The history has the commands of this user on this controller; the Events of a
    Node show those of others, too.
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
