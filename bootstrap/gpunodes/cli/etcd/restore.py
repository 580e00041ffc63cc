"""gpunodes etcd restore"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import click

from gpunodes.cli import common, terminal
from gpunodes.errors import ExitCode
from gpunodes.operations import checked, nodes
from gpunodes.operations.etcd import restore
from gpunodes.views import text


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--identity",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="age's identity file, for a backup that is encrypted with age.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(restore.OPERATION)
def command(file: Path, identity: Path | None, yes: bool, flags: common.CommonOptions) -> int:
    """Replace the state of the cluster by that of a backup.

    FILE is a backup of this cluster; it is checked completely first. Everything that changed in the cluster since then
    is lost. All control planes are stopped, and the first one is restored as the only member of etcd; reset and join
    the others afterwards. Its old data is kept. An interrupted restore is continued by the same command.
    """
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    source = restore.Source(file, identity)
    machines = inventory.control_planes()
    names = ", ".join(machine.name for machine in machines)
    yes = yes or flags.options.dry_run
    terminal.check_confirmable(f"etcd restore of {names}", yes=yes)
    backup = source.check()
    view = text.progress()
    try:
        chosen = nodes.choose("etcd restore", inventory, machines, view, needs_cluster=False)
    finally:
        view.close()
    for line in chosen.lines:
        terminal.line(line, err=True)
    restore.check_all_respond(chosen.seen)
    unknown = restore.unknown_control_planes(chosen)
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(backup.about["time"]))
    for name in unknown:
        terminal.line(
            f"warning: the control plane {name} is not in the inventory and not ready: switch it off, since an etcd "
            "that runs there would be a second cluster",
            err=True,
        )
    terminal.confirm(
        f"The state of the cluster on {names} is replaced by that of {made}, from {backup.machine} with Kubernetes "
        f"{backup.about['kubernetes']}; everything that changed since then is lost, and programs keep their version",
        yes=yes,
    )
    if not flags.options.dry_run:
        restore.upload(inventory, source, backup, terminal.progress)
    flags = common.requesting(flags, restore.variables(backup))
    flags = dataclasses.replace(flags, options=dataclasses.replace(flags.options, seen=chosen.seen))
    code = common.execute(restore.OPERATION, inventory, machines, flags)
    if code == ExitCode.DONE and not flags.options.dry_run:
        for step in restore.next_steps(inventory):
            terminal.line(f"now run: {step}", err=True)
    return code
