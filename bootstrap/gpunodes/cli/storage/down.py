"""gpunodes storage down"""

from __future__ import annotations

import click

from gpunodes.cli import common, rollout_options, terminal
from gpunodes.operations import checked
from gpunodes.operations.storage import commands
from gpunodes.views import text


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(commands.DOWN)
def command(yes: bool, flags: common.CommonOptions) -> int:
    """Take shared storage away; the data stays.

    Removes the volumes and claims of gpunodes, then the NFS client of each node, then the exports and the NFS server of
    the group storage, as far as gpunodes installed them. Refused while a pod uses a claim, or a node has a share
    mounted; the NFS server stays while any machine is connected to it.
    """
    yes = yes or flags.options.dry_run
    terminal.check_confirmable(commands.DOWN.name, yes=yes)
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    terminal.confirm("the claims of all shares are deleted; the data stays on its server", yes=yes)
    view = text.progress()
    try:
        result = commands.down(inventory, view, rollout_options.lines(), flags.options)
    finally:
        view.close()
    return common.show(result, as_json=flags.as_json)
