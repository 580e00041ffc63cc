"""gpunodes etcd restore"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import click

from gpunodes.cli import common, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import checked, nodes
from gpunodes.operations.etcd import restore
from gpunodes.views import text


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--identity",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="age's identity file, for a backup that is encrypted with age.",
)
@click.option(
    "--abort",
    is_flag=True,
    help="Give an unfinished restore up: start all control planes with their old data. Without FILE.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(restore.OPERATION)
def command(file: Path | None, identity: Path | None, abort: bool, yes: bool, flags: common.CommonOptions) -> int:
    """Replace the state of the cluster by that of a backup.

    FILE is a backup of this cluster; it is checked completely first. Everything that changed in the cluster since then
    is lost. All control planes are stopped, and the first one is restored as the only member of etcd; reset and join
    the others afterwards. Its old data is kept. An interrupted restore is continued by the same command, or given up
    with --abort.
    """
    if (file is None) != abort or (abort and identity):
        raise WrongInput(
            "--abort with a file" if abort else "no FILE",
            "the file of a backup, or --abort alone",
            "see `gpunodes etcd restore --help`",
        )
    inventory = checked.inventory(flags.inventory, checked.Needs.CLUSTER)
    yes = yes or flags.options.dry_run
    terminal.check_confirmable(f"etcd restore of {_names(inventory)}", yes=yes)
    if file is None:
        return _abort(inventory, flags, yes=yes)
    source = restore.Source(file, identity)
    backup = source.check()
    chosen = _chosen(inventory)
    unknown = restore.unknown_control_planes(chosen)
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(backup.about["time"]))
    for name in unknown:
        terminal.line(
            f"warning: the control plane {name} is not in the inventory: switch it off, since an etcd that runs there "
            "would be a second cluster",
            err=True,
        )
    terminal.confirm(
        f"The state of the cluster on {_names(inventory)} is replaced by that of {made}, from {backup.machine} with "
        f"Kubernetes {backup.about['kubernetes']}; everything that changed since then is lost, and programs keep their "
        "version",
        yes=yes,
    )
    if not flags.options.dry_run:
        restore.upload(inventory, source, backup, terminal.progress)
    flags = common.requesting(_with(flags, chosen), restore.variables(backup))
    code = common.execute(restore.OPERATION, inventory, inventory.control_planes(), flags)
    if code == ExitCode.DONE and not flags.options.dry_run:
        for step in restore.next_steps(inventory):
            terminal.line(f"now run: {step}", err=True)
    return code


def _abort(inventory: Inventory, flags: common.CommonOptions, *, yes: bool) -> int:
    chosen = _chosen(inventory)
    restore.check_abortable(chosen.seen)
    terminal.confirm(
        f"The restore is given up: {_names(inventory)} start with the state from before it",
        yes=yes,
    )
    return common.execute(restore.ABORT, inventory, inventory.control_planes(), _with(flags, chosen))


def _names(inventory: Inventory) -> str:
    return ", ".join(machine.name for machine in inventory.control_planes())


def _chosen(inventory: Inventory) -> nodes.Chosen:
    """What the control planes report, all of which must respond; their nodes are shown."""
    view = text.progress()
    try:
        chosen = nodes.choose("etcd restore", inventory, inventory.control_planes(), view, needs_cluster=False)
    finally:
        view.close()
    for line in chosen.lines:
        terminal.line(line, err=True)
    restore.check_all_respond(chosen.seen)
    return chosen


def _with(flags: common.CommonOptions, chosen: nodes.Chosen) -> common.CommonOptions:
    return dataclasses.replace(flags, options=dataclasses.replace(flags.options, seen=chosen.seen, confirmed=True))
