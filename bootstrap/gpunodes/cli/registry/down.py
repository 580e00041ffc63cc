"""gpunodes registry down"""

from __future__ import annotations

import click

from gpunodes.cli import common, rollout_options, terminal
from gpunodes.errors import ExitCode
from gpunodes.operations import checked
from gpunodes.operations.registry_server import commands
from gpunodes.views import registry as view_of
from gpunodes.views import text


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(commands.DOWN)
def command(yes: bool, flags: common.CommonOptions) -> int:
    """Take the registry away; its images stay on the share.

    Removes the logins of all namespaces, the registry, the nodes' trust, and the CA with its key. A later `registry up`
    has the same images, a new CA and a new password. Pods with images of it run until one of their containers restarts:
    from Kubernetes 1.35 on that needs the registry, also where the machine has the image already.
    """
    yes = yes or flags.options.dry_run
    terminal.check_confirmable(commands.DOWN.name, yes=yes)
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    view = text.progress()
    try:
        removed, folder, ended = commands.down(
            inventory, view, rollout_options.lines(), flags.options, lambda what: terminal.confirm(what, yes=yes)
        )
    finally:
        view.close()
    if flags.as_json:
        terminal.echo(view_of.dump_removed(removed, folder, ended))
        return int(ended.exit_code if ended else ExitCode.DONE)
    code = common.show(ended, as_json=False) if ended else int(ExitCode.DONE)
    if code == ExitCode.DONE and not flags.options.dry_run:
        terminal.report(view_of.removed(removed, folder))
    return code
