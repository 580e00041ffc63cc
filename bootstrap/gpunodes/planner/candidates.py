"""What preflight judges: machines with their facts, and the cluster that they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpunodes.model import Role
from gpunodes.planner import gpu
from gpunodes.planner.endpoint import EndpointSettings
from gpunodes.planner.networks import NetworkSettings

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A node or a future node: its facts, or why there are none."""

    name: str
    role: Role
    facts: Facts | None
    unreachable: str = ""
    """Why its facts could not be read."""
    read_at: float | None = None
    """The controller's clock when the facts arrived, in seconds since 1970; None if it is unknown."""
    asked_at: float | None = None
    """The same when the module that reads them was started."""
    requested: gpu.RequestedSoftware = field(default_factory=lambda: gpu.RequestedSoftware(""))
    """The software that its settings request; the Kubernetes version is that of `ClusterRequirements`."""
    address: str = ""
    """Its address in the inventory."""
    node_address: str = ""
    """The address in the cluster that its settings request, or a network that contains it."""
    node: Mapping[str, Any] = field(default_factory=dict)
    """Its node in the cluster, which ``judge`` finds; {} if it has none."""
    network: NetworkSettings = field(default_factory=NetworkSettings)
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    time_service: str = ""
    """Its setting gpunodes_time_service."""
    containerd: str = ""
    """Its setting gpunodes_containerd_version."""
    silent: bool = False
    """It did not answer at all; else ``unreachable`` is what failed on it."""


class Growth(Enum):
    """Which control planes a run may add to a cluster."""

    NONE = ""
    SELECTED = "join"
    ALL = "up"
    """All of the inventory: with the number that it asks for the run ends."""


@dataclass(frozen=True, slots=True)
class ControlPlanes:
    """What machines cannot report of the control planes."""

    machines: Mapping[str, str] = field(default_factory=dict)
    """The addresses of the inventory's control planes, by name, in its order."""
    endpoint: str = ""
    """Host or host:port of the cluster's endpoint, existing or requested; "" for the first control plane's address."""
    leader_election: bool = True
    """Whether controller managers and schedulers elect a leader."""
    growth: Growth = Growth.NONE


@dataclass(frozen=True, slots=True)
class ClusterRequirements:
    """The cluster that the machines are for."""

    kubernetes: str
    """Minor or exact version."""
    ca_hash: str | None = None
    """The hash of the cluster's CA, ``sha256:...``; None if there is no cluster yet."""
    nodes: Sequence[Mapping[str, Any]] = ()
    """The cluster's nodes: name, address, boot_id, machine_id, product_uuid, runtime, ..."""
    joins: bool = True
    """Whether the machines are to be nodes of it: other machines need no address in the cluster."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """The addresses in the cluster of nodes, and of the machines that are checked, by name; `judge` fills them in."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """The same of the control planes, if there are several; `judge` fills them in."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """The addresses or names by which the inventory reaches its machines, by name; those that are not checked too."""
    prepares: bool = False
    """Whether the machines are only prepared, perhaps for an image of their disk, and join later."""
    alone: bool = False
    """Whether the machines are checked by themselves: they may be nodes of a cluster of which nothing is known,
    neither its CA nor its version."""
    endpoint: str = ""
    """HOST:PORT at which the machines of the cluster reach its API; "" without a cluster."""
    macs: frozenset[str] = frozenset()
    """The MAC addresses of the interfaces on which the control planes of this run have the virtual address; `judge`
    fills them in."""
    control_planes: ControlPlanes = field(default_factory=ControlPlanes)

    @property
    def unread(self) -> dict[str, str]:
        """The addresses of machines that may join a new cluster later; those that are checked report their networks."""
        if self.ca_hash or self.prepares:
            return {}
        return {name: address for name, address in self.listed.items() if name not in self.addresses}


def requirements_of(
    cluster: Mapping[str, Any] | None,
    kubernetes: str,
    *,
    joins: bool = True,
    prepares: bool = False,
    alone: bool = False,
    control_planes: ControlPlanes | None = None,
    listed: Mapping[str, str] | None = None,
) -> ClusterRequirements:
    """The requirements of an existing cluster (a result of ``cluster_info``), or of a new one with ``kubernetes``."""
    cluster = cluster or {}
    return ClusterRequirements(
        kubernetes=str(cluster.get("version") or kubernetes).removeprefix("v"),
        ca_hash=cluster.get("ca_hash"),
        nodes=cluster.get("nodes", ()),
        joins=joins,
        prepares=prepares,
        alone=alone,
        endpoint=str(cluster.get("endpoint") or ""),
        control_planes=control_planes or ControlPlanes(),
        listed=listed or {},
    )
