"""Machines that are off on purpose, switched on before they are upgraded, as by `gpunodes power NAME on --wait`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gpunodes.engine.fleet import InventoryFleet, match_nodes, repair_settings
from gpunodes.errors import sentence
from gpunodes.model import Machine
from gpunodes.operations import switched_off, switching
from gpunodes.operations.repair.context import Report, connected

_OFF = frozenset({"off", "by-hand"})
"""Phases of the autoscaler in which it neither switches a machine nor gave it up."""
_AT_ONCE = 4
"""A boot takes minutes, and draws the most power."""


def asleep(fleet: InventoryFleet, machines: Sequence[Machine]) -> list[Machine]:
    """Those of ``machines`` that are off by the autoscaler, or by `gpunodes power NAME off --drain`.

    Raises NoResponse without an API.
    """
    off = {name for name, each in switched_off.read(fleet.inventory).items() if each.phase in _OFF}
    with connected(fleet, repair_settings(fleet.settings()), "wake") as (cluster, _):
        nodes = {node.name: node for node in cluster.nodes()}
        for name, match in match_nodes(fleet, list(nodes.values()), {}).items():
            maintained = nodes[match.node.name].maintenance if match.node else None
            if maintained and maintained.reason == switching.REASON:
                off.add(name)
    return [machine for machine in machines if machine.name in off]


def wake(fleet: InventoryFleet, machines: Sequence[Machine], report: Report) -> list[str]:
    """Switch machines on, and wait until their nodes are ready; the names of those that are not, which is reported.

    They stay on: the autoscaler switches those of its pools off again when they are idle. Ctrl-C ends the waiting, and
    is raised when the orders in flight have ended.
    """
    stop = threading.Event()

    def switch(machine: Machine) -> bool:
        if stop.is_set():
            return False
        try:
            switching.on(fleet, machine, report, stop=stop)
        except Exception as problem:  # of one machine: the others go on
            report(machine.name, f"it is not upgraded: {sentence(problem)}")
            return False
        return True

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(switch, machine) for machine in machines]
        try:
            done = [each.result() for each in running]
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            report("", "stopping: no further machine is switched on, and those that are on stay on")
            raise
    return [machine.name for machine, woken in zip(machines, done, strict=True) if not woken]
