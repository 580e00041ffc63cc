"""The machines of the plan and their BMCs: switched on and off while this server holds their Lease."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gpunodes.autoscale.plan import Plan, PlannedMachine
from gpunodes.autoscale.state import Kubelet
from gpunodes.engine import power as powers
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Order, PowerProblem, PowerState, kinds
from gpunodes.engine.remote.openssh import Rules
from gpunodes.engine.remote.targets import Target
from gpunodes.errors import GpunodesError
from gpunodes.identity import mac_owners

SHUTDOWN_S = 300.0
"""Time limit in seconds for the shutdown of an operating system; then its power is switched off."""
_POLL_S = 5.0
_CONNECT_S = 5.0
KUBELET = 10250
"""The port of the kubelet, which control planes reach on each node: a machine that is on responds there in any way."""


class AlreadyOn(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """A machine that was to be switched on is on: someone else works with it."""


class PoweredMachines(Protocol):
    """The power of machines by name; tests implement it in memory. All methods raise GpunodesError."""

    plan: Plan
    """The plan whose machines these are; the server replaces it."""

    def state(self, name: str) -> PowerState:
        """The power state of a machine."""

    def kubelet(self, name: str) -> Kubelet:
        """Whether the kubelet of a machine listens."""

    def switch_on(self, name: str, before: Callable[[], None], *, again: bool) -> None:
        """Switch a machine on, and see that it is, but for one without a BMC; ``before`` is done while it is locked.

        Raises AlreadyOn if it is on, unless the order is given ``again``.
        """

    def switch_off(self, name: str, before: Callable[[], None], then: Callable[[], None]) -> None:
        """Shut a machine down and see that it is off; ``before`` that and ``then``, do both while it is locked."""


class BmcMachines:
    """The machines of a plan. ``passwords`` is a folder with a file for each machine that has a password.

    ``ask_off`` lets a machine without a BMC shut itself down.
    """

    def __init__(
        self,
        plan: Plan,
        passwords: Path,
        leases: Leases,
        ask_off: Callable[[str], None],
        shutdown_s: float = SHUTDOWN_S,
    ) -> None:
        self.plan = plan
        self._ask_off = ask_off
        self._passwords = passwords
        self._leases = leases
        self._shutdown_s = shutdown_s
        self._mutex = threading.Lock()
        self._files: dict[str, str] = {}

    def state(self, name: str) -> PowerState:
        """As ``PoweredMachines`` has it."""
        return self._bmc(name).state()

    def kubelet(self, name: str) -> Kubelet:
        """As ``PoweredMachines`` has it."""
        try:
            socket.create_connection((self.plan.machines[name].address, KUBELET), _CONNECT_S).close()
        except ConnectionError:
            return Kubelet.DOWN
        except OSError:
            return Kubelet.SILENT
        return Kubelet.RUNS

    def switch_on(self, name: str, before: Callable[[], None], *, again: bool) -> None:
        """As ``PoweredMachines`` has it."""
        self._leases.take(name)
        try:
            before()
            bmc = self._bmc(name)
            if not again and bmc.state() is PowerState.ON:
                raise AlreadyOn(f"{name} is on already", "a machine that is off", "")
            if is_woken(self.plan.machines[name]):
                # Its network responds after its boot: a thread that waited for that would keep other machines off.
                self._leases.confirm(name)
                bmc.order(Order.ON)
            else:
                powers.change(bmc, Order.ON, lambda: self._leases.confirm(name))
        finally:
            self._leases.release_unused(name)

    def switch_off(self, name: str, before: Callable[[], None], then: Callable[[], None]) -> None:
        """As ``PoweredMachines`` has it."""
        self._leases.take(name)
        try:
            bmc = self._bmc(name)
            before()
            if not self._is_shut_down(name, bmc):
                powers.change(bmc, Order.OFF, lambda: self._leases.confirm(name))
                if not powers.off_within(bmc, self._shutdown_s, _POLL_S):
                    raise PowerProblem(
                        powers.Trouble.INCONSISTENT,
                        f"{bmc.name} reported {name} as off, but not twice in a row within {self._shutdown_s:.0f} s",
                        "check the machine on site: its node stays until it is off",
                    )
            self._leases.confirm(name)
            then()
        finally:
            self._leases.release_unused(name)

    def _bmc(self, name: str) -> powers.Power:
        """The BMC of a machine, if it is that machine's."""
        machine = self.plan.machines[name]
        given, hops = self._settings(name, machine.bmc), self._hops(machine)
        others = self._macs_of_others(name) if is_woken(machine) else {}
        control = MachineControl(
            name, machine.address, given, 0.0, machine.identity, jump=hops, port=KUBELET, macs_of_others=others
        )
        return control.own_power()

    def _macs_of_others(self, name: str) -> dict[str, str]:
        known = {
            each.name: (*each.identity.macs, each.bmc.get("gpunodes_bmc_mac", ""))
            for each in self.plan.machines.values()
        }
        return mac_owners.of_others(name, known)

    def _hops(self, machine: PlannedMachine) -> tuple[Target, ...]:
        """The jump hosts before a BMC; their keys must be those of the plan."""
        jump = self.plan.jumps.get(machine.bmc.get("gpunodes_bmc_jump", ""))
        if jump is None:
            return ()
        rules = Rules(files=(self._file(jump.known_hosts),), strict=True)
        key = (str(self._passwords / jump.key),)
        return tuple(
            Target(
                f"jump host {hop.address}",
                hop.address,
                hop.port,
                hop.user,
                key,
                host_key_alias=hop.name,
                identities_only=True,
                rules=rules,
            )
            for hop in jump.hops
        )

    def _settings(self, name: str, given: Mapping[str, str]) -> dict[str, str]:
        # Read each time: the kubelet replaces the file when a password was changed.
        file = self._passwords / name
        if text := self.plan.authorities.get(given.get("gpunodes_bmc_verify", "")):
            given = {**given, "gpunodes_bmc_verify": self._file(text)}
        return {
            **given,
            "gpunodes_bmc_password": file.read_text(encoding="utf-8").rstrip("\n") if file.is_file() else "",
        }

    def _file(self, text: str) -> str:
        """The path of a file with a CA, or with known hosts: they are used by their paths."""
        with self._mutex:
            if text not in self._files:
                descriptor, path = tempfile.mkstemp()
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                self._files[text] = path
            return self._files[text]

    def _is_shut_down(self, name: str, bmc: powers.Power) -> bool:
        """Shut the operating system down; False if it does not end in time, or the BMC cannot ask it to."""
        if bmc.state() is not PowerState.OFF:
            self._leases.confirm(name)
            if is_woken(self.plan.machines[name]):
                self._ask_off(name)
                return powers.off_within(bmc, self._shutdown_s, _POLL_S)
            try:
                bmc.order(Order.SHUTDOWN)
            except PowerProblem as problem:
                if problem.trouble is not powers.Trouble.REFUSED:
                    raise
                return False
        return powers.off_within(bmc, self._shutdown_s, _POLL_S)


def is_woken(machine: PlannedMachine) -> bool:
    """Whether a machine has no BMC, and is switched on by Wake-on-LAN: off is then what does not respond."""
    return machine.bmc.get("gpunodes_bmc_type") == kinds.WOL
