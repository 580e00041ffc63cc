"""How the power server does with 1,000 machines: real autoscaler, scheduler and API server, stand-in BMCs over HTTP.

Run by itself: `python -m tests.bench.scaling [MACHINES [PODS]]`. It needs no lab, but the programs that its mirror
builds. The power server runs in this process; the BMCs, and the kubelets of the machines, in another one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from gpunodes.autoscale import plan
from gpunodes.autoscale.power import BmcMachines
from gpunodes.engine.leases.held import Leases

from tests.bench import bmcs
from tests.bench.table import Row, show
from tests.power_fleet import document
from tests.repair import apiserver, autoscaling

MACHINES, POOLS, PODS = 1000, 10, 100
_LIMIT_S = 1800.0
_BOOT_S = 900.0
"""All machines of a pool are ordered at once, and the last ones wait for the first: none must be given up for that."""


def measure(folder: Path, machines: int = MACHINES, pods: int = PODS) -> list[Row]:
    """The rows; ``folder`` is private and empty."""
    names = {f"m{number}": f"pool{number % POOLS}" for number in range(machines)}
    pools = {f"pool{number}": (0, machines // POOLS, number) for number in range(POOLS)}
    with contextlib.ExitStack() as held:
        server = held.enter_context(apiserver.running(folder))
        fleet = held.enter_context(bmcs.running(server, document(names, pools)))
        planned = document(names, pools)
        (folder / "bmc").mkdir(mode=0o700)
        for name in names:
            planned["machines"][name]["bmc"] = fleet.settings(name)
            (folder / "bmc" / name).write_text(bmcs.PASSWORD)

        def connect(store: autoscaling.StoreWithLogs) -> BmcMachines:
            held.callback((leases := Leases(store, "the power server")).close)
            return BmcMachines(plan.parse(planned), folder / "bmc", leases, store.ask_off)

        began = time.monotonic()
        with autoscaling.running(server, pools, names, connect, _BOOT_S) as site:
            site.until(lambda: sum(site.power.size(pool).most for pool in pools) == machines, _LIMIT_S)
            known, asked = time.monotonic() - began, fleet.seen().requests
            rows = [
                Row(
                    f"the power states of {machines} machines, at the start",
                    f"{known:.0f} s",
                    "-",
                    f"{asked / machines:.1f} requests to each BMC; the start of the programs included",
                )
            ]
            rows += _switched(site, fleet, machines, pods)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return [*rows, Row("memory of the power server", f"{memory} MiB", "-", "resident, at most; this test included")]


def _switched(site: autoscaling.Site, fleet: bmcs.Bmcs, machines: int, pods: int) -> list[Row]:
    """The rows of machines that are switched on for pods, and off again."""
    calls, asked, began = site.session.calls, fleet.seen().requests, time.monotonic()
    for number in range(pods):
        site.pod(f"job{number}")
    site.until(lambda: fleet.seen().started >= pods, _LIMIT_S)
    ordered = time.monotonic() - began
    site.until(lambda: all(site.node_of(f"job{number}") for number in range(pods)), _LIMIT_S)
    bound = time.monotonic() - began
    started, on = fleet.seen().started, (site.session.calls - calls, fleet.seen().requests - asked)
    for number in range(pods):
        site.delete_pod(f"job{number}")
    began = time.monotonic()
    site.until(lambda: not site.server.call("GET", "/api/v1/nodes")["items"] and not site.power._orders._busy, _LIMIT_S)
    off = time.monotonic() - began
    calls, asked = site.session.calls - calls - on[0], fleet.seen().requests - asked - on[1]
    return [
        Row(
            f"{pods} pods that wait, {machines} machines that are off",
            f"{ordered:.0f} s until {pods} machines were on ({60 * pods / ordered:.0f} a minute)",
            "-",
            f"all pods had their nodes after {bound:.0f} s",
        ),
        Row(f"machines switched on for {pods} pods", str(started), str(pods), "one for each"),
        Row(
            f"{started} machines that are idle",
            f"{off:.0f} s until they were off, and had no node ({60 * started / off:.0f} a minute)",
            "-",
            "4 s of it are the time that a machine must be idle",
        ),
        Row(
            "requests to the API for each machine, on and off",
            f"{on[0] / started:.1f} and {calls / started:.1f}",
            "-",
            "the looks at all machines included",
        ),
        Row("requests to each BMC, on and off", f"{on[1] / started:.1f} and {asked / started:.1f}", "-", "Redfish"),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        found = measure(Path(root), *map(int, sys.argv[1:3]))
        print(f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, {os.cpu_count()} processors:\n")
        show(found)
