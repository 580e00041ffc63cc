"""Control of one machine for repair: read its boot id, collect evidence, run escalation steps.

Calls over SSH do not raise for errors on the machine; each call has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpunodes import settings
from gpunodes.engine import power as powers
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.power import kinds
from gpunodes.engine.remote import answers, commands, programs, shell, targets
from gpunodes.engine.remote.shell import Reached
from gpunodes.errors import GpunodesError
from gpunodes.identity.bmc import BmcMatch, match_bmc
from gpunodes.identity.model import MachineIdentity
from gpunodes.repair.escalation import EscalationStep, VerifiedBy

_BOOT_S = 15.0
_STEP_S = 60.0
"""A login on a machine whose PID 1 is blocked takes 25 s (pam_systemd's time limit)."""
_POLL_S = 1.0
_COLLECT_S = 45.0
_COLLECT_BYTES = 16 << 20
_BOOT = ("cat", "/proc/sys/kernel/random/boot_id", "/proc/uptime")
# Linux, Documentation/admin-guide/sysctl/kernel.rst, random: a UUID.
_BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BANNER_BYTES = 1 << 16
"""Maximum size of a login shell's banner; it is added to the limit for the output."""
# The files that kubeadm and the kubelet write (kubernetes.io, "kubeadm join"; "TLS bootstrapping").
_MEMBERSHIP = (
    "[ -s /etc/kubernetes/kubelet.conf ] && [ -s /var/lib/kubelet/config.yaml ] || { echo none; exit; }; "
    "pem=/var/lib/kubelet/pki/kubelet-client-current.pem; "
    "if command -v openssl >/dev/null && [ -s $pem ] && ! openssl x509 -noout -checkend 0 -in $pem >/dev/null; "
    "then echo ended; else echo member; fi"
)
# journalctl or else dmesg, whichever works; the newest lines are kept.
_KERNEL_LOG = (
    "{ timeout 20 journalctl -q -k -b --no-pager -o short-monotonic 2>/dev/null | grep . || timeout 10 dmesg; } "
    f"| tail -c {_COLLECT_BYTES - 1}"
)
_PROCESSES = "timeout 10 ps -eo pid,ppid,stat,wchan:32,etimes,comm,args 2>/dev/null | head -c 2000000"
_BUG_REPORT_S = 240.0
_BUG_REPORT_BYTES = 64 << 20
# It queries the driver and hangs where the driver hangs; --safe-mode skips queries that are known to hang a machine.
_BUG_REPORT = (
    'f=$(mktemp -d /run/gpunodes-bug-report.XXXXXX) && cd "$f" && '
    "{ timeout -k 5 210 nvidia-bug-report.sh --safe-mode --output-file report >/dev/null 2>&1; "
    f'cat report* | head -c {_BUG_REPORT_BYTES - 1}; cd /; rm -rf "$f"; }}'
)


@dataclass(frozen=True, slots=True)
class Boot:
    """The running boot of a machine, "" when it did not respond. ``uptime_s``: seconds since the boot."""

    reached: Reached
    boot_id: str = ""
    uptime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of starting an escalation step."""

    done: bool
    message: str = ""
    armed: tuple[str, ...] = ()
    """The next steps, which a process on the machine runs later if the machine is still up."""


class Membership(StrEnum):
    """What the files of a machine say of its kubelet."""

    NONE = "none"
    """It joined no cluster."""
    MEMBER = "member"
    """It registers a node when it starts."""
    ENDED = "ended"
    """The same, but its certificate has ended: it does not start."""
    UNKNOWN = "unknown"
    """The machine did not respond."""


class MachineControl:
    """Control of one machine, over SSH and its BMC.

    ``known`` is the hardware identity that the machine reported last: the BMC must not belong to another machine.
    ``named``: the user named the machine on the command line. Then a BMC whose identity cannot be verified is used,
    and ``report`` is called with a message. ``jump`` are the jump hosts of its BMC, where they are not to be read from
    settings; ``port`` shows whether a machine without a BMC is on, where that is not its SSH port.
    ``macs_of_others`` are the MAC addresses of other machines, each with its machine: Wake-on-LAN wakes none of them.
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
        report: Callable[[str], None] = lambda _: None,
        jump: tuple[targets.Target, ...] | None = None,
        port: int | None = None,
        macs_of_others: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._macs_of_others = macs_of_others
        self._jump = jump
        self._port = port
        self._known = known or MachineIdentity(name)
        self._named = named
        self._report = report
        self._address = address
        self._variables = variables
        self._cold_pause_s = cold_pause_s
        self._settings = settings.resolve(variables)

    def boot(self) -> Boot:
        """The running boot."""
        result = shell.run(
            self._address,
            self._variables,
            commands.remote(_BOOT, self._variables, commands.Become.NEVER),
            deadline_s=_BOOT_S,
            max_bytes=_BANNER_BYTES + 4096,
        )
        parsed = _parse_boot(answers.unframed(result.out)) if result.ok else None
        return Boot(result.reached, *parsed) if parsed else Boot(result.reached)

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        """Save the evidence in ``folder`` (0600 each); returns the names of the files."""
        collected = [
            ("kernel.log", _KERNEL_LOG, _COLLECT_S, _COLLECT_BYTES),
            ("processes.txt", _PROCESSES, _COLLECT_S, _COLLECT_BYTES),
        ]
        if bug_report:
            collected.append(("nvidia-bug-report.log.gz", _BUG_REPORT, _BUG_REPORT_S, _BUG_REPORT_BYTES))

        def save(name: str, script: str, deadline_s: float, max_bytes: int) -> str:
            result = shell.run(
                self._address,
                self._variables,
                commands.remote(["sh", "-c", script], self._variables),
                deadline_s=deadline_s,
                max_bytes=max_bytes + _BANNER_BYTES,
            )
            output = answers.unframed(result.out)
            return _write(folder / f"{self.name}.{name}", output[:max_bytes]) if output else ""

        written = []
        if facts:
            written.append(_write(folder / f"{self.name}.facts.json", json.dumps(facts, indent=1).encode()))
        with ThreadPoolExecutor(len(collected)) as pool:
            written += [name for name in pool.map(lambda each: save(*each), collected) if name]
        return written

    def run_step(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        """Run an escalation step over SSH; only in the boot ``boot_id`` unless that is empty.

        ``later`` are the next steps, with delays in seconds, for the machine to run if this one has no effect.
        """
        options = {
            "boot_id": boot_id,
            "step": step.name,
            "later": list(later),
            "gpus": list(gpus),
            "limit_s": step.down_s,
        }
        result = shell.run(
            self._address,
            self._variables,
            programs.pack("escalate", options).command(self._variables),
            deadline_s=_STEP_S + (step.down_s if step.name == "gpu-reset" else 0),
            is_complete=lambda out: _parse_step_result(out) is not None,
        )
        if parsed := _parse_step_result(result.out):
            return parsed
        if result.reached is Reached.TIMEOUT and step.verified_by is VerifiedBy.BOOT:
            return StepResult(True, "started, but the shell did not return", tuple(name for _, name in later))
        failure = "the program on the machine failed" if result.reached is Reached.ENDED else "SSH does not respond"
        return StepResult(False, ": ".join(part for part in (failure, ssh_reason(result.err)) if part))

    def shut_down(self, boot_id: str) -> None:
        """Begin a shutdown of the operating system, if the machine is in the boot ``boot_id``; does not wait."""
        script = f'[ "$(cat {_BOOT[1]})" = "$1" ] && exec systemctl poweroff'
        shell.run(
            self._address,
            self._variables,
            commands.remote(["sh", "-c", script, "sh", boot_id], self._variables),
            deadline_s=_STEP_S,
            max_bytes=_BANNER_BYTES,
        )

    def membership(self) -> Membership:
        """Whether its kubelet has joined a cluster, as its files say."""
        result = shell.run(
            self._address,
            self._variables,
            commands.remote(["sh", "-c", _MEMBERSHIP], self._variables),
            deadline_s=_STEP_S,
            max_bytes=_BANNER_BYTES,
        )
        text = (answers.unframed(result.out) or b"").decode("ascii", "replace").strip()
        return Membership(text) if result.ok and text in set(Membership) else Membership.UNKNOWN

    def has_power(self) -> bool:
        """Whether a BMC is configured that can switch the machine off."""
        return bool(self._settings["gpunodes_bmc_type"]) and not self.only_wakes

    @property
    def only_wakes(self) -> bool:
        """Whether the machine can be switched on only, and is switched off by a shutdown of its system."""
        return bool(self._settings["gpunodes_bmc_type"] == kinds.WOL)

    def power(self) -> powers.Power | None:
        """The BMC; None when none is configured. Raises WrongInput for invalid settings."""
        port = self._port or targets.first(self._variables, targets.PORTS) or targets.DEFAULT_PORT
        access = kinds.access(
            self.name,
            self._settings,
            (self._address, int(port)),
            self._known.macs,
            self._jump,
            self._macs_of_others,
        )
        return kinds.connect(self.name, access) if access else None

    def reset(self, confirm: powers.Confirm) -> None:
        """Reset the machine by its BMC, or switch it on when it is off. Raises PowerProblem, and as ``confirm``.

        A reset that was sent counts as ordered, also if its response is lost.
        """
        bmc = self.own_power()
        if bmc.state() is powers.PowerState.OFF:
            powers.change(bmc, powers.Order.ON, confirm)
        else:
            confirm()
            try:
                bmc.order(powers.Order.RESET)
            except powers.Uncertain as problem:
                # Another step now would interrupt the boot; whether it boots is seen on the machine.
                self._report(f"{problem.problem.fact}: the reset was sent, and may have been carried out")

    def cold_cycle(self, confirm: powers.Confirm) -> None:
        """Switch the power off, wait, and switch it on; raises as ``reset``."""
        bmc = self.own_power()
        try:
            powers.change(bmc, powers.Order.OFF, confirm)
        except powers.Uncertain as problem:
            self._see_off(bmc, problem)
        time.sleep(self._cold_pause_s)
        try:
            powers.change(bmc, powers.Order.ON, confirm)
        except GpunodesError:
            self._report("it was switched off, and may still be off")
            raise

    def _see_off(self, bmc: powers.Power, problem: powers.Uncertain) -> None:
        """See that a machine goes off late, so that it can be switched on again; else raises ``problem``."""
        with contextlib.suppress(powers.PowerProblem):
            if powers.off_within(bmc, powers.CHANGE_S, _POLL_S):
                return
        self._report("the order to switch it off was sent: it may be off, or go off yet")
        raise problem

    def own_power(self) -> powers.Power:
        """The BMC, after a check that it belongs to this machine; raises PowerProblem when it does not.

        Where the identity cannot be verified, the user must have named the machine; except for Wake-on-LAN, which
        switches nothing off. The setting gpunodes_bmc_identity ``any`` skips the check.
        """
        bmc = self.power()
        if bmc is None:
            raise powers.PowerProblem(powers.Trouble.REFUSED, "no BMC is configured", "set gpunodes_bmc_type")
        match = None if self._settings["gpunodes_bmc_identity"] == "any" else self.compare(bmc)
        if match is None or match.same or (match.same is None and self.only_wakes):
            return bmc
        if match.same is None and self._named:
            self._report(
                f"{bmc.name} cannot be verified as the BMC of this machine; it is used because the machine was named: "
                f"{match.why}"
            )
            return bmc
        found = "belongs to another machine" if match.same is False else "cannot be verified as the BMC of this machine"
        remedy = f"name the machine, after `gpunodes power {self.name} status`; or "
        setting = "gpunodes_bmc_mac" if self.only_wakes else "gpunodes_bmc_address"
        raise powers.PowerProblem(
            powers.Trouble.WRONG_MACHINE,
            f"{bmc.name} {found}: {match.why}",
            f"{'' if match.same is False else remedy}correct {setting}; gpunodes_bmc_identity: any is for firmware "
            "that reports a different identity",
        )

    def with_password(self, password: str) -> MachineControl:
        """Control of the same machine, with another password of its BMC."""
        variables = {**self._variables, "gpunodes_bmc_password": password}
        return MachineControl(
            self.name,
            self._address,
            variables,
            self._cold_pause_s,
            self._known,
            named=self._named,
            report=self._report,
            jump=self._jump,
            port=self._port,
            macs_of_others=self._macs_of_others,
        )

    def compare(self, bmc: powers.Power) -> BmcMatch | None:
        """Whether the identity that a BMC reports is that of this machine; None for a power command.

        Raises PowerProblem.
        """
        identity = bmc.identity()
        return match_bmc(self._known, identity) if identity is not None else None


def _parse_boot(output: bytes | None) -> tuple[str, float] | None:
    """The boot id and the uptime in seconds; None for any other output, which must not count as a new boot."""
    values = (output or b"").decode("utf-8", "replace").split()
    try:
        boot_id, uptime_s = values[0], float(values[1])
    except (IndexError, ValueError):
        return None
    return (boot_id, uptime_s) if _BOOT_ID.fullmatch(boot_id) and math.isfinite(uptime_s) else None


def _parse_step_result(out: bytes | bytearray) -> StepResult | None:
    """The result that the program on the machine printed; None until it is complete."""
    try:
        document = json.loads((answers.unframed(out) or b"").splitlines()[0])
        armed = tuple(str(name) for name in document.get("armed") or ())
        return StepResult(document["done"] is True, str(document.get("message", "")), armed)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write(path: Path, data: bytes) -> str:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return path.name
