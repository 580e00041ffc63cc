"""The values of an upgrade of Kubernetes: machines with their versions, steps, and the plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner.versions import numbers

Facts = Mapping[str, Any]
CLUSTER = "cluster"
"""The name under which findings about the cluster appear."""
PROGRAMS = {
    "kube-apiserver": "the API server",
    "kube-controller-manager": "the controller manager",
    "kube-scheduler": "the scheduler",
}
"""The components of a control plane, and their names in messages."""


class Part(StrEnum):
    """What is upgraded on a machine in one step."""

    CONTROL_PLANE = "control_plane"
    NODE = "node"
    """The kubelet with its configuration."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A machine of the cluster."""

    name: str
    role: Role
    facts: Facts | None
    """A result of host_facts; None if it cannot be read."""
    own: Facts | None
    """A result of upgrade_facts; None if it cannot be read."""
    node: Mapping[str, Any] = field(default_factory=dict)
    """Its node (from cluster_info); {} if it has none."""
    unreachable: str = ""
    """Why it could not be read."""
    gates: Mapping[str, Any] = field(default_factory=dict)
    """The feature gates that its settings request for its kubelet."""
    maintenance: str = ""
    """The maintenance that its node is in, as one line; "" for none."""

    @property
    def left(self) -> str:
        """Why it is passed over, "" if it is judged and upgraded. Control planes come first, so they never are."""
        if self.role is Role.CONTROL_PLANE:
            return ""
        if self.maintenance:
            return f"it is in maintenance: {self.maintenance}"
        if self.facts is None or self.own is None:
            return self.unreachable or "it did not report its versions"
        # A machine whose upgrade was interrupted is not ready until that is continued.
        if self.is_down and not self.own["unfinished"]:
            return f"its node is not ready: {self.node['reason']}"
        return ""

    @property
    def is_down(self) -> bool:
        """Whether it has a node, which is not ready."""
        return bool(self.node) and not self.node["ready"]

    @property
    def kubelet(self) -> str:
        """The version of its kubelet, ``1.36.3``: the one that runs, else the installed one."""
        return str(self.node.get("version") or (self.own or {}).get("kubelet") or "").removeprefix("v")

    @property
    def control_plane(self) -> str:
        """The oldest version of its static pods; "" if it has none."""
        images = (self.own or {}).get("images") or {}
        found = [str(tag).removeprefix("v") for name, tag in images.items() if name in PROGRAMS]
        return min(found, key=numbers, default="")


@dataclass(frozen=True, slots=True)
class Step:
    """One machine's part of the upgrade."""

    machine: str
    part: Part
    present: str
    target: str
    drained: bool
    """Whether the node is drained first."""


@dataclass(frozen=True, slots=True)
class Component:
    """What follows the version of the cluster: etcd, CoreDNS, kube-proxy, add-ons."""

    name: str
    present: str
    target: str


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A worker that stays as it is: in maintenance, off, silent or not ready."""

    machine: str
    present: str
    """The version of its kubelet, "" if it is not known."""
    why: str
    holds_addons: bool
    """Whether the add-ons wait for it: its node is not ready."""


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """The order of an upgrade, and what is in its way."""

    requested: str
    target: str
    """The exact version, "" if it is not known: then a finding says why."""
    version: str
    """The version of the cluster."""
    steps: Sequence[Step]
    components: Sequence[Component]
    findings: Sequence[PreflightFinding]
    irreversible: Sequence[str]
    """What cannot be rolled back, as sentences."""
    passed_over: Sequence[PassedOver] = ()

    @property
    def holds_addons(self) -> list[str]:
        """The machines that the add-ons wait for."""
        return [each.machine for each in self.passed_over if each.holds_addons]

    @property
    def possible(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


def image_parts(image: str) -> tuple[str, str]:
    """The last part of an image's name, and its tag without its digest: ("flannel", "v0.26.7")."""
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    return name, tag
