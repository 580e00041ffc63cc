"""gpunodes reset"""

from __future__ import annotations

from dataclasses import replace

import click

from gpunodes.cli import common, complete, terminal
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.operations import checked, kubeconfig, phases
from gpunodes.operations.reset import OPERATION
from gpunodes.operations.storage import findings


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], yes: bool, flags: common.CommonOptions) -> int:
    """Undo everything that gpunodes changed on machines.

    MACHINES are names, addresses, groups or patterns of the inventory. Resetting all control planes destroys the
    cluster, and removes the context that `kubeconfig --merge` wrote for it; a reset of one of several is refused, since
    the others depend on it. Nodes are not drained: use `gpunodes remove` for that. Each machine's node is shown before
    anything is changed. The inventory needs no control plane.
    """
    inventory = checked.inventory(flags.inventory)
    chosen = inventory.select(machines)
    findings.check_leaving(inventory, chosen)
    consequence = "Everything that gpunodes installed on {} is removed, with the data of Kubernetes"
    # Machines that were only prepared may be in an inventory without a cluster.
    controls = inventory.machines(Role.CONTROL_PLANE)
    operation = OPERATION if controls else replace(OPERATION, without_cluster=True, ends_cluster=False)
    resets = not flags.options.dry_run and phases.RESET.name not in flags.options.skip_phases
    ends = resets and controls and set(controls) <= set(chosen)
    merged = _merged(inventory) if ends else None
    # A broken cluster must not prevent its reset.
    code = common.execute_confirmed(operation, inventory, chosen, flags, consequence, yes=yes, needs_cluster=False)
    if merged and code == ExitCode.DONE:
        contexts = ", ".join(sorted(merged.contexts))
        try:
            kubeconfig.forget(merged)
        except (OSError, WrongInput) as error:
            terminal.progress(f"warning: {merged.path} keeps the context {contexts} of this cluster: {error}")
        else:
            terminal.progress(f"{merged.path}: the context {contexts} of this cluster is removed")
    return code


def _merged(inventory: Inventory) -> kubeconfig.Merged | None:
    """What `kubeconfig --merge` wrote for the cluster that ends; its control plane is asked while it still responds."""
    try:
        return kubeconfig.find_merged(inventory)
    except GpunodesError as error:
        terminal.progress(
            f"warning: {kubeconfig.user_file()} may keep a context of this cluster, since {error.problem.found}; "
            "`kubectl config get-contexts` lists those named gpunodes-..., `kubectl config delete-context` removes one"
        )
        return None
