"""The control planes with which a run would end: how many they are, and whether they can serve one cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import tables
from gpunodes.planner.candidates import ClusterRequirements, ControlPlanes, Growth, MachineFacts

CHECK = "control_plane"
START_API = "start its API; or `gpunodes reset` all control planes, which destroys the cluster"
"""The remedy for a control plane whose cluster does not respond, where a new one would be created."""
_ELECTING = ("controllerManager", "scheduler")
_LOSSES = {2: "none", 4: "one, as with 3", 6: "two, as with 5"}
"""What an even number of members may lose. Source: etcd.io, FAQ, "Why an odd number of cluster members?"."""


def given(
    machines: Mapping[str, str], endpoint: str, arguments: object, growth: str, *, leader_election: bool = True
) -> ControlPlanes:
    """What is known of the control planes beside facts; ``arguments`` is the setting gpunodes_component_arguments.

    ``leader_election``: as the cluster reports it.
    """
    components = arguments if isinstance(arguments, Mapping) else {}
    off = [name for name in _ELECTING if _is_off(components.get(name))]
    return ControlPlanes(machines, endpoint, leader_election and not off, Growth(growth))


def _is_off(arguments: object) -> bool:
    value = arguments.get("leader-elect") if isinstance(arguments, Mapping) else None
    return str(value).lower() in {"false", "f", "0"}


def judge(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> Iterator[PreflightFinding]:
    """Problems of the control planes together; each is reported once, for the last machine that joins."""
    controls = [each for each in candidates if each.role is Role.CONTROL_PLANE and each.facts]
    if not requirements.joins or requirements.prepares or not controls:
        return
    known = requirements.control_planes
    yield from _unknown_cluster(controls, requirements)
    members = {str(node["name"]) for node in requirements.nodes if node.get("role") == "control_plane"}
    joining = [each for each in controls if str(each.node.get("name", "")) not in members]
    size = len(members) + len(joining)
    subject = (joining or controls)[-1].name
    outside = [each for each in joining if (each.facts or {})["kubernetes"]["role"] != "control_plane"]
    if requirements.ca_hash and outside and known.growth is Growth.NONE:
        problem = Problem(
            "its cluster exists already, on another control plane",
            "a new cluster",
            f"`gpunodes join {subject}` makes it another control plane of that cluster",
        )
        yield PreflightFinding(subject, CHECK, problem)
        return
    for problem, severity in _size(size, known.growth, grows=bool(joining)):
        yield PreflightFinding(subject, CHECK, problem, severity)
    if size > 1 and joining:
        for problem in (*_endpoint(controls, requirements), *_leader_election(known)):
            yield PreflightFinding(subject, CHECK, problem)


def _unknown_cluster(controls: Sequence[MachineFacts], requirements: ClusterRequirements) -> Iterator[PreflightFinding]:
    """Control planes of a cluster that was not read: a second cluster would be created beside it."""
    creator = next(iter(requirements.control_planes.machines), controls[0].name)
    for each in controls if requirements.ca_hash is None else ():
        if each.name != creator and (each.facts or {})["kubernetes"]["role"] == "control_plane":
            problem = Problem(
                "it is a control plane of a cluster that does not respond",
                "a cluster that responds, or none on any control plane",
                START_API,
            )
            yield PreflightFinding(each.name, CHECK, problem)


def _size(size: int, growth: Growth, *, grows: bool) -> Iterator[tuple[Problem, Severity]]:
    most = int(tables.read("limits")["control_planes"])
    if size > most and grows:
        yield (
            Problem(
                f"the cluster would have {size} control planes",
                f"at most {most}: each member makes etcd slower",
                "keep 3, or 5, in the group control_plane",
            ),
            Severity.ERROR,
        )
    elif size % 2 == 0:
        refused = size == 2 and grows and growth is Growth.ALL  # noqa: PLR2004 - two of two must work
        yield (
            Problem(
                f"the cluster {'would have' if grows else 'has'} {size} control planes, of which it may lose "
                f"{_LOSSES.get(size, 'no more than with one less')}",
                "an odd number: 1, 3 or 5",
                "add one to the group control_plane, or remove one from it",
            ),
            Severity.ERROR if refused else Severity.WARNING,
        )


def _endpoint(controls: Sequence[MachineFacts], requirements: ClusterRequirements) -> Iterator[Problem]:
    """An endpoint that leads to one of the control planes alone."""
    known = requirements.control_planes
    host = _host(known.endpoint)
    if host and host not in _names(controls, requirements):
        return
    first = next(iter(known.machines), controls[0].name)
    yield Problem(
        f"the cluster's endpoint {host} is that of the control plane {_names(controls, requirements)[host]} alone"
        if host
        else f"the cluster's endpoint would be the control plane {first}",
        "an endpoint that outlives each machine: a virtual address, or a load balancer",
        "for a new cluster set gpunodes_control_plane_vip or gpunodes_control_plane_endpoint; `gpunodes endpoint set "
        "ADDRESS:6443` moves the endpoint of an existing one",
    )


def _names(controls: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, str]:
    """The names and addresses that belong to one control plane each, with that control plane's name.

    Not all addresses of its interfaces: one of them may be the virtual address.
    """
    found: dict[str, Any] = {}
    for name, address in requirements.control_planes.machines.items():
        found |= {name.lower(): name, address.lower(): name}
    for each in controls:
        facts = each.facts or {}
        own = (each.address, each.node_address, facts["hostname"], facts["kubernetes"].get("advertised"))
        found |= {str(value).lower(): each.name for value in own if value}
    for node in requirements.nodes:
        if node.get("role") == "control_plane":
            found |= {str(value).lower(): node["name"] for value in (node["name"], node.get("address")) if value}
    found.pop("", None)
    return found


def _host(endpoint: str) -> str:
    """The host of ``host:port``, or the whole text without a port."""
    host, separator, port = endpoint.strip().lower().rpartition(":")
    return (host if separator and port.isdigit() else endpoint.strip().lower()).strip("[]")


def _leader_election(known: ControlPlanes) -> Iterator[Problem]:
    if not known.leader_election:
        yield Problem(
            "leader election is off (leader-elect: false)",
            "one active controller manager and scheduler among several control planes",
            "remove it from gpunodes_component_arguments; in an existing cluster also from the ConfigMap "
            "kubeadm-config and from /etc/kubernetes/manifests on its control plane",
        )
