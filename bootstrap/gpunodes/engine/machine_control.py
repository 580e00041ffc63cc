"""What repair does to one machine: asks for its boot, collects evidence, and uses the rungs of the ladder.

Nothing here raises for what happens on the machine; each call ends by its own deadline.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.ansible.module_utils.gpunodes.identity import BmcMatch, MachineIdentity, match_bmc
from gpunodes.engine import power as powers
from gpunodes.engine import shell
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.shell import Reached
from gpunodes.repair.escalation import EscalationStep, VerifiedBy

_BOOT_S = 15.0
_ASK_S = 60.0
"""A login on a machine whose PID 1 is blocked takes 25 s (pam_systemd's time limit)."""
_COLLECT_S = 45.0
_COLLECT_BYTES = 16 << 20
_BOOT = ("cat", "/proc/sys/kernel/random/boot_id", "/proc/uptime")
# Linux, Documentation/admin-guide/sysctl/kernel.rst, random: a UUID.
_BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BANNER_BYTES = 1 << 16
"""What a login shell may print before an answer, beside the answer's own limit."""
# Whichever of the two lives; the newest lines are those that matter.
_KERNEL_LOG = (
    "{ timeout 20 journalctl -q -k -b --no-pager -o short-monotonic 2>/dev/null | grep . || timeout 10 dmesg; } "
    f"| tail -c {_COLLECT_BYTES - 1}"
)
_PROCESSES = "timeout 10 ps -eo pid,ppid,stat,wchan:32,etimes,comm,args 2>/dev/null | head -c 2000000"
_BUG_REPORT_S = 240.0
_BUG_REPORT_BYTES = 64 << 20
# It asks the driver much, and hangs where the driver does; --safe-mode leaves out what is known to hang a machine.
_BUG_REPORT = (
    'f=$(mktemp -d /run/gpunodes-bug-report.XXXXXX) && cd "$f" && '
    "{ timeout -k 5 210 nvidia-bug-report.sh --safe-mode --output-file report >/dev/null 2>&1; "
    f'cat report* | head -c {_BUG_REPORT_BYTES - 1}; cd /; rm -rf "$f"; }}'
)


@dataclass(frozen=True, slots=True)
class Boot:
    """Which boot a machine is in, as far as it answers. ``uptime_s``: seconds since it began."""

    reached: Reached
    boot_id: str = ""
    uptime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of asking for a rung."""

    done: bool
    message: str = ""
    armed: tuple[str, ...] = ()
    """What the machine does by itself when the rung does not end it."""


class MachineControl:
    """One machine, over SSH and its BMC.

    ``known`` is what the machine reports, or reported last, of its hardware: its BMC must not be another machine's.
    ``named``: the user named the machine itself; then a BMC of which nothing is known is used, and ``say`` tells it.
    """

    def __init__(
        self,
        name: str,
        address: str,
        variables: Mapping[str, Any],
        cold_pause_s: float,
        known: MachineIdentity | None = None,
        *,
        named: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._known = known or MachineIdentity(name)
        self._named = named
        self._say = say
        self._address = address
        self._variables = variables
        self._cold_pause_s = cold_pause_s
        self._settings = settings.resolve(variables)

    def boot(self) -> Boot:
        """Which boot it is in."""
        result = shell.run(
            self._address,
            self._variables,
            shell.remote(_BOOT, self._variables, shell.Become.NEVER),
            deadline_s=_BOOT_S,
            most=_BANNER_BYTES + 4096,
        )
        found = _boot(shell.unframed(result.out)) if result.ok else None
        return Boot(result.reached, *found) if found else Boot(result.reached)

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        """Keep the evidence in ``folder`` (0600 each); the names of the files that were written."""
        wanted = [
            ("kernel.log", _KERNEL_LOG, _COLLECT_S, _COLLECT_BYTES),
            ("processes.txt", _PROCESSES, _COLLECT_S, _COLLECT_BYTES),
        ]
        if bug_report:
            wanted.append(("nvidia-bug-report.log.gz", _BUG_REPORT, _BUG_REPORT_S, _BUG_REPORT_BYTES))

        def take(name: str, words: str, deadline_s: float, most: int) -> str:
            result = shell.run(
                self._address,
                self._variables,
                shell.remote(["sh", "-c", words], self._variables),
                deadline_s=deadline_s,
                most=most + _BANNER_BYTES,
                stdin=shell.for_sudo(self._variables).encode(),
            )
            answer = shell.unframed(result.out)
            return _keep(folder / f"{self.name}.{name}", answer[:most]) if answer else ""

        written = []
        if facts:
            written.append(_keep(folder / f"{self.name}.facts.json", json.dumps(facts, indent=1).encode()))
        with ThreadPoolExecutor(len(wanted)) as pool:
            written += [name for name in pool.map(lambda each: take(*each), wanted) if name]
        return written

    def ask(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        """Use a rung that needs a shell; only in the boot ``boot_id``, when one is named."""
        options = {
            "boot_id": boot_id,
            "step": step.name,
            "later": list(later),
            "gpus": list(gpus),
            "limit_s": step.down_s,
        }
        from gpunodes.ansible.module_utils.gpunodes import escalate

        words = shell.python(self._variables, escalate.BOOT, json.dumps(options))
        result = shell.run(
            self._address,
            self._variables,
            shell.remote(words, self._variables),
            deadline_s=_ASK_S + (step.down_s if step.name == "gpu-reset" else 0),
            stdin=shell.for_sudo(self._variables).encode() + Path(escalate.__file__).read_bytes(),
            enough=lambda out: _answer(out) is not None,
        )
        if answer := _answer(result.out):
            return answer
        if result.reached is Reached.LATE and step.verified_by is VerifiedBy.BOOT:
            return StepResult(True, "it was asked, and the shell did not come back", tuple(name for _, name in later))
        how = "the program there failed" if result.reached is Reached.ENDED else "it does not answer on SSH"
        return StepResult(False, ": ".join(part for part in (how, ssh_reason(result.err)) if part))

    def has_power(self) -> bool:
        """Whether it has a BMC."""
        return bool(self._settings["gpunodes_bmc_type"])

    def power(self) -> powers.Power | None:
        """Its BMC; None when it has none. Raises WrongInput for settings that cannot be used."""
        access = powers.access(self.name, self._settings)
        return powers.connect(self.name, access) if access else None

    def reset(self) -> None:
        """Reset it by its BMC; one that is off is switched on. Raises PowerProblem."""
        bmc = self.own_power()
        if bmc.state() is powers.PowerState.OFF:
            powers.change(bmc, powers.Order.ON)
        else:
            bmc.order(powers.Order.RESET)

    def cold_cycle(self) -> None:
        """Take its power away, wait, and give it back; raises PowerProblem."""
        bmc = self.own_power()
        powers.change(bmc, powers.Order.OFF)
        time.sleep(self._cold_pause_s)
        powers.change(bmc, powers.Order.ON)

    def own_power(self) -> powers.Power:
        """Its BMC, for an order that would hurt another machine: raises PowerProblem for a BMC that is not its own.

        Where nothing tells whose BMC it is, the machine must have been named; the setting gpunodes_bmc_identity
        ``any`` leaves all of this out.
        """
        bmc = self.power()
        if bmc is None:
            raise powers.PowerProblem(powers.Trouble.REFUSED, "no BMC is configured", "set gpunodes_bmc_type")
        match = None if self._settings["gpunodes_bmc_identity"] == "any" else self.compare(bmc)
        if match is None or match.same:
            return bmc
        if match.same is None and self._named:
            self._say(f"nothing tells whether {bmc.name} is its own, and it was named: {match.why}")
            return bmc
        found = "belongs to another machine" if match.same is False else "cannot be told to be the machine's own"
        remedy = f"name the machine, after `gpunodes power {self.name} status`; or "
        raise powers.PowerProblem(
            powers.Trouble.FOREIGN,
            f"{bmc.name} {found}: {match.why}",
            f"{'' if match.same is False else remedy}correct gpunodes_bmc_address; gpunodes_bmc_identity: any is for "
            "firmware that reports something else",
        )

    def compare(self, bmc: powers.Power) -> BmcMatch | None:
        """Whether the machine that a BMC reports is this one; None for a BMC that goes by the name.

        Raises PowerProblem.
        """
        found = bmc.identity()
        return match_bmc(self._known, found) if found is not None else None


def _boot(answer: bytes | None) -> tuple[str, float] | None:
    """The boot id and the uptime in seconds; None for anything else: what is no boot id proves no reboot."""
    words = (answer or b"").decode("utf-8", "replace").split()
    try:
        boot_id, uptime_s = words[0], float(words[1])
    except (IndexError, ValueError):
        return None
    return (boot_id, uptime_s) if _BOOT_ID.fullmatch(boot_id) and math.isfinite(uptime_s) else None


def _answer(out: bytes | bytearray) -> StepResult | None:
    """What the program on the machine answered; None as long as it has not."""
    try:
        answer = json.loads((shell.unframed(out) or b"").splitlines()[0])
        armed = tuple(str(name) for name in answer.get("armed") or ())
        return StepResult(answer["done"] is True, str(answer.get("message", "")), armed)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _keep(path: Path, data: bytes) -> str:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return path.name
