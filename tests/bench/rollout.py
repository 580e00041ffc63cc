"""A roll-out to 1,000 nodes, killed in the middle and resumed: real API server and gpunodes, simulated machines.

Run by itself: `python -m tests.bench.rollout`. It needs no lab, and the programs that the lab's mirror builds.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.table import Row, show
from tests.repair import apiserver, kwok, test_rollout
from tests.repair.apiserver import ApiServer

SMALL, ALL, POOLS, BUDGET = 100, 1000, 4, 20
_LIMIT_S = 7200.0


def measure(folder: Path, machines: int = ALL, small: int = SMALL) -> list[Row]:
    """The rows; ``folder`` is private and empty."""
    with apiserver.running(folder) as server, kwok.running(server):
        names = [f"n{index:04}" for index in range(machines)]
        for index, name in enumerate(names):
            server.call("POST", "/api/v1/nodes", kwok.node(name, {"test/pool": f"p{index % POOLS}"}))
        kwok.wait_ready(server, machines)
        _, calls, _ = _roll_out(folder / "small", server, names[:small])
        with test_rollout.Watcher(server, machines, POOLS) as watcher:
            seconds, more, twice = _roll_out(folder / "all", server, names, kill=True)
        test_rollout.clean(server)
    ratio = (more / machines) / (calls / small)
    return [
        Row(f"roll-out to {machines} nodes, killed in the middle", f"{seconds:.0f} s", "-", f"budget {BUDGET} a pool"),
        Row("nodes of a pool that were cordoned at once", str(watcher.most), str(BUDGET), "seen by a watch"),
        Row(
            "machines to which the work was done twice",
            str(twice),
            str(BUDGET * POOLS),
            "those that the kill interrupted",
        ),
        Row(
            f"requests for each of {machines} machines, relative to {small}",
            f"{ratio:.2f}",
            "1.2",
            f"{more / machines:.1f} and {calls / small:.1f}; without those of the command that was killed",
        ),
    ]


def _roll_out(folder: Path, server: ApiServer, names: Sequence[str], *, kill: bool = False) -> tuple[float, int, int]:
    """Seconds, requests, and how many machines had the work twice; with ``kill`` half of the roll-out is resumed."""
    folder.mkdir()
    machines = test_rollout.prepare(folder, server, names)
    began = time.monotonic()
    running = test_rollout.start(folder, 1, server, machines, "begin", BUDGET)
    if kill:
        while sum(each["version"] == "2" for each in test_rollout.read(machines).values()) < len(names) // 2:
            if running.poll() is not None or time.monotonic() - began > _LIMIT_S:
                sys.exit((folder / "controller-1.log").read_text()[-3000:])
            time.sleep(0.5)
        running.send_signal(signal.SIGKILL)
        running.wait()
        before = sum(each["version"] == "2" for each in test_rollout.read(machines).values())
        running = test_rollout.start(folder, 2, server, machines, "resume", BUDGET)
    else:
        before = 0
    result = test_rollout.finish(running, folder, _LIMIT_S)
    found = test_rollout.read(machines)
    # Of a resumed roll-out the requests for the rest, as if it were all of them.
    calls = round(result["calls"] * len(names) / (len(names) - before))
    return time.monotonic() - began, calls, sum(each["applied"] > 1 for each in found.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        show(measure(Path(root), *map(int, sys.argv[1:])))
