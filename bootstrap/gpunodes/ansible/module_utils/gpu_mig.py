"""Slices the GPUs of a machine into MIG instances, and takes them away again; a unit makes them again at each boot."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field

from . import mig
from .gpu_verify import Level
from .host import gpu_driver
from .host.changes import Changes
from .host.converge import converge
from .host.spec import Spec
from .problem import MachineProblem
from .process import run as run_program
from .process import run_alone
from .report import Difference

UNIT = "/etc/systemd/system/gpunodes-mig.service"
PROGRAM = "/usr/local/libexec/gpunodes/gpu-mig"
_SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager", *mig.SERVICES)
"""Services of the driver, which may have the GPUs open while their mode changes."""
_RELEASE_S = 120
"""How long the device plugin and other pods that leave the node may take to end."""
REMOVED = Spec(section="gpu", absent=(UNIT, PROGRAM))


@dataclass
class Outcome:
    """What was done or, in check mode, would be done."""

    actions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    reboot: str = ""
    """Why the machine must be rebooted to complete it, "" if no reboot is required."""


def is_made() -> bool:
    """Whether gpunodes sliced the GPUs of this machine."""
    return os.path.exists(UNIT)


def differs(layout: Mapping[str, int]) -> bool:
    """Whether instances must be made or taken away; raises MachineProblem if nvidia-smi fails.

    Without a layout, instances that gpunodes did not make stay.
    """
    return bool(layout or is_made()) and bool(mig.different(_read(), layout))


def bring(spec: Spec, layout: Mapping[str, int], check: bool) -> Outcome:
    """Bring the GPUs to the layout, and install the unit that keeps it; raises MachineProblem while they are in use."""
    if not layout:
        return remove(check)
    if check and not os.path.exists(f"{gpu_driver.SYS}/module/nvidia"):
        done = converge(spec, check)
        return Outcome([f"slice the GPUs into {mig.described(layout)}", *done.actions], done.differences)
    wrong = mig.different(_read(), layout)
    if wrong:
        _check_unused(check=check)
    elif not check:
        mig.start_services(_run)
    # First the unit: after a power cut, it completes the layout.
    done = converge(spec, check)
    made = _changed(spec, wrong, layout, check)
    return Outcome([*done.actions, *made.actions], [*done.differences, *made.differences], made.reboot)


def remove(check: bool, *, leaves: bool = False) -> Outcome:
    """Take away the instances that gpunodes made, and their unit; nothing on other machines.

    ``leaves``: gpunodes leaves the machine, also one whose GPUs nvidia-smi cannot read: they keep their mode.
    """
    if not is_made():
        # What a run that was killed left beside the unit.
        done = converge(REMOVED, check) if os.path.exists(PROGRAM) else Outcome()
        return Outcome(done.actions, done.differences)
    wrong: list[mig.Gpu] = []
    if os.path.exists(f"{gpu_driver.SYS}/module/nvidia"):
        try:
            wrong = mig.different(_read(), {})
        except MachineProblem:
            if not leaves:
                raise
    if wrong:
        _check_unused(check=check)
    elif not check:
        mig.start_services(_run)
    made = _changed(REMOVED, wrong, {}, check)
    if not check:
        run_program(["systemctl", "disable", os.path.basename(UNIT)])
    if made.reboot:
        # The files stay until the mode is off, so that the next run looks again.
        return made
    done = converge(REMOVED, check)
    if done.actions and not check:
        run_program(["systemctl", "daemon-reload"])
    return Outcome([*made.actions, *done.actions], [*made.differences, *done.differences], made.reboot)


def checked(levels: Sequence[dict[str, str]], layout: Mapping[str, int]) -> list[dict[str, str]]:
    """The results of a verification, of which the level host fails unless all GPUs have the layout."""
    if not layout or not levels or levels[0]["state"] != "ok":
        return list(levels)
    try:
        wrong = mig.different(_read(), layout)
    except MachineProblem as error:
        return [asdict(Level("host", "failed", *astuple(error.problem)))]
    if wrong:
        fact = f"GPU {wrong[0].uuid} has {wrong[0].described()}"
        remedy = "see `journalctl -u gpunodes-mig`; drain the node, and run `gpunodes join` for this machine"
        return [asdict(Level("host", "failed", fact, mig.described(layout), remedy))]
    return [{**levels[0], "fact": f"{levels[0]['fact']}, {mig.described(layout)} each"}, *levels[1:]]


def _changed(spec: Spec, wrong: Sequence[mig.Gpu], layout: Mapping[str, int], check: bool) -> Outcome:
    changes, reboot = Changes(spec, check), ""
    if not wrong:
        return Outcome()
    before = {gpu.uuid: gpu.described() for gpu in wrong}
    after = dict.fromkeys(before, mig.described(layout))
    action = f"slice {len(wrong)} GPUs into {mig.described(layout)}" if layout else f"turn MIG off on {len(wrong)} GPUs"
    if changes.step(action, Difference("MIG instances", before, after)):
        try:
            reboot = mig.apply(layout, _run, destroys=True)
            if not reboot:
                mig.describe_devices(_run)
        except mig.MigError as error:
            raise _problem(error) from error
    return Outcome(changes.actions, changes.differences, reboot)


def _check_unused(*, check: bool) -> None:
    """Raise MachineProblem while processes use the GPUs; the driver's own services do not count."""
    deadline = time.monotonic() + (0 if check else _RELEASE_S)
    while holders := gpu_driver.holders(_SERVICES):
        # In a dry run the device plugin has not left the node.
        if check:
            return
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"{', '.join(holders)} use{'s' if len(holders) == 1 else ''} the GPUs",
                "no process: MIG instances are changed only while nothing uses the GPUs",
                "end these processes (pods: `kubectl drain`), then run the command again",
            )
        time.sleep(2)


def _read() -> list[mig.Gpu]:
    try:
        return mig.read(_run)
    except mig.MigError as error:
        raise _problem(error) from error


def _problem(error: mig.MigError) -> MachineProblem:
    return MachineProblem(error.found, "GPUs with the layout of gpunodes_gpu_sharing", error.remedy)


def _run(argv: Sequence[str]) -> tuple[int, str]:
    result = run_alone(argv, mig.LIMIT_S)
    return result.code, result.out if result.ok else result.text
