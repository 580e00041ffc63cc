"""The cost of selecting machines: of all names one by one, compared with one pattern for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gpunodes.inventory import Inventory
from gpunodes.model import Role

from tests.bench.table import Row


def write(folder: Path, machines: int) -> Path:
    """An inventory with so many workers."""
    path = folder / "hosts.yml"
    addresses = (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}" for number in range(machines))
    hosts = (f"gpu-{number}: {{ansible_host: {address}}}" for number, address in enumerate(addresses))
    path.write_text("workers:\n  hosts:\n" + "".join(f"    {line}\n" for line in hosts))
    return path


def ratio(inventory: Inventory, machines: int) -> float:
    """The processor time of selecting all workers by their names, in multiples of that of one pattern."""
    names = [f"gpu-{number}" for number in range(machines)]
    inventory.select(["gpu-*"], Role.WORKER)  # the variables are read once
    return _seconds(lambda: inventory.select(names, Role.WORKER)) / _seconds(
        lambda: inventory.select(["gpu-*"], Role.WORKER)
    )


def measure(folder: Path) -> list[Row]:
    """The row; ``folder`` is private and empty."""
    found = [ratio(Inventory(write(folder, machines)), machines) for machines in (1000, 5000)]
    return [
        Row(
            "selecting all machines by their names",
            " and ".join(f"{each:.1f} times" for each in found),
            "10 times",
            "the processor time of one pattern for all; 1,000 and 5,000 machines",
        )
    ]


def _seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started
