"""Power by a command of the user's own: called with the action and the machine's name; prints on or off for status."""

from __future__ import annotations

import contextlib
import shlex

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, program
from gpunodes.errors import WrongInput

_TIMEOUT_S = 120


class Command:
    """``COMMAND status|on|off|reset MACHINE``; exit status 0 is yes."""

    def __init__(self, machine: str, access: Access) -> None:
        self._machine = machine
        self._words = _words(machine, access.command)
        self.name = f"the command {self._words[0]}"

    def state(self) -> PowerState:
        """What it prints; raises PowerProblem."""
        message = self._run("status").strip().lower()
        return PowerState(message) if message in {"on", "off"} else PowerState.UNKNOWN

    def order(self, order: Order) -> None:
        """Call it; raises PowerProblem."""
        self._run(order.value)

    def identity(self) -> None:
        """It is told the machine's name."""

    def _run(self, word: str) -> str:
        try:
            done = program.run([*self._words, word, self._machine], _TIMEOUT_S)
        except FileNotFoundError as error:
            raise PowerProblem(Trouble.DOWN, f"{self.name} cannot be started: {error.strerror}") from error
        except program.Failed as error:
            raise PowerProblem(Trouble.DOWN, f"{self.name} {error}") from error
        if done.code:
            message = " ".join(done.err.split())[:300]
            raise PowerProblem(Trouble.REFUSED, f"{self.name} refuses to {word}: {message or done.code}")
        return done.out


def _words(machine: str, command: str) -> list[str]:
    """The command's words; raises WrongInput where a shell could not read them either."""
    with contextlib.suppress(ValueError):
        if words := shlex.split(command):
            return words
    raise WrongInput(
        f"gpunodes_bmc_command of {machine} is {command!r}", "a program and its arguments", "correct the inventory"
    )
