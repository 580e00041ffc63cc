"""Power by a command of the user's own: called with the action and the machine's name; prints on or off for status."""

from __future__ import annotations

import shlex
import subprocess

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble

_TIMEOUT_S = 120


class Command:
    """``COMMAND status|on|off|reset MACHINE``; exit status 0 is yes."""

    def __init__(self, machine: str, access: Access) -> None:
        self._machine = machine
        self._words = shlex.split(access.command)
        self.name = f"the command {self._words[0]}"

    def state(self) -> PowerState:
        """What it prints; raises PowerProblem."""
        said = self._run("status").strip().lower()
        return PowerState(said) if said in {"on", "off"} else PowerState.UNKNOWN

    def order(self, order: Order) -> None:
        """Call it; raises PowerProblem."""
        self._run(order.value)

    def _run(self, word: str) -> str:
        try:
            done = subprocess.run(
                [*self._words, word, self._machine],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            raise PowerProblem(Trouble.DOWN, f"{self.name} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise PowerProblem(Trouble.DOWN, f"{self.name} did not end in {_TIMEOUT_S} s") from error
        if done.returncode:
            said = " ".join(done.stderr.split())[:300]
            raise PowerProblem(Trouble.REFUSED, f"{self.name} refuses to {word}: {said or done.returncode}")
        return done.stdout
