"""gpunodes storage up"""

from __future__ import annotations

import click

from gpunodes.cli import common, rollout_options
from gpunodes.operations import checked
from gpunodes.operations.storage import commands
from gpunodes.views import text


@click.command()
@common.run_options(commands.UP)
def command(flags: common.CommonOptions) -> int:
    """Let pods on all nodes use shared storage.

    For the shares of the setting gpunodes_storage. A share without a server is served by the machine of the inventory's
    group storage. Run the same command again after a change of the setting, and after new nodes have joined.
    """
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    view = text.progress()
    try:
        result = commands.up(inventory, view, rollout_options.lines(), flags.options)
    finally:
        view.close()
    return common.show(result, as_json=flags.as_json)
