"""gpunodes history"""

from __future__ import annotations

import click

from gpunodes.cli import common, complete


@click.command()
@click.argument("machine", default="", shell_complete=complete.machines)
@common.output_option
def command(machine: str, output: str) -> int:
    """Show the recorded verdicts, repairs and burn-ins of one machine, or of all.

    MACHINE is a name of the inventory. The history has what this user did on this controller; the Events in
    `kubectl describe node` also show repairs of other users.
    """
    import dataclasses

    from gpunodes.errors import ExitCode
    from gpunodes.operations import history
    from gpunodes.views import document, repair

    entries = [dataclasses.asdict(entry) for entry in history.entries(machine)]
    common.show_output(
        output,
        lambda: document.dump({"schema": "gpunodes.history/1", "entries": entries}),
        lambda columns: repair.history(entries, columns, machine),
    )
    return ExitCode.DONE
