"""A cluster that kubeadm made without gpunodes: its settings and machines, compared with those of gpunodes. Pure.

Everything that becomes part of the inventory matches a pattern first: a cluster must not be able to write a template or
a variable of its own into it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.errors import GpunodesError
from gpunodes.model import Role
from gpunodes.planner import node_address, versions

_VERSION = re.compile(r"v1\.(\d{1,3})\.\d{1,3}")
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,198}[a-z0-9])?")
_ENDPOINT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})(:\d{1,5})?")
_RUNTIME = re.compile(r"([a-z-]{1,30})://(\d{1,4}(?:\.\d{1,4}){0,2})\S{0,60}")
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
# Of the role network: its DaemonSet, and the label of its pods. The label alone is anybody's who may make pods.
_OWN_NETWORK = ("kube-flannel", "kube-flannel-ds")
_OWN_LABEL = "gpunodes.dev/network"
_DOMAIN = "cluster.local"
_NETWORKS: Mapping[str, str] = {
    "kube-flannel-ds": "flannel",
    "calico-node": "Calico",
    "cilium": "Cilium",
    "canal": "Canal",
    "weave-net": "Weave Net",
    "antrea-agent": "Antrea",
    "kube-router": "kube-router",
    "kube-ovn-cni": "Kube-OVN",
}
"""Network add-ons by the names of their DaemonSets, from their own manifests."""
_GPUS = "GPUs of pods"
_OPERATOR = "GPU Operator"
_OPERATOR_NAMESPACE = "gpu-operator"
_SERVING: Mapping[str, str] = {
    "nvidia-container-toolkit-daemonset": _OPERATOR,
    "nvidia-driver-daemonset": _OPERATOR,
    "k8s-device-plugin": "device plugin",
    "nvidia-device-plugin": "device plugin",
    "nvidia-gpu-device-plugin": "device plugin",
    "nvidia-dra-driver": "driver for dynamic resource allocation",
    "k8s-dra-driver-gpu": "driver for dynamic resource allocation",
}
"""Parts of names and images of what serves NVIDIA's GPUs. Those of the operator, whatever its namespace is:
github.com/NVIDIA/gpu-operator, assets; its other parts may stay."""
_DRIVER = "gpu.nvidia.com"
"""That of NVIDIA's ResourceSlices."""
_SHOWN = 5
_RUNTIMES = {"containerd": "containerd", "docker": "docker"}
_SKEW = 3
"""Minors by which a kubelet may be older than the API server (kubernetes.io, "Version Skew Policy")."""


class Fit(StrEnum):
    """How something fits."""

    SAME = "as gpunodes has it"
    OTHER = "differs"
    WRONG = "must be changed"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison. ``machine`` is "" for the cluster."""

    machine: str
    what: str
    found: str
    wanted: str
    fit: Fit


@dataclass(frozen=True, slots=True)
class AdoptedNode:
    """A machine of the inventory to write."""

    name: str
    address: str
    role: Role


@dataclass(frozen=True, slots=True)
class Adoption:
    """What the inventory gets, and the comparison."""

    settings: Mapping[str, Any]
    nodes: Sequence[AdoptedNode]
    rows: Sequence[Row] = field(default_factory=tuple)


def adopted(
    version: str,
    configuration: Any,
    nodes: Sequence[Mapping[str, Any]],
    sets: Sequence[Mapping[str, Any]],
    slices: Sequence[Mapping[str, Any]] = (),
) -> Adoption:
    """A cluster by its objects (``configuration``: kubeadm's, parsed; ``slices``: of resources); raises GpunodesError.

    That is for one of an unknown version, with IPv6, or with names and addresses of nodes that are not valid.
    """
    minor = _minor(version)
    found = _nodes(nodes)
    network = configuration.get("networking") if isinstance(configuration, Mapping) else None
    network = network if isinstance(network, Mapping) else {}
    settings: dict[str, Any] = {"gpunodes_kubernetes_version": f"1.{minor}"}
    rows = [Row("", "Kubernetes", f"1.{minor}", f"one of {', '.join(versions.minors())}", Fit.SAME)]
    for key, setting, title in (
        ("podSubnet", "gpunodes_pod_subnet", "network of pods"),
        ("serviceSubnet", "gpunodes_service_subnet", "network of services"),
    ):
        text = _subnet(network.get(key), title)
        if text:
            settings[setting] = text
        wanted = "an IPv4 network in kubeadm's configuration"
        rows.append(Row("", title, text or "not in it", wanted, Fit.SAME if text else Fit.OTHER))
    endpoint = configuration.get("controlPlaneEndpoint") if isinstance(configuration, Mapping) else None
    if isinstance(endpoint, str) and _ENDPOINT.fullmatch(endpoint):
        settings["gpunodes_control_plane_endpoint"] = endpoint
    several = sum(each.role is Role.CONTROL_PLANE for each in found) > 1
    rows.append(_endpoint_row(settings.get("gpunodes_control_plane_endpoint", ""), several=several))
    domain = str(network.get("dnsDomain") or _DOMAIN)[:80]
    rows.append(Row("", "domain of services", domain, _DOMAIN, Fit.SAME if domain == _DOMAIN else Fit.OTHER))
    row, settings["gpunodes_network"] = _network(sets)
    rows += [row, _gpus(nodes, sets, slices)]
    runtimes, own = set[str](), list[Row]()
    for node, each in zip(nodes, found, strict=True):
        own += _node_rows(each.name, node["status"]["nodeInfo"], minor, runtimes)
    if runtimes == {"docker"}:
        settings["gpunodes_runtime"] = "docker"
    return Adoption(settings, found, [*rows, *own])


def document(adoption: Adoption, connection: Mapping[str, object]) -> dict[str, Any]:
    """The inventory of a cluster, with the connection variables of the user for all machines."""
    groups: dict[str, Any] = {}
    for role, group in ((Role.CONTROL_PLANE, "control_plane"), (Role.WORKER, "workers")):
        hosts = {
            each.name: {"ansible_host": each.address, **connection} for each in adoption.nodes if each.role is role
        }
        if hosts:
            groups[group] = {"hosts": hosts}
    return {**groups, "all": {"vars": dict(adoption.settings)}}


def _minor(version: str) -> int:
    found = _VERSION.match(version)
    if not found:
        raise GpunodesError(f"the cluster reports the version {version[:40]!r}", "one such as v1.36.3", "check it")
    if f"1.{found[1]}" not in versions.minors():
        raise GpunodesError(
            f"the cluster has Kubernetes 1.{found[1]}",
            f"one of {', '.join(versions.minors())}",
            "upgrade it first, or use its kubeconfig: `gpunodes help --page other-clusters`",
        )
    return int(found[1])


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> list[AdoptedNode]:
    found: list[AdoptedNode] = []
    for node in nodes:
        name = node["metadata"]["name"]
        if not _NODE.fullmatch(name):
            raise GpunodesError(f"a node has the name {name[:80]!r}", "a name of letters, digits, dots and dashes")
        listed = node["status"].get("addresses") or ()
        address = next((each["address"] for each in listed if each["type"] == "InternalIP"), "")
        if not _is_usable(address):
            raise GpunodesError(
                f"the node {name} has the address {address[:50]!r}",
                "an IPv4 address of a machine (InternalIP): clusters with IPv6 are not supported",
                "use its kubeconfig: `gpunodes help --page other-clusters`",
            )
        if other := next((each.name for each in found if each.address == address or each.name == name), ""):
            raise GpunodesError(
                f"the nodes {other} and {name} have the address {address}",
                "an address for each node",
                "delete the node that is gone",
            )
        labels = node["metadata"].get("labels") or {}
        found.append(AdoptedNode(name, address, Role.CONTROL_PLANE if _CONTROL_PLANE in labels else Role.WORKER))
    if not any(each.role is Role.CONTROL_PLANE for each in found):
        raise GpunodesError(
            f"no node of the cluster has the label {_CONTROL_PLANE}",
            "control planes that are nodes, as kubeadm makes them",
            "use its kubeconfig: `gpunodes help --page other-clusters`",
        )
    return found


def _subnet(value: Any, title: str) -> str:
    if not isinstance(value, str) or not value:
        return ""
    try:
        return str(ipaddress.IPv4Network(value))
    except ValueError:
        raise GpunodesError(
            f"the {title} is {value[:80]!r}",
            "one IPv4 network: clusters with IPv6 are not supported",
            "use its kubeconfig: `gpunodes help --page other-clusters`",
        ) from None


def _endpoint_row(endpoint: str, *, several: bool) -> Row:
    wanted = "an address that does not depend on one control plane" if several else "any, for one control plane"
    fit = Fit.WRONG if several and not endpoint else Fit.SAME
    return Row("", "controlPlaneEndpoint", endpoint or "not set", wanted, fit)


def _network(sets: Sequence[Mapping[str, Any]]) -> tuple[Row, str]:
    """The network add-on, and the setting for it: only that of gpunodes is managed."""
    for each in sets:
        metadata, pods = each["metadata"], each["spec"]["template"].get("metadata") or {}
        if (metadata.get("namespace"), metadata["name"]) == _OWN_NETWORK and _OWN_LABEL in (pods.get("labels") or {}):
            return Row("", "network add-on", "flannel of gpunodes", "flannel", Fit.SAME), "flannel"
    names = sorted({_NETWORKS[each["metadata"]["name"]] for each in sets if each["metadata"]["name"] in _NETWORKS})
    found = ", ".join(names) or "not known"
    return Row("", "network add-on", found, "yours stays: gpunodes_network is none", Fit.OTHER), "none"


def _gpus(
    nodes: Sequence[Mapping[str, Any]], sets: Sequence[Mapping[str, Any]], slices: Sequence[Mapping[str, Any]]
) -> Row:
    """What serves GPUs to pods: `gpu install` adds NVIDIA's device plugin, and two of them break each other."""
    serving = [(each, title) for each in sets if (title := _serving(each))]
    foreign = [(each, title) for each, title in serving if not _is_own(each)]
    if foreign:
        names = ", ".join(_qualified(each) for each, _ in foreign[:_SHOWN])
        operator = any(title == _OPERATOR for _, title in foreign)
        wanted = (
            "before GPU software, or a machine with GPUs, is added, switch off its driver, toolkit and device plugin"
            if operator
            else "before GPU software, or a machine with GPUs, is added, delete it: gpunodes installs NVIDIA's own"
        )
        title = _OPERATOR if operator else foreign[0][1]
        return Row("", _GPUS, f"{title} ({names})", wanted, Fit.WRONG)
    if serving:
        return Row("", _GPUS, f"{serving[0][1]} of gpunodes", f"{serving[0][1]} of gpunodes", Fit.SAME)
    offering = [each["metadata"]["name"] for each in nodes if devices.counts(each["status"].get("allocatable") or {})]
    offering += [each["spec"].get("nodeName", "") for each in slices if each["spec"]["driver"] == _DRIVER]
    if offering:
        found = f"{', '.join(sorted(set(offering))[:_SHOWN])} offer them, by a program of no known name"
        return Row("", _GPUS, found, "before GPU software is added, find it and delete it", Fit.WRONG)
    return Row("", _GPUS, "none is offered to pods", "none, until `gpu install` or `join` adds them", Fit.SAME)


def _serving(daemons: Mapping[str, Any]) -> str:
    """What a DaemonSet serves GPUs with, by its name or images; "" if it does not."""
    metadata, pods = daemons["metadata"], daemons["spec"]["template"].get("spec") or {}
    images = [each.get("image") or "" for each in pods.get("containers") or ()]
    texts = [metadata["name"], *images]
    found = next((title for part, title in _SERVING.items() if any(part in text for text in texts)), "")
    return _OPERATOR if found and metadata["namespace"] == _OPERATOR_NAMESPACE else found


def _is_own(daemons: Mapping[str, Any]) -> bool:
    """Whether the role device_plugin made a DaemonSet: only administrators write into this namespace."""
    metadata = daemons["metadata"]
    labels = metadata.get("labels") or {}
    return metadata["namespace"] == "kube-system" and labels.get("app.kubernetes.io/managed-by") == "gpunodes"


def _qualified(daemons: Mapping[str, Any]) -> str:
    return f"{daemons['metadata']['namespace'][:60]}/{daemons['metadata']['name'][:60]}"


def _node_rows(name: str, info: Mapping[str, Any], minor: int, runtimes: set[str]) -> Iterator[Row]:
    kubelet = _VERSION.match(info["kubeletVersion"])
    own = int(kubelet[1]) if kubelet else None
    fits = own is not None and 0 <= minor - own <= _SKEW
    fit = Fit.SAME if own == minor else Fit.OTHER if fits else Fit.WRONG
    shown = f"1.{own}" if own is not None else repr(info["kubeletVersion"][:40])
    yield Row(name, "kubelet", shown, f"1.{minor}, that of the cluster", fit)
    runtime = _RUNTIME.fullmatch(info["containerRuntimeVersion"])
    title = runtime[1] if runtime else ""
    known = _RUNTIMES.get(title)
    runtimes.add(known or "")
    shown = f"{runtime[1]} {runtime[2]}" if runtime else repr(info["containerRuntimeVersion"][:40])
    wanted = "containerd, or docker with cri-dockerd"
    yield Row(name, "container runtime", shown, wanted, Fit.SAME if known else Fit.WRONG)


def _is_usable(text: str) -> bool:
    """Whether a machine may have this address: a cluster must not lead to the controller itself."""
    return node_address.is_ipv4(text) and node_address.is_usable(ipaddress.IPv4Address(text))
