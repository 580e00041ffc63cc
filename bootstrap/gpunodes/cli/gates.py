"""gpunodes gates"""

from __future__ import annotations

import click

from gpunodes.cli import common, terminal
from gpunodes.planner import gates
from gpunodes.views import gpu as view_of


@click.command()
@click.argument("version")
@common.json_option
def command(version: str, as_json: bool) -> int:
    """List the kubelet's feature gates that matter for GPUs.

    VERSION is a Kubernetes version, a minor or an exact one. Each gate is shown with its state in that version, its
    default, whether it is locked, and the value that gpunodes sets, with the reason.
    """
    minor, found = gates.minor_of(version), gates.gates(version)
    terminal.echo(view_of.gates_document(minor, found) if as_json else view_of.gates(minor, found, terminal.columns()))
    return 0
