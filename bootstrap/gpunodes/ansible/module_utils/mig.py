"""Brings the MIG instances of a machine's GPUs to a layout: the instances of each GPU by their profile.

This file is also the program of gpunodes-mig.service, which makes the instances again after a boot, a reset of a GPU or
a reload of the driver: they end with it. It needs only the standard library. Everything is read from nvidia-smi and
/proc; the program never destroys an instance.

Sources: NVIDIA MIG User Guide, "Getting Started with MIG"; github.com/NVIDIA/mig-parted, deployments/systemd.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

CAPABILITIES = "/proc/driver/nvidia/capabilities"
CDI = "/var/run/cdi/nvidia.yaml"
SERVICES = ("nvsm", "nvidia-dcgm", "dcgm")
"""Services that keep a GPU from changing its mode; they are stopped meanwhile. Source: mig-parted, hooks.sh."""
STOPPED = "/run/gpunodes-mig-stopped"
"""The services that are stopped meanwhile, one a line: the next run starts them after one that was killed."""
LIMIT_S = 120
Run = Callable[[Sequence[str]], "tuple[int, str]"]
"""Runs a program; returns its exit code and its output."""


class MigError(Exception):
    """What was found, and what to do."""

    def __init__(self, found: str, remedy: str = "see `nvidia-smi -q -d MIG` and `dmesg | grep NVRM`") -> None:
        super().__init__(found)
        self.found, self.remedy = found, remedy


@dataclass(frozen=True)
class Gpu:
    """A GPU, its MIG mode, and its instances."""

    uuid: str
    minor: str
    current: str
    """Enabled, Disabled, or N/A for a GPU without MIG."""
    pending: str
    """The mode after a reset of the GPU."""
    devices: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """The profile and the UUID of each instance that programs can use."""
    instances: int = 0
    """All GPU instances, also those without a compute instance."""

    def matches(self, layout: Mapping[str, int]) -> bool:
        """Whether the GPU has exactly these instances; without any, whether MIG is off."""
        profiles = Counter(profile for profile, _ in self.devices)
        if not layout:
            return self.current != "Enabled" and self.pending != "Enabled"
        return self.current == "Enabled" and profiles == Counter(layout) and self.instances == sum(layout.values())

    def described(self) -> str:
        """``7 x 1g.10gb``, ``MIG without instances`` or ``no MIG``."""
        counts = Counter(profile for profile, _ in self.devices)
        unusable = self.instances - len(self.devices)
        parts = [f"{count} x {profile}" for profile, count in sorted(counts.items())]
        parts += [f"{unusable} unusable"] if unusable > 0 else []
        return ", ".join(parts) or ("MIG without instances" if self.current == "Enabled" else "no MIG")


def described(layout: Mapping[str, int]) -> str:
    """A layout in words."""
    return ", ".join(f"{count} x {profile}" for profile, count in sorted(layout.items())) or "no MIG"


def read(run: Run) -> list[Gpu]:
    """The GPUs that nvidia-smi lists; raises MigError."""
    try:
        root = ElementTree.fromstring(_smi(run, "-q", "-x"))  # noqa: S314 - the machine's own driver wrote it
    except ElementTree.ParseError:
        raise MigError("nvidia-smi's output is not XML") from None
    listed = instances_of(_smi(run, "-L"))
    found = []
    for gpu in root.findall("gpu"):
        uuid, minor = _text(gpu, "uuid"), _text(gpu, "minor_number")
        current, pending = _text(gpu, "mig_mode/current_mig"), _text(gpu, "mig_mode/pending_mig")
        folders = glob.glob(f"{CAPABILITIES}/gpu{minor}/mig/gi[0-9]*") if minor.isdigit() else []
        devices = listed.get(uuid, [])
        found.append(Gpu(uuid, minor, current, pending, devices, max(len(folders), len(devices))))
    return found


def instances_of(listing: str) -> dict[str, list[tuple[str, str]]]:
    """Profiles and UUIDs of instances by their GPU's UUID, from ``nvidia-smi -L``."""
    found: dict[str, list[tuple[str, str]]] = {}
    gpu = ""
    for line in listing.splitlines():
        if name := re.match(r"GPU \d+: .*\(UUID: (GPU-[0-9A-Za-z-]+)\)", line):
            gpu = name[1]
        elif gpu and (device := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[0-9A-Za-z/-]+)\)", line)):
            found.setdefault(gpu, []).append((device[1], device[2]))
    return found


def different(gpus: Sequence[Gpu], layout: Mapping[str, int]) -> list[Gpu]:
    """The GPUs that do not have the layout."""
    return [gpu for gpu in gpus if not gpu.matches(layout)]


def apply(layout: Mapping[str, int], run: Run, *, destroys: bool) -> str:
    """Bring all GPUs to the layout; returns why the machine must be rebooted to complete that, "" if it need not be.

    No process may use the GPUs. Without ``destroys`` it raises MigError if a GPU has other instances. An empty layout
    turns MIG off.
    """
    wrong = different(read(run), layout)
    if foreign := [gpu for gpu in wrong if gpu.instances and not destroys]:
        raise MigError(
            f"GPU {foreign[0].uuid} has {foreign[0].described()}, and not {described(layout)}",
            "drain the node, and run `gpunodes join` for this machine",
        )
    if not wrong:
        return ""
    stopped = _stopped()
    stopped += [
        name for name in SERVICES if name not in stopped and run(["systemctl", "is-active", "--quiet", name])[0] == 0
    ]
    with open(STOPPED, "w", encoding="ascii") as file:
        file.write("\n".join(stopped))
    for name in stopped:
        run(["systemctl", "stop", name])
    try:
        for gpu in wrong:
            if gpu.instances:
                _destroy(gpu, run)
        if waiting := _switch(wrong, "Enabled" if layout else "Disabled", run):
            names = ", ".join(waiting)
            return f"the MIG mode of GPU {names} changes with a reset of the GPU, which nvidia-smi could not do"
        for gpu in wrong if layout else ():
            _create(gpu, layout, run)
    finally:
        start_services(run)
    if left := different(read(run), layout):
        raise MigError(f"GPU {left[0].uuid} has {left[0].described()} after the change, and not {described(layout)}")
    return ""


def start_services(run: Run) -> None:
    """Start the services that a change of the layout stopped; nothing if none is left."""
    for name in _stopped():
        run(["systemctl", "start", "--no-block", name])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(STOPPED)


def _stopped() -> list[str]:
    try:
        with open(STOPPED, encoding="ascii", errors="replace") as file:
            found = file.read().split()
    except FileNotFoundError:
        return []
    return [name for name in SERVICES if name in found]


def _switch(gpus: Sequence[Gpu], mode: str, run: Run) -> list[str]:
    """Set the MIG mode; returns the GPUs whose mode changes with their next reset. Raises MigError."""
    output = {}
    for gpu in gpus:
        if gpu.current != mode:
            output[gpu.uuid] = run(["nvidia-smi", "-i", gpu.uuid, "-mig", "1" if mode == "Enabled" else "0"])[1]
    waiting = []
    for gpu in read(run):
        if gpu.uuid in output and gpu.current != mode:
            if gpu.pending != mode:
                raise MigError(
                    f"the MIG mode of GPU {gpu.uuid} is {gpu.current}: {_last_line(output[gpu.uuid]) or 'no message'}"
                )
            waiting.append(gpu.uuid)
    return waiting


def _destroy(gpu: Gpu, run: Run) -> None:
    if gpu.devices:
        _must(run, ["nvidia-smi", "mig", "-i", gpu.uuid, "-dci"])
    _must(run, ["nvidia-smi", "mig", "-i", gpu.uuid, "-dgi"])


def _create(gpu: Gpu, layout: Mapping[str, int], run: Run) -> None:
    """Make the instances, and the device files by which containers get them."""
    profiles = ",".join(profile for profile, count in layout.items() for _ in range(count))
    _must(run, ["nvidia-smi", "mig", "-i", gpu.uuid, "-cgi", profiles, "-C"])
    for path in sorted(glob.glob(f"{CAPABILITIES}/gpu{gpu.minor}/mig/gi*/access")) + sorted(
        glob.glob(f"{CAPABILITIES}/gpu{gpu.minor}/mig/gi*/ci*/access")
    ):
        _must(run, ["nvidia-modprobe", "-f", path])


def describe_devices(run: Run) -> None:
    """Write the CDI specification of all GPUs and instances again, if the container toolkit is installed."""
    if shutil.which("nvidia-ctk", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"):
        os.makedirs(os.path.dirname(CDI), mode=0o755, exist_ok=True)
        _must(run, ["nvidia-ctk", "cdi", "generate", f"--output={CDI}"])


def _smi(run: Run, *arguments: str) -> str:
    return _must(run, ["nvidia-smi", *arguments])


def _must(run: Run, argv: Sequence[str]) -> str:
    code, output = run(argv)
    if code:
        raise MigError(f"`{' '.join(argv)}`: {_last_line(output) or f'exit code {code}'}")
    return output


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _text(gpu: ElementTree.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip()


def run_bounded(argv: Sequence[str]) -> tuple[int, str]:
    """Run a program; it is left behind if it does not end in time: a hung driver keeps it from being killed."""
    with contextlib.suppress(FileNotFoundError):
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        deadline = time.monotonic() + LIMIT_S
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            # With a return code set, Python does not wait for the process when it exits.
            process.returncode = -9
            return 124, f"it did not end within {time.monotonic() - deadline + LIMIT_S:.0f} s"
        return process.returncode, output
    return 127, f"{argv[0]} is not installed"


def main(arguments: Sequence[str]) -> int:
    """The program of the service; its arguments are the layout, ``1g.10gb=7``."""
    layout = {name: int(count) for name, _, count in (each.partition("=") for each in arguments)}
    try:
        if not different(read(run_bounded), layout):
            start_services(run_bounded)
            return 0
        why = apply(layout, run_bounded, destroys=False)
        if why:
            raise MigError(why, "reboot the machine")
        describe_devices(run_bounded)
    except MigError as error:
        sys.stderr.write(f"{error.found}; {error.remedy}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
