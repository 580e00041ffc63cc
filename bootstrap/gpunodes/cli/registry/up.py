"""gpunodes registry up"""

from __future__ import annotations

import click

from gpunodes.cli import common, rollout_options, terminal
from gpunodes.operations import checked
from gpunodes.operations.registry_server import commands
from gpunodes.views import registry as view_of
from gpunodes.views import text


@click.command()
@click.option(
    "--new-password",
    is_flag=True,
    help="Make another password; the old one ends, and the namespaces that may pull get the new one.",
)
@common.run_options(commands.UP)
def command(new_password: bool, flags: common.CommonOptions) -> int:
    """Start a registry in the cluster, which all nodes trust.

    Its images are in a folder of a share of gpunodes_storage. It has a fixed address, a certificate of a CA of its own,
    and a user whose password is printed once. Run the same command again to renew the certificate, and after machines
    that were off have come back. After --new-password nobody pulls until the registry has started again, and who pushes
    logs in again.
    """
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)

    new: list[commands.Started] = []

    def shown(made: commands.Started) -> None:
        # Before anything else can fail: a command that is interrupted must not lose it.
        if made.password and not flags.as_json:
            terminal.report(view_of.password(made))
        elif made.password:
            new.append(made)

    view = text.progress()
    try:
        made, ended = commands.up(
            inventory, view, rollout_options.lines(), flags.options, shown, new_password=new_password
        )
    except BaseException:
        if new:
            terminal.final(view_of.dump_started(new[-1], None))
        raise
    finally:
        view.close()
    if flags.as_json:
        terminal.echo(view_of.dump_started(made, ended))
        return int(ended.exit_code)
    code = common.show(ended, as_json=False)
    if not ended.interrupted:
        terminal.report(view_of.started(made, dry_run=flags.options.dry_run))
    return code
