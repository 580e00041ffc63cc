"""Drain a node, delete it from the cluster and reset its machine."""

from collections.abc import Collection, Sequence

from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(name="remove", playbook="remove.yml", phases=(phases.DRAIN, phases.MEMBER, phases.RESET))


def check_removable(inventory: Inventory, machines: Sequence[Machine], *, dead: bool) -> None:
    """Raise WrongInput for machines that `remove` cannot remove together.

    ``dead``: the machines are gone. Whether etcd would work without a control plane is checked during the run.
    """
    controls = [machine for machine in machines if machine.role is Role.CONTROL_PLANE]
    names = ", ".join(machine.name for machine in controls)
    if controls and len(controls) == len(inventory.control_planes()):
        raise WrongInput(
            f"{names} {'is the last control plane' if len(controls) == 1 else 'are all control planes'}",
            "another control plane that keeps the cluster",
            "`gpunodes reset` ends the cluster",
        )
    if len(controls) > 1:
        raise WrongInput(
            f"{names} are {len(controls)} control planes",
            "one: etcd must work after each removal",
            "remove them one after the other",
        )
    if dead and (not controls or len(machines) > 1):
        raise WrongInput(
            "--dead is for one control plane that is gone",
            "the name of that control plane alone",
            "remove workers without --dead",
        )


def check_responses(machines: Sequence[Machine], responding: Collection[str], *, dead: bool) -> None:
    """Raise WrongInput for a control plane that responds, if it is said to be ``dead``, or that does not respond."""
    for machine in machines:
        if machine.role is Role.CONTROL_PLANE and (machine.name in responding) == dead:
            raise WrongInput(
                f"{machine.name} responds" if dead else f"{machine.name} does not respond",
                "a control plane that is gone" if dead else "a control plane that can be reset",
                "remove it without --dead, so that it is reset"
                if dead
                else "start it; if it is gone for ever, switch it off and use --dead",
            )
