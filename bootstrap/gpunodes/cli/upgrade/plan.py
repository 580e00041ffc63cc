"""gpunodes upgrade plan"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common
from gpunodes.errors import ExitCode
from gpunodes.operations import checked, upgrade_plan
from gpunodes.views import text
from gpunodes.views import upgrade as view_of


@click.command()
@click.argument("target")
@common.ansible_options
@common.output_option
def command(target: str, inventory_path: Path, output: str) -> int:
    """Show the order of an upgrade, and what is in its way; nothing is changed.

    TARGET is the next minor of Kubernetes, such as 1.37, or an exact version, such as 1.36.4. All machines of the
    cluster are read. Workers in maintenance, and those that are off, do not respond or are not ready, are passed over.

    Exit code 1 when something is in the way, 2 for a downgrade or a skipped minor, 3 when machines are passed over.
    """
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    view = text.progress()
    try:
        found = upgrade_plan.run(inventory, target, view).plan
    finally:
        view.close()
    common.show_output(output, lambda: view_of.document_of(found), lambda columns: view_of.table_of(found, columns))
    if not found.possible:
        return ExitCode.FAILED
    return ExitCode.PARTLY if found.passed_over else ExitCode.DONE
