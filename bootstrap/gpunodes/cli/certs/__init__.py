"""``gpunodes certs``: when certificates end; its sub-command renews them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpunodes.cli import LazyGroup, common, options, terminal
from gpunodes.errors import ExitCode, WrongInput

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {"renew": "Renew the certificates of control planes."}


class _Group(LazyGroup):
    """A group that is a command of its own without a sub-command."""

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx._protected_args and not ctx.args:
            return click.Command.invoke(self, ctx)
        given = [
            name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        if given:
            # They would not be those of the sub-command: another inventory, for example.
            raise WrongInput("options before the sub-command", "options after it", "write them at the end")
        return super().invoke(ctx)


@click.group(cls=_Group, listing={"Commands": COMMANDS}, where="gpunodes.cli.certs")
@common.ansible_options
@options.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Show when the certificates of the nodes end, and renew them.

    Without a sub-command all control planes and workers of the inventory report their certificates and kubeconfigs.
    Exit code 3 when one ends within 30 days, or when a machine does not report.
    """
    if click.get_current_context().invoked_subcommand:
        return ExitCode.DONE  # click calls a group before its sub-command, which has an inventory of its own
    from gpunodes.model import Role
    from gpunodes.operations import checked
    from gpunodes.operations.certs import ends
    from gpunodes.views import certificates, text

    inventory = checked.inventory(inventory_path, checked.Needs.MACHINES)
    view = text.progress()
    try:
        found = ends.run(inventory, inventory.select((), Role.CONTROL_PLANE, Role.WORKER), view)
    finally:
        view.close()
    code = int(ends.exit_code(found))
    if as_json:
        terminal.echo(certificates.dump(found, code))
    else:
        terminal.report(certificates.table(found, terminal.columns()))
    return code
