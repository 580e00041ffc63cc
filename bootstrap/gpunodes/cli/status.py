"""gpunodes status"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import click

from gpunodes.cli import common, options, terminal
from gpunodes.errors import ExitCode, GpunodesError, Interrupted, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import printable
from gpunodes.operations import checked, status
from gpunodes.views import certificates, document, drift, text


@click.command()
@common.ansible_options
@click.option(
    "--watch",
    type=options.Number(min=1),
    metavar="SECONDS",
    help="Repeat every so many seconds, until Ctrl-C, also while no control plane responds.",
)
@common.output_option
def command(inventory_path: Path, watch: float | None, output: str) -> int:
    """Show the nodes of the cluster and their states.

    Machines of the group gpu_hosts are listed too; they are not meant to be nodes. Those that the autoscaler keeps off
    have no node, and are listed with the reason. A control plane that does not respond, while another one does, is a
    warning. How control planes and kubelets differ from their settings is listed, too; `gpunodes rollout apply` applies
    those of control planes, with --kubelets those of kubelets. Exit code 3 when a node is not ready.
    """
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    if watch is None:
        return _show(_read(inventory), output)
    if output in {"json", "yaml"}:
        raise WrongInput(f"--watch repeats, and --output {output} prints one document", "one of them", "leave one out")
    while True:
        began = time.monotonic()
        try:
            found: status.ClusterStatus | GpunodesError = _read(inventory)
        except Interrupted:
            raise
        except GpunodesError as error:
            found = error
        # The last state stays on the screen until the next one is known.
        click.clear()
        if isinstance(found, GpunodesError):
            terminal.error(found)
        else:
            _show(found, output)
        time.sleep(max(0.0, began + watch - time.monotonic()))


def _read(inventory: Inventory) -> status.ClusterStatus:
    view = text.progress()
    try:
        return status.run(inventory, view)
    finally:
        view.close()


def _show(found: status.ClusterStatus, output: str) -> int:
    """Print the state; returns the exit code."""
    common.show_output(
        output,
        lambda: document.dump({"schema": "gpunodes.status/1", **dataclasses.asdict(found)}),
        lambda columns: _table(found, columns),
    )
    return ExitCode.DONE if all(node.ready for node in found.nodes) else ExitCode.PARTLY


def _table(found: status.ClusterStatus, columns: int | None) -> str:
    rows = [("NODE", "MACHINE", "ROLE", "STATE", "VERSION", "ADDRESS", "")]
    rows += [
        (
            node.name,
            node.machine or "-",
            node.role,
            "ready" if node.ready else "NOT READY",
            node.version,
            node.address,
            node.reason,
        )
        for node in found.nodes
    ]
    rows += [("-", name, "-", "no node", "-", "-", "") for name in found.missing]
    rows += [("-", name, "-", "off", "-", "-", why) for name, why in found.off.items()]
    rows += [("-", name, "gpu host", "-", "-", "-", "") for name in found.gpu_hosts]
    parts = [
        f"Kubernetes {found.version} at {found.endpoint}{_holders(found)}",
        text.table(rows, columns),
        _etcd(found, columns),
        certificates.first_ends(found.certificates),
        drift.lines(found.drift, columns),
        "\n".join(printable(f"warning: {warning}") for warning in found.warnings),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part)


def _etcd(found: status.ClusterStatus, columns: int | None) -> str:
    """The members of etcd, or why they are unknown."""
    if found.etcd_problem:
        return printable(f"etcd: its members are unknown: {found.etcd_problem}")
    rows = [("ETCD MEMBER", "ROLE", "STATE", "DATABASE")]
    for each in found.etcd:
        role = "learner" if each.learner else "leader" if each.leader else "member"
        state = "healthy" if each.healthy else "NOT HEALTHY" if each.name else "never started"
        size = f"{each.db_size / (1 << 20):.1f} MiB" if each.healthy else "-"
        rows.append((each.name or each.id, role, state, size))
    return text.table(rows, columns) if found.etcd else ""


def _holders(found: status.ClusterStatus) -> str:
    """Who has the virtual address, "" without one."""
    if not found.virtual_address:
        return ""
    holders = " and ".join(found.holders) or "no control plane that responds"
    problem = "; only one may have it: see `journalctl -u keepalived` there" if len(found.holders) > 1 else ""
    return f"\nvirtual address {found.virtual_address}: {holders}{problem}"
