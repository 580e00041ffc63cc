"""Inject faults into the stand-in GPUs of a machine, over ssh."""

from __future__ import annotations

import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from string import Formatter

from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import ssh
from gpunodes.lab.layout import LabMachine, Layout

_TABLE = Path(__file__).with_name("faults.toml")
_SSH_LIMIT = 60
"""Seconds; a machine whose kernel is busy with a fault may be slow."""
_DRIVER, _BOARD = "/sys/kernel/debug/standin_nvidia/fault", "/sys/kernel/debug/standin_board/fault"
_AT_BOOT = "/etc/modprobe.d/standin-fault.conf"
"""Injects a fault whenever the driver is loaded; ``clear`` and ``clear-all`` remove the file."""
# The power may be cut right afterwards: without sync the machine would boot with the earlier file.
_SYNC = "sync -f /etc/modprobe.d"
_CLEARING = ("clear", "clear-all")
_MAX_CONSOLE_LINES = 100
"""A fault with more lines is not logged to the console: an emulated serial line takes 3 ms for each."""


@dataclass(frozen=True)
class Fault:
    """A row of faults.toml."""

    name: str
    driver: tuple[str, ...]
    board: tuple[str, ...]
    file: str = ""
    """A file whose existence is the fault: builds of the driver read it, so it needs no loaded driver."""

    @property
    def needs_code(self) -> bool:
        """Whether it needs an Xid or SXid code."""
        return any(name == "code" for command in self.driver for _, name, _, _ in Formatter().parse(command))


@cache
def _table() -> dict[str, Mapping[str, Mapping[str, str]]]:
    return tomllib.loads(_TABLE.read_text())


@cache
def known() -> Mapping[str, Fault]:
    """All faults, by name."""
    rows: Mapping[str, Mapping[str, Sequence[str]]] = _table()["fault"]
    return {
        name: Fault(name, tuple(row.get("driver", ())), tuple(row.get("board", ())), str(row.get("file", "")))
        for name, row in rows.items()
    }


@dataclass(frozen=True)
class FaultRequest:
    """A fault and its parameters."""

    fault: Fault
    code: int | None = None
    gpu: int = 0
    times: int = 1
    seconds: int = 60
    at_boot: bool = False
    """Not now, but some seconds after the driver is loaded, at every boot until cleared."""


def script(request: FaultRequest) -> str:
    """The shell script that injects the fault on the machine, as root.

    Raises:
        WrongInput: a code is missing or superfluous, or a fault of the board is requested at boot.
    """
    fault = request.fault
    if fault.needs_code != (request.code is not None):
        found = "no code" if request.code is None else f"code {request.code}"
        raise WrongInput(
            f"fault {fault.name} got {found}", f"{fault.name} with{'' if fault.needs_code else 'out'} a CODE"
        )
    texts = _table()["sxid" if fault.name == "sxid" else "xid"]
    fields = {
        "gpu": request.gpu,
        "code": request.code,
        "times": request.times,
        "seconds": request.seconds,
        "text": texts.get(str(request.code), "pid='<unknown>', name=<unknown>"),
        **{f"text{code}": text for code, text in _table()["xid"].items()},
    }
    driver = [command.format(**fields) for command in fault.driver]
    board = [command.format(**fields) for command in fault.board]
    if request.at_boot:
        if board or len(driver) != 1:
            raise WrongInput(f"fault {fault.name} is not available with --at-boot", "a fault of the driver only")
        line = f'options nvidia fault="{driver[0]}"'
        return f"echo {shlex.quote(line)} > {_AT_BOOT} && {_SYNC}"
    if fault.file:
        return f"set -e\nmkdir -p {PurePosixPath(fault.file).parent}\n: > {fault.file}\n{_SYNC}"
    lines = ["set -e", *(_write(_BOARD, command) for command in board)]
    if request.times > _MAX_CONSOLE_LINES:
        lines.append("dmesg --console-level alert")
    if fault.name in _CLEARING:
        # The driver may be not loaded, or not installed yet.
        files = (each.file for each in known().values() if each.file)
        lines.append(f"rm -f {' '.join((*files, _AT_BOOT))}; {_SYNC}")
        lines += [f"if [ -e {_DRIVER} ]; then {_write(_DRIVER, command)}; fi" for command in driver]
    else:
        lines += [_write(_DRIVER, command) for command in driver]
    if fault.name == "lockup":
        # The writing process spins in the kernel: it runs in the background.
        lines[1:] = [f"nohup sh -c {shlex.quote(lines[1])} > /dev/null 2>&1 &"]
    return "\n".join(lines)


def _write(file: str, command: str) -> str:
    return f"echo {shlex.quote(command)} > {file}"


def make(layout: Layout, machine: LabMachine, request: FaultRequest) -> None:
    """Inject the fault.

    Raises:
        WrongInput: the machine has no stand-in GPUs, or none of this number.
        GpunodesError: the machine did not respond, or has no stand-in driver.
    """
    if machine.boards is None:
        raise WrongInput(f"{machine.name} has no GPUs", "a machine of `gpunodes lab up --gpu-workers`")
    if request.gpu >= machine.boards.gpus:
        raise WrongInput(f"{machine.name} has GPUs 0 to {machine.boards.gpus - 1}", f"GPU {request.gpu}")
    argv = ssh.command(layout, machine, ["sudo", "sh"])
    try:
        done = subprocess.run(
            argv, input=script(request), capture_output=True, text=True, timeout=_SSH_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise GpunodesError(f"{machine.name} did not respond within {_SSH_LIMIT} s") from None
    if done.returncode:
        raise GpunodesError(
            f"fault {request.fault.name} on {machine.name} failed: {done.stderr.strip()}",
            remedy="faults of the driver need the stand-in driver installed and loaded: `gpunodes join`",
        )
