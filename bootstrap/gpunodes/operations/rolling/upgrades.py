"""The works that upgrade machines: Kubernetes, the operating system, and the GPU driver. Each is a playbook."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.engine.fleet import Fleet, InventoryFleet
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.operations import gpu_upgrade_plan, os_plan, upgrade_rollback
from gpunodes.operations.rolling.playbook import PlaybookWork
from gpunodes.operations.rolling.work import Target
from gpunodes.planner import gpu, versions
from gpunodes.planner.gpu_upgrade import Upgrades
from gpunodes.planner.os_upgrade import OsPlans
from gpunodes.planner.upgrade_model import Part
from gpunodes.rollout.record import Disruption

CONTROL_PLANES, KUBELETS, ROLLBACK, SYSTEM, DRIVER = (
    "kubernetes-control-planes",
    "kubernetes",
    "kubernetes-rollback",
    "os",
    "gpu-driver",
)
"""Their names in records."""


class ControlPlaneUpgrade(PlaybookWork):
    """Upgrades the static pods of a control plane. Its node keeps its pods."""

    def __init__(self, inventory: Inventory, target: str) -> None:
        self._target = _exact(target)
        variables = {"upgrade_target": self._target, "upgrade_parts": [Part.CONTROL_PLANE.value]}
        super().__init__(
            inventory,
            CONTROL_PLANES,
            "upgrade.yml",
            Disruption.NOTHING,
            parameters={"target": self._target},
            variables=variables,
        )

    def needed(self, target: Target) -> str:  # noqa: ARG002 - the plan selected the machines, and kubeadm is idempotent
        """As ``Work.needed``."""
        return f"its control plane becomes {self._target}"


class KubeletUpgrade(PlaybookWork):
    """Upgrades the kubelet of a node that was drained; a worker can go back to its older one."""

    def __init__(self, inventory: Inventory, target: str) -> None:
        self._target = _exact(target)
        variables = {"upgrade_target": self._target, "upgrade_parts": [Part.NODE.value]}
        super().__init__(
            inventory,
            KUBELETS,
            "upgrade.yml",
            Disruption.NODE,
            parameters={"target": self._target},
            variables=variables,
            undoes=True,
        )

    def needed(self, target: Target) -> str:  # noqa: ARG002 - as above
        """As ``Work.needed``."""
        return f"its kubelet becomes {self._target}"

    def undo(self, target: Target) -> None:
        """As ``Work.undo``; raises GpunodesError for a control plane."""
        if target.role is Role.CONTROL_PLANE:
            raise GpunodesError(
                "the kubelet of a control plane is not taken back",
                "a kubelet of its control plane's version",
                "correct the cause, then `gpunodes rollout resume`",
            )
        super().undo(target)


class Rollback(PlaybookWork):
    """Takes a worker back to the kubelet before its last upgrade. ``prepare`` fails for one that has no way back."""

    def __init__(self, inventory: Inventory, planned: Mapping[str, str] | None = None) -> None:
        """``planned`` are the earlier versions by machine, "" for one that has it; without it each machine is read."""
        returns = {"upgrade_returns": True}
        super().__init__(inventory, ROLLBACK, "upgrade.yml", Disruption.NODE, parameters={}, variables=returns)
        self._planned = planned

    def needed(self, target: Target) -> str:
        """As ``Work.needed``. A machine that was begun goes back to the end."""
        if _is_begun(target):
            return "its kubelet becomes the earlier one"
        planned = self._planned
        if planned is None:
            folder = self._own_folder(target, "read")
            planned = upgrade_rollback.of_machine(self._inventory, target.machine, folder)
        if target.name not in planned:
            raise GpunodesError(
                f"{target.name} did not respond when its earlier version was read",
                "a worker whose way back was checked",
                "run the same command again",
            )
        version = planned[target.name]
        return f"its kubelet becomes {version}" if version else ""

    def apply(self, target: Target) -> None:
        """Install the earlier kubelet, and verify that its node reports it."""
        self.undo(target)

    def verify(self, target: Target) -> str:  # noqa: ARG002 - apply has verified it
        """Nothing further."""
        return ""


class SystemUpgrade(PlaybookWork):
    """Upgrades the packages of a node's operating system; ``reboot``: it is rebooted if one is due."""

    def __init__(self, inventory: Inventory, *, security: bool, reboot: bool, plan: OsPlans | None = None) -> None:
        """``plan`` was read just before; a machine that it does not have is read."""
        super().__init__(
            inventory,
            SYSTEM,
            "os_upgrade.yml",
            Disruption.NODE,
            parameters={"security": _text(security), "reboot": _text(reboot)},
            variables={"os_upgrade_security": security, "os_upgrade_reboot": reboot},
        )
        self._security, self._reboot = security, reboot
        self._planned = {each.name: each for each in (plan.machines if plan else ())}

    def needed(self, target: Target) -> str:
        """As ``Work.needed``. A machine that was begun is upgraded to the end: its packages may be half installed."""
        if _is_begun(target):
            return "its packages are upgraded"
        planned = self._planned.get(target.name)
        if planned is None:
            folder = self._own_folder(target, "read")
            planned = os_plan.of_machine(self._inventory, target.machine, folder, security=self._security)
        if planned.unreadable:
            raise GpunodesError(planned.unreadable)
        return planned.needed(reboot=self._reboot)


class DriverUpgrade(PlaybookWork):
    """Replaces the driver of a node's GPUs. Only pods that use GPUs leave, unless the machine may be rebooted."""

    def __init__(self, inventory: Inventory, driver: str, *, reboot: bool, plan: Upgrades | None = None) -> None:
        """``plan`` was read just before, and selected the machines; without it each machine is read."""
        gpu.check(gpu.RequestedSoftware("", driver))
        self._driver = driver
        self._plan = plan
        super().__init__(
            inventory,
            DRIVER,
            "gpu_upgrade.yml",
            Disruption.NODE if reboot else Disruption.GPU_PODS,
            parameters={"driver": driver, "reboot": _text(reboot)},
            variables={"gpunodes_driver_branch": driver, "gpu_upgrade_reboot": reboot},
            undoes=True,
        )

    def needed(self, target: Target) -> str:
        """As ``Work.needed``. A machine that was begun is upgraded to the end: its driver may be half installed."""
        becomes = f"its driver becomes {self._driver}"
        if _is_begun(target):
            return becomes
        if self._plan:
            if why := self._plan.silent.get(target.name):
                raise GpunodesError(why)
            return becomes
        folder = self._own_folder(target, "read")
        found = gpu_upgrade_plan.of_machine(
            self._inventory, target.machine, folder, {"gpunodes_driver_branch": self._driver}
        )
        if found.unreachable:
            raise GpunodesError(found.unreachable)
        if found.upgrade is None:
            raise GpunodesError("; ".join(map(str, found.conflicts)))
        return becomes if found.upgrade.needed else ""


def control_planes(fleet: Fleet, parameters: Mapping[str, str]) -> ControlPlaneUpgrade:
    """Make the work of a record; raises WrongInput for wrong parameters, as the following."""
    return ControlPlaneUpgrade(inventory_of(fleet), parameters.get("target", ""))


def kubelets(fleet: Fleet, parameters: Mapping[str, str]) -> KubeletUpgrade:
    """As ``control_planes``."""
    return KubeletUpgrade(inventory_of(fleet), parameters.get("target", ""))


def rollback(fleet: Fleet, _: Mapping[str, str]) -> Rollback:
    """As ``control_planes``."""
    return Rollback(inventory_of(fleet))


def system(fleet: Fleet, parameters: Mapping[str, str]) -> SystemUpgrade:
    """As ``control_planes``."""
    security, reboot = _flag(parameters, "security"), _flag(parameters, "reboot")
    return SystemUpgrade(inventory_of(fleet), security=security, reboot=reboot)


def driver(fleet: Fleet, parameters: Mapping[str, str]) -> DriverUpgrade:
    """As ``control_planes``."""
    return DriverUpgrade(inventory_of(fleet), parameters.get("driver", ""), reboot=_flag(parameters, "reboot"))


def inventory_of(fleet: Fleet) -> Inventory:
    """The inventory of a fleet, whose machines playbooks reach; raises WrongInput without one."""
    if not isinstance(fleet, InventoryFleet):
        raise WrongInput("this work is a playbook", "machines of an inventory", "name the inventory with -i")
    return fleet.inventory


def _is_begun(target: Target) -> bool:
    """Whether an unfinished roll-out has marked its node: what it left there is no longer what a plan expects."""
    return target.node is not None and bool(target.node.rollout)


def _exact(target: str) -> str:
    found = versions.check(target)
    if not versions.is_exact(found):
        raise WrongInput(f"{target!r} is no exact version", "one such as 1.36.3", "name the patch release")
    return found


def _text(flag: bool) -> str:
    return "yes" if flag else "no"


def _flag(parameters: Mapping[str, str], name: str) -> bool:
    value = parameters.get(name, "")
    if value not in {"yes", "no"}:
        raise WrongInput(f"{name} of the roll-out is {value!r}", "yes or no", "`gpunodes rollout abandon` forgets it")
    return value == "yes"
