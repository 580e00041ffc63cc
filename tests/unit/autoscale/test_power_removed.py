"""A machine of a pool that scales, after `gpunodes remove`: it may be anyone's."""

from __future__ import annotations

import pytest
from gpunodes.autoscale.kept_off import parse
from gpunodes.autoscale.server import NotPossible
from gpunodes.autoscale.state import Phase

from tests.power_fleet import Site, parsed

POOLS = {"h100": (0, 2, 50), "t4": (0, 1, 10)}


def test_it_is_left_alone_until_it_joins_again() -> None:
    site = Site(parsed({"w1": "h100", "w2": "h100", "w3": "t4"}, POOLS))
    site.server.increase("t4", 1)
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    for _ in range(3):
        site.look()
    site.machines.orders.clear()
    site.store.off |= parse({"w3": '{"by": "gpunodes remove", "since": 1800000000, "boot_id": ""}'})
    del site.store.objects["w3"]
    site.look()
    # It is pulled out, reinstalled, given to another team: neither a pod nor the days without a start switch it.
    site.machines.on.discard("w3")
    site.time += 40 * 86_400
    site.look()
    assert "took it out of the cluster" in site.store.states()["w3"].reason
    with pytest.raises(NotPossible):
        site.server.increase("t4", 1)
    assert not [each for each in site.machines.orders if each[0] == "w3"]
    site.machines.on.add("w3")
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    for _ in range(4):
        site.look()
    assert site.phases()["w3"] is Phase.ON
    assert not site.store.off
