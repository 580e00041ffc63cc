"""Deletes join tokens and certificates in the cluster that a run left."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpunodes.engine import control_planes, runner
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory


def leftovers(playbook: str, inventory: Inventory, folder: Path, holder: str, ended: runner.PlayResult) -> None:
    """Delete what the run of ``holder`` left over a control plane that responds, unless it ended well.

    ``playbook`` does that; "" for a run that leaves nothing. The run itself deletes over the control plane that it
    used, which may be why it failed: with a single one there is no other way, unless the run was interrupted.
    """
    if not playbook or ended.ok or (not ended.interrupted and len(inventory.control_planes()) == 1):
        return
    with contextlib.suppress(GpunodesError):
        control = control_planes.choose(inventory).machine.name
        play = runner.Play(playbook, inventory, [control], variables={"revoke_run": holder}, control=control)
        runner.run(play, folder, lambda _: None)
