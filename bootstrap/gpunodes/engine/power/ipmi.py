"""Power by IPMI, through the program ipmitool. The password goes through its environment, never into its arguments."""

from __future__ import annotations

import re

from gpunodes.ansible.module_utils.gpunodes.identity import BmcIdentity
from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, program

_TIMEOUT_S = 30
_ORDERS = {Order.ON: "on", Order.OFF: "off", Order.RESET: "reset"}
# What ipmitool 1.8.18 and 1.8.19 say.
_TROUBLES = (
    ("Unable to establish", Trouble.DOWN),
    ("Address lookup", Trouble.DOWN),
    ("RAKP", Trouble.LOGIN),
    ("password", Trouble.LOGIN),
    ("Insufficient privilege", Trouble.LOGIN),
)


class Ipmi:
    """One BMC, by IPMI 2.0 (lanplus)."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.name = f"IPMI at {access.address}"

    def state(self) -> PowerState:
        """What the BMC says; raises PowerProblem."""
        message = self._run("chassis", "power", "status")
        if "is on" in message:
            return PowerState.ON
        return PowerState.OFF if "is off" in message else PowerState.UNKNOWN

    def order(self, order: Order) -> None:
        """Tell it; raises PowerProblem."""
        self._run("chassis", "power", _ORDERS[order])

    def identity(self) -> BmcIdentity:
        """The system's GUID (IPMI 2.0, 22.14), nothing where it has none; raises PowerProblem when it is down."""
        try:
            message = self._run("mc", "guid")
        except PowerProblem as problem:
            if problem.trouble is not Trouble.REFUSED:
                raise
            message = ""
        found = re.search(r"^System GUID\s*:\s*([0-9A-Fa-f-]{32,36})\s*$", message, re.MULTILINE)
        return BmcIdentity(found[1].lower() if found else "")

    def _run(self, *command: str) -> str:
        host, port = self._access.place
        words = ["ipmitool", "-I", "lanplus", "-H", host, *(["-p", port] if port else []), "-R", "2", "-N", "5"]
        words += ["-U", self._access.user, "-E", *command]
        # ipmitool(1), -E: the password is in IPMI_PASSWORD.
        environment = {"LC_ALL": "C.UTF-8", "IPMI_PASSWORD": self._access.password}
        try:
            done = program.run(words, _TIMEOUT_S, environment)
        except FileNotFoundError as error:
            raise PowerProblem(
                Trouble.DOWN, "there is no ipmitool on this machine", "install the package ipmitool"
            ) from error
        except program.Failed as error:
            raise PowerProblem(Trouble.DOWN, f"{self.name} does not answer: ipmitool {error}") from error
        if done.code:
            output = " ".join((done.err or done.out).split())[:300]
            trouble = next((trouble for words_, trouble in _TROUBLES if words_ in output), Trouble.REFUSED)
            how = {Trouble.DOWN: "does not answer", Trouble.LOGIN: "refuses the user"}.get(trouble, "refuses")
            raise PowerProblem(trouble, f"{self.name} {how}: {output}")
        return done.out
