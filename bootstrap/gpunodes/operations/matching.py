"""The nodes of machines, by what these report in this run or reported last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.engine import identities
from gpunodes.identity.matcher import Match, Matcher
from gpunodes.identity.model import described, reported
from gpunodes.inventory import Inventory
from gpunodes.model import Machine


def matches(
    inventory: Inventory,
    machines: Sequence[Machine],
    facts: Mapping[str, Mapping[str, Any]],
    nodes: Sequence[Mapping[str, Any]],
    *,
    confirmed: bool = True,
) -> dict[str, Match]:
    """What the matcher finds for ``machines`` among the cluster's ``nodes``.

    ``facts`` are those of this run, by machine. ``confirmed=False`` is for display only. Raises GpunodesError if the
    recorded identities cannot be read.
    """
    addresses = {machine.name: machine.address for machine in inventory.machines()}
    known = identities.recall_all(inventory.cluster, addresses)
    known |= {name: reported(name, addresses[name], each) for name, each in facts.items()}
    matcher = Matcher([described(node) for node in nodes], known.values())
    return {machine.name: matcher.match(known[machine.name], confirmed=confirmed) for machine in machines}
