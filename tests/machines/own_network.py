"""A network add-on by hand: each node bridges its own pods, and has routes to those of the others."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from .conftest import Operator

SUBNET_S = 300.0
"""Seconds until the controller manager has given a new node its subnet."""


def _subnet(operator: Operator, name: str) -> str:
    """The subnet of a node's pods."""
    deadline = time.monotonic() + SUBNET_S
    while not (found := operator.kubectl("get", "node", name, "-o", "jsonpath={.spec.podCIDR}").strip()):
        assert time.monotonic() < deadline, f"{name} has no subnet"
        time.sleep(3)
    return found


def bridge(operator: Operator, name: str, addresses: Mapping[str, str]) -> None:
    """Connect the pods of a node; ``addresses`` are those of all machines that are or become nodes."""
    subnet = _subnet(operator, name)
    plugin = {
        "cniVersion": "1.0.0",
        "name": "bridge",
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": True,
        "ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}], "subnet": subnet},
    }
    operator.ssh(name, f"mkdir -p /etc/cni/net.d && echo '{json.dumps(plugin)}' >/etc/cni/net.d/10-bridge.conf")
    for other in addresses:
        if other != name:
            operator.ssh(other, f"ip route replace {subnet} via {addresses[name]}")
