"""Tests by a trial boot whether KVM works: /dev/kvm may open and still be unable to run a stock kernel."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from gpunodes.lab import initrd
from gpunodes.lab.images import DiskImage

_LIMIT = 20
"""Seconds; with a working KVM the trial takes about one."""


def accelerator(cache: Path, image: DiskImage) -> str:
    """``kvm`` when a trial boot of the image's kernel succeeds, else ``tcg`` (emulation).

    The result is kept until the host reboots, or the image or QEMU changes.
    """
    version = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    inputs = {"boot": boot, "image": image.folder.name, "qemu": version.splitlines()[0]}
    cached = cache / "accelerator.json"
    try:
        earlier = json.loads(cached.read_text())
        if earlier["inputs"] == inputs:
            return str(earlier["accelerator"])
    except (OSError, ValueError, KeyError):
        pass
    found = "kvm" if Path("/dev/kvm").exists() and _boots(image) else "tcg"
    cached.write_text(json.dumps({"inputs": inputs, "accelerator": found}))
    return found


def _boots(image: DiskImage) -> bool:
    command = [
        "qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-m", "256", "-nodefaults", "-nographic", "-no-reboot",
        "-serial", "stdio", "-kernel", str(image.kernel), "-initrd", str(image.initrd),
        "-append", f"console=ttyS0 quiet panic=-1 {initrd.TRIAL}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False
    return initrd.TRIAL_PASSED in done.stdout
