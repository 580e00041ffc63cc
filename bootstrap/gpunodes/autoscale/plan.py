"""The plan of the power server: pools, machines and time limits, as `gpunodes autoscale up` writes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunodes import shape
from gpunodes.errors import WrongInput
from gpunodes.identity.model import MachineIdentity
from gpunodes.shape import Many, Named, Optional, Pattern

VERSION = 1
_MACHINES = 1000
"""Maximum number of machines: their states must fit into one ConfigMap."""
_MOST_BYTES = 1_000_000
"""Bytes of all states: a ConfigMap has at most 1 MiB (kubernetes.io, "ConfigMaps")."""
_MOST_OF_ONE = 32_000
_NAME = Pattern("a name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = Pattern("a pool", r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
KEY_NAME = r"JUMP-KEY-[0-9]{1,3}"
"""Keys for jump hosts among the passwords in the Secret; a node has no such name."""
_TEXTS = Named(str, 1000)
TAINT = {"key": str, "value": Optional(str), "effect": str}
TEMPLATE = {"labels": _TEXTS, "taints": Many(TAINT, 100), "capacity": _TEXTS}
_SHAPE = {
    "version": int,
    "idle_s": float,
    "boot_s": float,
    "scan_s": float,
    "proof_image": str,
    # The plan of an earlier release does not have it.
    "network": Optional(bool),
    "authorities": Named(str, 100),
    "jumps": Optional(
        Named(
            {
                "hops": Many({"address": str, "port": int, "user": str, "name": str}, 8),
                "known_hosts": str,
                "key": Pattern("the name of a key", KEY_NAME),
            },
            100,
        )
    ),
    "pools": Named(
        # The plan of an earlier release has no "given".
        {"min": int, "max": int, "priority": int, "template": TEMPLATE, "given": Optional(TEMPLATE)},
        1000,
        _LABEL,
    ),
    "machines": Named(
        {
            "pool": _LABEL,
            "bmc": Named(str, 20, Pattern("a setting", r"gpunodes_bmc_[a-z_]+")),
            # The plan of an earlier release has no "machine_id".
            "identity": {"uuid": str, "serial": str, "macs": Many(str, 64), "machine_id": Optional(str)},
            "address": str,
            "capacity": _TEXTS,
        },
        _MACHINES,
        _NAME,
    ),
}


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a pod sees of a node: labels, taints, and resources as Kubernetes writes quantities."""

    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    capacity: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """As JSON's types."""
        return {
            "labels": dict(self.labels),
            "taints": [dict(each) for each in self.taints],
            "capacity": dict(self.capacity),
        }


@dataclass(frozen=True, slots=True)
class Hop:
    """An SSH jump host; ``name`` is its name in known_hosts."""

    address: str
    port: int
    user: str
    name: str


@dataclass(frozen=True, slots=True)
class Jump:
    """Jump hosts before BMCs, the first hop first."""

    hops: tuple[Hop, ...]
    known_hosts: str
    """Lines of known_hosts with the keys of all these hosts: no other key is accepted."""
    key: str
    """The name of the file with the private key, among the passwords."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool that scales: how many of its machines may be on, and how early it is chosen."""

    name: str
    least: int
    most: int
    priority: int
    template: NodeShape
    """A node of it, while none of its machines has been seen in service."""
    given: NodeShape
    """The labels and taints that all its machines have by the settings; no capacity."""


def node_shape(document: Mapping[str, Any]) -> NodeShape:
    """The shape of a node from a document of the shape ``TEMPLATE``."""
    return NodeShape(document["labels"], document["taints"], document["capacity"])


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """A machine of a pool that scales. Its name is that of its node."""

    name: str
    pool: str
    bmc: Mapping[str, str]
    """Its settings gpunodes_bmc_*, without the password."""
    identity: MachineIdentity
    address: str
    """Where its kubelet listens: that shows whether a machine without a BMC is on."""
    capacity: Mapping[str, str]
    """The resources of its node as it was last seen, empty if it never was."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All pools and machines, and time limits in seconds."""

    pools: Mapping[str, Pool]
    machines: Mapping[str, PlannedMachine]
    idle_s: float = 600.0
    """How long a machine is idle before it is switched off."""
    boot_s: float = 1800.0
    """How long a machine may take from the order to its node with all GPUs."""
    scan_s: float = 10.0
    of_pool: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of a pool's machines, sorted."""
    proof_image: str = ""
    """Image with nvidia-smi of the pods that prove GPUs."""
    network: bool = False
    """Whether the network add-on sets a condition of each node when it is up there."""
    authorities: Mapping[str, str] = field(default_factory=dict)
    """Texts of CA files in PEM, by what gpunodes_bmc_verify of machines has."""
    jumps: Mapping[str, Jump] = field(default_factory=dict)
    """Jump hosts, by what gpunodes_bmc_jump of machines in the plan has."""

    @property
    def state_bytes(self) -> int:
        """How long the state of one machine may be."""
        return bytes_of_one(len(self.machines))


def bytes_of_one(machines: int) -> int:
    """How many bytes of a ConfigMap one of so many machines may fill."""
    return min(_MOST_OF_ONE, _MOST_BYTES // max(1, machines))


def parse(document: Any) -> Plan:
    """The plan that a document describes; raises WrongInput for any other document."""
    found = shape.wrong(document, _SHAPE)
    if not found and document["version"] != VERSION:
        found = f"its version is {document['version']}"
    if not found:
        pools = {
            name: Pool(
                name,
                each["min"],
                each["max"],
                each["priority"],
                node_shape(each["template"]),
                node_shape(each.get("given") or {"labels": {}, "taints": [], "capacity": {}}),
            )
            for name, each in document["pools"].items()
        }
        unknown = sorted({each["pool"] for each in document["machines"].values()} - set(pools))
        wrong = [each.name for each in pools.values() if not 0 <= each.least <= each.most]
        found = f"it has no pool {unknown[0]}" if unknown else f"min or max of {wrong[0]} is wrong" if wrong else ""
    if not found:
        jumps = {each["bmc"].get("gpunodes_bmc_jump", "") for each in document["machines"].values()}
        lost = sorted(jumps - {""} - set(document.get("jumps", {})))
        found = f"it has no jump host {lost[0]}" if lost else ""
    if found:
        raise WrongInput(
            f"the plan of the power server is invalid: {found}",
            "a plan of this gpunodes",
            "run `gpunodes autoscale up`",
        )
    machines = {name: _machine(name, each) for name, each in document["machines"].items()}
    of_pool = {
        pool: tuple(sorted(name for name, each in machines.items() if each.pool == pool)) for pool in sorted(pools)
    }
    limits = {key: float(document[key]) for key in ("idle_s", "boot_s", "scan_s")}
    return Plan(
        pools,
        machines,
        of_pool=of_pool,
        proof_image=document["proof_image"],
        network=document.get("network", False),
        authorities=document["authorities"],
        jumps={name: _jump(each) for name, each in document.get("jumps", {}).items()},
        **limits,
    )


def _jump(document: Mapping[str, Any]) -> Jump:
    hops = (Hop(each["address"], each["port"], each["user"], each["name"]) for each in document["hops"])
    return Jump(tuple(hops), document["known_hosts"], document["key"])


def _machine(name: str, document: Mapping[str, Any]) -> PlannedMachine:
    known = document["identity"]
    identity = MachineIdentity(
        name,
        machine_id=known.get("machine_id", ""),
        system_uuid=known["uuid"],
        serial=known["serial"],
        macs=tuple(known["macs"]),
    )
    return PlannedMachine(name, document["pool"], document["bmc"], identity, document["address"], document["capacity"])
