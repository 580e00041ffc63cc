"""gpunodes gates"""

from __future__ import annotations

import click

from gpunodes.cli import common
from gpunodes.planner import gates
from gpunodes.views import gpu as view_of


@click.command()
@click.argument("version")
@common.output_option
def command(version: str, output: str) -> int:
    """List the kubelet's feature gates that matter for GPUs.

    VERSION is a Kubernetes version, a minor or an exact one. Each gate is shown with its state in that version, its
    default, whether it is locked, and the value that gpunodes sets, with the reason.
    """
    minor, found = gates.minor_of(version), gates.gates(version)
    common.show_output(
        output, lambda: view_of.gates_document(minor, found), lambda columns: view_of.gates(minor, found, columns)
    )
    return 0
