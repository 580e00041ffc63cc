"""Benchmark of a repair, excluding boot time: from the kernel's report of a hang to a verified healthy machine."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.bench.table import Row

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

REPORT = "Workqueue: events os_execute_work_item [nvidia]"
BOOT_S = 900.0
"""Seconds until a machine must serve its GPUs again after a reset."""
RESET = "systemd-run --on-active=1 sh -c 'echo b >/proc/sysrq-trigger'"


def measure(bench: Bench) -> Row:
    """The row; gpu-1 is a node of the bench's cluster that serves its GPUs."""
    # Imported here: that module imports this one by way of gpu.py.
    from tests.bench.__main__ import KUBECTL

    def until(action: Callable[[], str | bool]) -> str | bool:
        """Repeat ``action`` until its result is true; returns that result."""
        deadline = time.monotonic() + BOOT_S
        while not (found := action()):
            if time.monotonic() > deadline:
                raise RuntimeError("gpu-1 is not healthy again after a reset")
            time.sleep(2)
        return found

    def boot_id(before: str = "") -> str:
        """The id of the machine's current boot; empty while it is ``before`` or the machine is unresponsive."""
        try:
            found = bench.on("gpu-1", "cat /proc/sys/kernel/random/boot_id").strip()
        except subprocess.CalledProcessError:
            return ""
        return "" if found == before else found

    def healthy() -> bool:
        try:
            bench.gpunodes("health", "gpu-1")
        except subprocess.CalledProcessError:
            return False
        return True

    def boot() -> None:
        """Reset the healthy machine without gpunodes, and wait until it serves its GPUs.

        `kubectl wait` watches the node: polling would load the control plane's processors, and so make the boot longer
        and the measured difference shorter.
        """
        before = boot_id()
        bench.on("gpu-1", RESET)
        booted = f"--for=jsonpath='{{.status.nodeInfo.bootID}}'={until(lambda: boot_id(before))}"
        wait = f"{KUBECTL} wait node/gpu-1 --timeout={BOOT_S:.0f}s"
        gpus = r"--for=jsonpath='{.status.allocatable.nvidia\.com/gpu}'=2"
        bench.on("control-1", f"{wait} {booted} && {wait} {gpus} && {wait} --for=condition=Ready")
        until(healthy)

    # A longer limit only: an emulated machine boots slowly.
    variables = bench.folder / "inventory" / "host_vars" / "control-1.yml"
    variables.parent.mkdir()
    variables.write_text("gpunodes_repair_verify_timeout: 900\n")
    boot_s = bench.seconds(boot)
    bench.on("gpu-1", "sysctl -qw kernel.hung_task_timeout_secs=20 kernel.hung_task_check_interval_secs=5")
    for fault in ("reboot-hang", "hang"):
        bench.lab("fault", "gpu-1", fault)
    bench.on("gpu-1", f"timeout 200 sh -c {shlex.quote(f'until dmesg | grep -qF {REPORT!r}; do sleep 1; done')}")
    repair_s = bench.seconds(lambda: bench.gpunodes("health", "gpu-1", "--reboot-hung", "--yes"))
    return Row(
        "repair of a hang, excluding boot time",
        f"{repair_s - boot_s:.0f} s",
        "60 s",
        f"{repair_s:.0f} s, with an orderly reboot that hangs; boot {boot_s:.0f} s, from reset to serving GPUs",
    )
