"""Power control over IPMI, by ipmitool. The password is passed in the environment, never in the arguments."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, Uncertain, program
from gpunodes.identity.model import BmcIdentity

_TIMEOUT_S = 30
_SHORT, _LONG = 16, 20
"""Sizes of a password (IPMI 2.0, 22.30)."""
# ipmitool(1): soft asks the operating system by ACPI.
_ORDERS = {Order.ON: "on", Order.OFF: "off", Order.SHUTDOWN: "soft", Order.RESET: "reset"}
# ipmitool's ipmi_chassis.c: it prints this only after the order was sent, without any response.
_LOST = "Unable to set Chassis Power Control"
# Messages of ipmitool 1.8.18 and 1.8.19.
_MESSAGES = (
    ("Unable to establish", Trouble.UNREACHABLE),
    ("Address lookup", Trouble.UNREACHABLE),
    (_LOST, Trouble.UNREACHABLE),
    ("RAKP", Trouble.LOGIN),
    ("password", Trouble.LOGIN),
    ("Insufficient privilege", Trouble.LOGIN),
)


class Ipmi:
    """One BMC, over IPMI 2.0 (lanplus)."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.name = f"IPMI at {access.address}"

    def state(self) -> PowerState:
        """The power state that the BMC reports; raises PowerProblem."""
        output = self._run("chassis", "power", "status")
        if "is on" in output:
            return PowerState.ON
        return PowerState.OFF if "is off" in output else PowerState.UNKNOWN

    def order(self, order: Order) -> None:
        """Start a power action; raises PowerProblem, Uncertain if it was sent or may have been, without a response."""
        self._run("chassis", "power", _ORDERS[order], lost=Uncertain)

    def identity(self) -> BmcIdentity:
        """The system GUID (IPMI 2.0, 22.14), "" where the BMC has none; raises PowerProblem without a response."""
        try:
            output = self._run("mc", "guid")
        except PowerProblem as problem:
            if problem.trouble is not Trouble.REFUSED:
                raise
            output = ""
        guid = re.search(r"^System GUID\s*:\s*([0-9A-Fa-f-]{32,36})\s*$", output, re.MULTILINE)
        return BmcIdentity(guid[1].lower() if guid else "")

    def change_password(self, new: str) -> None:
        """Change the user's password (IPMI 2.0, 22.30); raises PowerProblem."""
        number = self._user_number()
        size = _SHORT if len(new) <= _SHORT else _LONG
        with tempfile.TemporaryDirectory(prefix="gpunodes-") as folder:
            # ipmitool takes this password only as an argument, or in a file of commands: others can read arguments.
            commands = Path(folder) / "commands"
            commands.touch(mode=0o600)
            commands.write_text(f"user set password {number} {new} {size}\n")
            self._run("exec", str(commands))

    def _user_number(self) -> int:
        """The number of the user in the BMC's list (ipmitool: ``user list``, columns ID and Name)."""
        rows = (re.match(r"(\d+)\s+(\S+)\s", line) for line in self._run("user", "list").splitlines())
        numbers = [int(row[1]) for row in rows if row and row[2] == self._access.user]
        if len(numbers) != 1:
            raise PowerProblem(
                Trouble.REFUSED,
                f"{self.name} lists {len(numbers)} users with the name {self._access.user!r}",
                "give each user one name; a user may need the right to list users (administrator)",
            )
        return numbers[0]

    def _run(self, *command: str, lost: type[PowerProblem] = PowerProblem) -> str:
        host, port = self._access.place
        argv = ["ipmitool", "-I", "lanplus", "-H", host, *(["-p", port] if port else []), "-R", "2", "-N", "5"]
        argv += ["-U", self._access.user, "-E", *command]
        # ipmitool(1), -E: the password is in IPMI_PASSWORD.
        environment = {"LC_ALL": "C.UTF-8", "IPMI_PASSWORD": self._access.password}
        try:
            done = program.run(argv, _TIMEOUT_S, environment)
        except FileNotFoundError as error:
            raise PowerProblem(
                Trouble.UNREACHABLE, "ipmitool is not installed on the controller", "install the package ipmitool"
            ) from error
        except program.Failed as error:
            kind = PowerProblem if isinstance(error, program.NotStarted) else lost
            raise kind(Trouble.UNREACHABLE, f"{self.name} does not respond: ipmitool {error}") from error
        if done.code:
            output = " ".join((done.err or done.out).split())[:300]
            trouble = next((trouble for message, trouble in _MESSAGES if message in output), Trouble.REFUSED)
            failure = {Trouble.UNREACHABLE: "does not respond", Trouble.LOGIN: "refuses the user"}.get(
                trouble, "refuses the command"
            )
            raise (lost if _LOST in output else PowerProblem)(trouble, f"{self.name} {failure}: {output}")
        return done.out
