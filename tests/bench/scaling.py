"""How the power server does with 1,000 machines: real autoscaler, scheduler and API server, simulated machines.

Run by itself: `python -m tests.bench.scaling`. It needs no lab, and the programs that the lab's mirror builds.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from tests.bench.table import Row, show
from tests.repair import apiserver, autoscaling

MACHINES, POOLS, PODS = 1000, 10, 100
_LIMIT_S = 900.0


def measure(folder: Path) -> list[Row]:
    """The rows; ``folder`` is private and empty."""
    machines = {f"m{number}": f"pool{number % POOLS}" for number in range(MACHINES)}
    pools = {f"pool{number}": (0, MACHINES // POOLS, number) for number in range(POOLS)}
    with apiserver.running(folder) as server, autoscaling.running(server, pools, machines) as site:
        before = site.session.calls
        began = time.monotonic()
        for number in range(PODS):
            site.pod(f"job{number}")
        site.until(lambda: len(site.started()) >= PODS, _LIMIT_S)
        ordered = time.monotonic() - began
        site.until(lambda: all(site.node_of(f"job{number}") for number in range(PODS)), _LIMIT_S)
        bound = time.monotonic() - began
        calls = site.session.calls - before
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        started = len(site.started())
    return [
        Row(
            f"{PODS} pods that wait, {MACHINES} machines that are off",
            f"{ordered:.0f} s until {PODS} machines were ordered ({60 * PODS / ordered:.0f} a minute)",
            "-",
            f"all pods had their nodes after {bound:.0f} s",
        ),
        Row(f"machines switched on for {PODS} pods", str(started), str(PODS), "one for each"),
        Row("requests of the power server for each machine", f"{calls / started:.1f}", "10", "its looks included"),
        Row("memory of the power server and the simulation", f"{memory} MiB", "-", "resident, at most"),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        show(measure(Path(root)))
