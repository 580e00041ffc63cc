"""Whether workers can return to the kubelet before their last upgrade. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpunodes.ansible.module_utils.packages import upstream
from gpunodes.engine import journal
from gpunodes.errors import GpunodesError, Interrupted, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.operations import preflight, switched_off
from gpunodes.operations.tracker import RunView, Unseen
from gpunodes.planner import upgrade


def read(inventory: Inventory, machines: Sequence[Machine], view: RunView) -> dict[str, str]:
    """The version to which each machine returns, by name, "" for one that has it; without those that do not respond.

    The roll-out skips the latter. Raises WrongInput if one of the others cannot return, and GpunodesError without a
    cluster that responds.
    """
    on, _ = switched_off.split(inventory, machines, is_rolled_out=True)
    if not on:
        return {}
    view.begin("upgrade rollback", on)
    return _read(inventory, on, journal.open_run("upgrade rollback"), view)


def of_machine(inventory: Inventory, machine: Machine, folder: Path) -> dict[str, str]:
    """The same for one machine, with its files in ``folder``."""
    return _read(inventory, [machine], folder, Unseen())


def _read(inventory: Inventory, machines: Sequence[Machine], folder: Path, view: RunView) -> dict[str, str]:
    seen = preflight.inspect(inventory, machines, folder, view, {}, sources=False)
    if seen.interrupted:
        raise Interrupted
    if seen.cluster is None:
        problem = seen.no_cluster().problem
        raise GpunodesError(f"{seen.control}: {problem.found}", problem.wanted, problem.remedy)
    before = {name: str(facts["kubernetes"].get("before") or "") for name, facts in seen.facts.items()}
    reasons = {name: upgrade.no_way_back(each, str(seen.cluster["version"])) for name, each in before.items()}
    if refused := "; ".join(f"{name}: {why}" for name, why in reasons.items() if why):
        raise WrongInput(refused, "workers with an earlier kubelet that the control plane accepts", "leave these out")
    present = {name: upstream(str(facts["packages"].get("kubelet") or "")) for name, facts in seen.facts.items()}
    return {name: "" if each == present[name] else each for name, each in before.items()}
