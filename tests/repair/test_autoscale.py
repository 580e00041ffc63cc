"""Pods that wait switch simulated machines on, and idle ones are switched off; the real autoscaler decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import apiserver, autoscaling
from .autoscaling import Site

MACHINES = {"h1": "h100", "h2": "h100", "t1": "t4"}
POOLS = {"h100": (0, 1, 50), "t4": (0, 1, 10)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with apiserver.running(tmp_path) as server, autoscaling.running(server, POOLS, MACHINES) as found:
        yield found


def test_one_machine_for_one_pod_then_the_other_pool_then_none(site: Site) -> None:
    site.pod("first")
    site.until(lambda: site.node_of("first"))
    assert site.started() == ["h1"], "one machine for one pod, although its GPUs come after its node"
    assert site.node_of("first") == "h1"
    site.pod("second")  # h100 is at its max
    site.until(lambda: site.node_of("second"))
    assert site.started() == ["h1", "t1"]
    for name in ("first", "second"):
        site.delete_pod(name)
    site.until(lambda: not site.machines.on)
    site.until(lambda: not site.server.call("GET", "/api/v1/nodes")["items"])
    assert sorted(site.machines.orders[2:]) == [("h1", "off"), ("t1", "off")]
    # The other machine of the pool was off for longer.
    site.pod("third", "h100")
    site.until(lambda: site.node_of("third"))
    assert site.started()[2:] == ["h2"]


def test_a_bmc_that_refuses_and_a_boot_that_never_registers(site: Site) -> None:
    site.machines.refuses = {"h1", "h2"}
    site.pod("first")
    site.until(lambda: site.node_of("first"))
    assert site.node_of("first") == "t1"
    assert site.started() == ["t1"]
    site.machines.refuses = set()
    site.machines.dead = {"t1"}
    site.delete_pod("first")
    site.until(lambda: not site.machines.on)
    site.pod("second", "t4")
    site.until(lambda: site.machines.orders[-1] == ("t1", "on"))
    site.until(lambda: site.machines.orders[-1] == ("t1", "off"), 150)
    assert not site.machines.on
