"""gpunodes endpoint set"""

from __future__ import annotations

import click

from gpunodes.cli import common, terminal
from gpunodes.operations import checked, endpoint_set
from gpunodes.views import text


@click.command()
@click.argument("address", metavar="ADDRESS[:PORT]")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(endpoint_set.OPERATION)
def command(address: str, yes: bool, flags: common.CommonOptions) -> int:
    """Move an existing cluster to another endpoint, without a new cluster.

    ADDRESS is a name or IPv4 address that leads to every control plane, or the virtual address of the setting
    gpunodes_control_plane_vip; PORT is 6443 by default. API servers and kubelets are restarted, one after the other
    and a few at a time; pods keep running. Run it again after an interruption, and for workers that did not respond.
    """
    target = endpoint_set.parse(address)
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    confirmed = yes or flags.options.dry_run
    terminal.check_confirmable(f"endpoint set {target}", yes=confirmed)
    terminal.confirm(f"All machines of the cluster reach its API at {target} afterwards", yes=confirmed)
    view = text.progress()
    try:
        result = endpoint_set.run(inventory, target, view, flags.options)
    finally:
        view.close()
    if result.exit_code == 0 and not result.dry_run:
        terminal.line(
            "the earlier name stays in the API servers' certificates; `gpunodes kubeconfig` fetches a kubeconfig with "
            "the new endpoint",
            err=True,
        )
    return common.show(result, as_json=flags.as_json)
