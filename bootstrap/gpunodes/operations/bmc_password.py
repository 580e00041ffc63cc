"""Change the password of a machine's BMC."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from gpunodes.engine import history
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Power, PowerProblem, PowerState, Trouble, passwords
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.operations import switched_off
from gpunodes.operations.autoscale.objects import Objects
from gpunodes.operations.power import PowerAction, PowerResult, locked, required
from gpunodes.operations.repair.context import Report

_LOGIN_S = 60.0
"""Seconds that a BMC may take to accept its new password."""


def rotate(fleet: InventoryFleet, machine: Machine, path: Path, *, named: bool, report: Report) -> PowerResult:
    """Give a machine's BMC the password in ``path``, a random one if there is no such file, and log in with it.

    Run again after any failure, it continues: the password is in ``path`` before it is sent, and a BMC that has it
    already is only verified. Raises PowerProblem, and WrongInput without a BMC that has a password.
    """
    required(machine, fleet.machine_control(machine).power())
    # A machine that responds has its identity recorded, with which the BMC is compared.
    fleet.scan([machine])
    control = fleet.machine_control(machine, named=named, report=lambda text: report(machine.name, text))
    new = passwords.new(path)
    renewed = control.with_password(new)
    action = PowerAction.ROTATE_PASSWORD
    with locked(fleet, machine, action, report) as confirm:
        bmc = _login(control, renewed)
        if bmc is not None:
            confirm()
            bmc.change_password(new)
        verified = renewed.power()
        state = _verify(verified, path) if verified else PowerState.UNKNOWN
    done = "changed" if bmc is not None else "already changed"
    history.note(machine.name, fleet.cluster_name, history.EntryKind.POWER, action.value, done)
    report(machine.name, f"the BMC has the password in {path}; put it into the inventory, which has the old one")
    if machine.role is Role.WORKER and _is_autoscaled(fleet):
        report(machine.name, "then run `gpunodes autoscale up`: until that the autoscaler has the old password, too")
    return PowerResult(machine.name, action.value, state.value, verified.name if verified else "")


def _is_autoscaled(fleet: InventoryFleet) -> bool:
    """Whether there may be an autoscaler, which has the passwords in a Secret: by the settings, or in the cluster."""
    inventory = fleet.inventory
    if switched_off.has_scaling_pools(inventory):
        return True
    if inventory.machines(Role.CONTROL_PLANE) or inventory.kubeconfig:
        with contextlib.suppress(GpunodesError), contextlib.closing(fleet.session()) as session:
            return Objects(session, patience_s=0.0).is_installed()
    return False


def _login(control: MachineControl, renewed: MachineControl) -> Power | None:
    """The machine's own BMC with its present password; None if it has the new one already."""
    try:
        return control.own_power()
    except PowerProblem as problem:
        if problem.trouble is not Trouble.LOGIN:
            raise
        try:
            renewed.own_power()
        except PowerProblem as other:
            raise (problem if other.trouble is Trouble.LOGIN else other) from None
        return None


def _verify(bmc: Power, path: Path) -> PowerState:
    deadline = time.monotonic() + _LOGIN_S
    while True:
        try:
            return bmc.state()
        except PowerProblem as problem:
            if time.monotonic() > deadline:
                raise GpunodesError(
                    f"the BMC accepted the change of its password, but not the new one: {problem.problem.found}",
                    f"a login with the password in {path}",
                    "log in to the BMC by its web page with the old one or the new one; keep the file",
                ) from problem
        time.sleep(1.0)
