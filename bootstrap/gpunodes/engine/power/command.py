"""Power control by a user's command, called with the action and the machine's name; it prints on or off for status."""

from __future__ import annotations

import contextlib
import shlex

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, Uncertain, program
from gpunodes.errors import WrongInput

_TIMEOUT_S = 120


class Command:
    """``COMMAND status|on|off|shutdown|reset MACHINE``; exit status 0 means success."""

    def __init__(self, machine: str, access: Access) -> None:
        self._machine = machine
        self._argv = _argv(machine, access.command)
        self.name = f"the command {self._argv[0]}"

    def state(self) -> PowerState:
        """The power state that the command prints; raises PowerProblem."""
        output = self._run("status").strip().lower()
        return PowerState(output) if output in {"on", "off"} else PowerState.UNKNOWN

    def order(self, order: Order) -> None:
        """Run the command with the action; raises PowerProblem, Uncertain if it does not end by itself."""
        self._run(order.value, endless=Uncertain)

    def identity(self) -> None:
        """None: the command gets the machine's name."""

    def change_password(self, _new: str) -> None:
        """Raises WrongInput: gpunodes gives the command no password."""
        raise WrongInput(
            f"the power of {self._machine} is switched by {self.name}, which gets no password from gpunodes",
            "a BMC of type redfish or ipmi",
            "change its password where the command reads it",
        )

    def _run(self, action: str, endless: type[PowerProblem] = PowerProblem) -> str:
        try:
            done = program.run([*self._argv, action, self._machine], _TIMEOUT_S)
        except FileNotFoundError as error:
            raise PowerProblem(Trouble.UNREACHABLE, f"{self.name} cannot be started: {error.strerror}") from error
        except program.Failed as error:
            kind = PowerProblem if isinstance(error, program.NotStarted) else endless
            raise kind(Trouble.UNREACHABLE, f"{self.name} {error}") from error
        if done.code:
            message = " ".join(done.err.split())[:300]
            raise PowerProblem(Trouble.REFUSED, f"{self.name} refuses the action {action}: {message or done.code}")
        return done.out


def _argv(machine: str, command: str) -> list[str]:
    """The command as argv; raises WrongInput for a command with invalid shell syntax."""
    with contextlib.suppress(ValueError):
        if argv := shlex.split(command):
            return argv
    raise WrongInput(
        f"gpunodes_bmc_command of {machine} is {command!r}", "a program and its arguments", "correct the inventory"
    )
