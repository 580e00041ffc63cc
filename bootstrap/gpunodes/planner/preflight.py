"""Preflight: checks the facts of all machines against the limits, and reports all problems at once.

Pure: facts (the result of the module ``host_facts``) and requirements in, findings out. The limits are in the tables.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.identity.matcher import Matcher
from gpunodes.identity.model import described, reported
from gpunodes.identity.values import same_uuid
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import gates, gpu, tables, versions

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
    requested: gpu.RequestedSoftware = field(default_factory=lambda: gpu.RequestedSoftware(""))
    """The software that its settings request; the Kubernetes version is that of `ClusterRequirements`."""
    address: str = ""
    """Its address in the inventory."""


@dataclass(frozen=True, slots=True)
class ClusterRequirements:
    """The cluster that the machines are for."""

    kubernetes: str
    """Minor or exact version."""
    ca_hash: str | None = None
    """The hash of the cluster's CA, ``sha256:...``; None if there is no cluster yet."""
    nodes: Sequence[Mapping[str, Any]] = ()
    """The cluster's nodes: name, address, boot_id, machine_id, product_uuid, runtime, ..."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check of one machine."""

    name: str
    title: str
    run: Callable[[MachineFacts, Facts, ClusterRequirements], Iterator[Problem]]
    severity: Severity = Severity.ERROR
    of_nodes: bool = False
    """Whether it concerns nodes only, not GPU hosts."""


def requirements_of(cluster: Mapping[str, Any] | None, kubernetes: str) -> ClusterRequirements:
    """The requirements of an existing cluster (a result of ``cluster_info``), or of a new one with ``kubernetes``."""
    cluster = cluster or {}
    return ClusterRequirements(
        kubernetes=str(cluster.get("version") or kubernetes).removeprefix("v"),
        ca_hash=cluster.get("ca_hash"),
        nodes=cluster.get("nodes", ()),
    )


def judge(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> list[PreflightFinding]:
    """Every problem of every machine, in the order of the machines."""
    findings = []
    shared = _shared(candidates, requirements)
    for candidate in candidates:
        if candidate.facts is None:
            problem = Problem(
                candidate.unreachable, "a reachable machine", "check that `ssh` to it works, with sudo and Python"
            )
            findings.append(PreflightFinding(candidate.name, "reachable", problem))
            continue
        findings += [
            PreflightFinding(candidate.name, check.name, problem, check.severity)
            for check in CHECKS
            if not (check.of_nodes and candidate.role is Role.GPU_HOST)
            for problem in check.run(candidate, candidate.facts, requirements)
        ]
        findings += shared.get(candidate.name, [])
    return findings


def _system(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    os = facts["os"]
    rows = [row for row in tables.read("systems")["system"] if row["id"] == os["id"]]
    version = str(os["version"] or "")
    if not any(version == row["version"] or version.startswith(row["version"] + ".") for row in rows):
        known = ", ".join(row["title"] for row in tables.read("systems")["system"])
        yield Problem(f"{os['name'] or os['id']} is not supported", f"one of {known}", "install one of these")


def _architecture(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    supported = tables.read("limits")["architectures"]
    if facts["arch"] not in supported:
        yield Problem(f"its architecture is {facts['arch']}", " or ".join(supported), "use another machine")


def _python(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    oldest = tables.read("limits")["python"]
    if _numbers(facts["python"]) < _numbers(oldest):
        yield Problem(
            f"Python is {facts['python']}",
            f"{oldest} or newer",
            "install a newer version and set ansible_python_interpreter to it",
        )


def _cpus(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    least = tables.read("limits")[candidate.role.value]["cpus"]
    if facts["cpus"] < least:
        yield Problem(f"it has {facts['cpus']} CPUs", f"at least {least}", "give it more, or use another machine")


def _memory(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    least = tables.read("limits")[candidate.role.value]["memory_mib"]
    if facts["memory_mib"] < least:
        yield Problem(
            f"it has {facts['memory_mib']} MiB of memory",
            f"at least {least} MiB",
            "give it more, or use another machine",
        )


def _disk(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    least = tables.read("limits")["disk_mib"]
    # A node in a cluster has already used the space that it needs, for its images.
    if facts["disk_free_mib"] < least and not facts["kubernetes"]["role"]:
        yield Problem(
            f"{facts['disk_free_mib']} MiB are free below /var/lib",
            f"at least {least} MiB",
            "free some space, or mount a larger disk at /var/lib",
        )


def _cgroup(_: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    row = versions.minors().get(versions.minor_of(requirements.kubernetes), {})
    if facts["cgroup"] == 1 and row.get("cgroup_v1") == "refused":
        yield Problem(
            "it runs cgroup v1",
            f"cgroup v2: Kubernetes {requirements.kubernetes} does not support v1",
            "boot with systemd.unified_cgroup_hierarchy=1, or choose Kubernetes 1.34",
        )


def _swap(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    if facts["swap"]:
        devices = ", ".join(facts["swap"])
        yield Problem(
            f"swap is on ({devices})",
            "no swap: the kubelet does not start with it",
            "nothing to do: gpunodes turns it off",
        )


def _hostname(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    name = facts["hostname"]
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name.lower()) or name.split(".")[0] == "localhost":
        yield Problem(
            f"its host name is {name!r}",
            "letters, digits, dots and dashes, and not localhost: it is the node's name",
            "set it with `hostnamectl set-hostname NAME`",
        )


def _clock(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    limit = tables.read("limits")["clock_skew_s"]
    if candidate.read_at is None:
        return
    skew = facts["time"] - candidate.read_at
    if abs(skew) > limit:
        direction = "ahead of" if skew > 0 else "behind"
        yield Problem(
            f"its clock is {abs(skew):.0f} s {direction} the controller's",
            f"at most {limit} s",
            "set it, and run a time service on the machine",
        )


def _ports(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    if facts["kubernetes"]["role"]:
        return  # Kubernetes itself listens on them
    taken = sorted(set(tables.read("limits")[candidate.role.value]["ports"]) & set(facts["listening"]))
    if taken:
        ports = ", ".join(map(str, taken))
        yield Problem(
            f"another program listens on port {ports}",
            "free ports",
            f"find it with `ss -ltnp 'sport = :{taken[0]}'` and stop it",
        )


def _modules(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    for name in tables.read("limits")["modules"]:
        if facts["modules"].get(name) == "missing":
            yield Problem(
                f"kernel {facts['kernel']} has no module {name}",
                "a kernel with this module",
                "install the kernel's modules, or reboot into the installed kernel",
            )


def _sources(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    planned = _planned(candidate, facts, requirements)
    packages = planned.packages if isinstance(planned, gpu.Plan) else ()
    unused = {source.value for source in gpu.Source} - {package.source.value for package in packages}
    if candidate.role is Role.GPU_HOST:
        # Kubernetes' sources do not concern it, and others only as far as its runtime comes from them.
        known = {source["name"] for source in facts["sources"]}
        unused |= known - _NAMES_OF_SOURCES - ({"docker"} if candidate.requested.runtime == "docker" else set())
    for source in facts["sources"]:
        # An installed driver, or one from another source, does not need NVIDIA's source.
        if not source["ok"] and source["name"] not in unused:
            yield Problem(
                f"{source['name']} at {source['url']}: {source['error']}",
                "a reachable source that is signed with the expected key",
                "check the network and the source's settings (gpunodes_*_url, gpunodes_*_key, gpunodes_image_mirrors)",
            )


def _cluster(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    own = facts["kubernetes"]
    if not own["role"]:
        return
    if candidate.role is Role.GPU_HOST:
        yield Problem(
            f"it is a node of a cluster ({own['server']})",
            "a machine of no cluster: it is in the group gpu_hosts",
            f"move it to the group workers of the cluster's inventory, or run `gpunodes remove {candidate.name}` there",
        )
        return
    if requirements.ca_hash and own["ca_hash"] and own["ca_hash"] != requirements.ca_hash:
        yield Problem(
            f"it belongs to another cluster ({own['server']})",
            "a machine of this cluster, or of no cluster",
            f"if that cluster no longer exists, run `gpunodes reset {candidate.name}`",
        )
    elif own["role"] != candidate.role.value:
        names = {"control_plane": "a control plane", "worker": "a worker"}
        yield Problem(
            f"it is already {names[own['role']]}",
            f"{names[candidate.role.value]}, or a machine of no cluster",
            f"run `gpunodes reset {candidate.name}` to remove it from its role",
        )


def _runtime(candidate: MachineFacts, _: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    own = _node_names([candidate], requirements)
    for node in requirements.nodes:
        # A node with Docker keeps Docker, also if a later run does not request it.
        if node["name"] in own and node.get("runtime") == "containerd" and candidate.requested.runtime == "docker":
            yield Problem(
                "its node uses the runtime containerd",
                "docker, as requested: a node keeps the runtime with which it joined",
                f"run `gpunodes remove {candidate.name}`, then join it again",
            )


def _version(_: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    for package in ("kubelet", "kubeadm"):
        installed = (facts["packages"].get(package) or "").split("-")[0]
        expected = requirements.kubernetes
        if installed and installed != expected and not installed.startswith(expected + "."):
            yield Problem(
                f"{package} {installed} is installed",
                f"{expected}: this command does not upgrade or downgrade packages",
                f"choose --kubernetes-version {installed}, or remove the package",
            )


def _gates(candidate: MachineFacts, _: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    if not candidate.requested.gates:
        return
    try:
        yield from gates.check(requirements.kubernetes, candidate.requested.gates)
    except WrongInput as error:
        yield replace(error.problem, remedy="remove gpunodes_feature_gates from the settings")


def _planned(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> gpu.Plan | Sequence[Problem]:
    """The GPU plan of the machine; feature gates have their own check."""
    if candidate.role is Role.GPU_HOST:
        return gpu.plan(candidate.name, facts, candidate.requested.without_kubernetes())
    requested = replace(candidate.requested, kubernetes_version=requirements.kubernetes, gates={})
    return gpu.plan(candidate.name, facts, requested)


def _gpu(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    planned = _planned(candidate, facts, requirements)
    if not isinstance(planned, gpu.Plan):
        yield from planned


def _gpu_warnings(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    planned = _planned(candidate, facts, requirements)
    if isinstance(planned, gpu.Plan):
        for warning in planned.warnings:
            yield Problem(warning, "no warnings", f"see `gpunodes gpu plan {candidate.name}`")


CHECKS: Sequence[Check] = (
    Check("os", "the operating system and its release are supported", _system),
    Check("arch", "Kubernetes supports the architecture", _architecture),
    Check("python", "Python is new enough for gpunodes' Ansible modules", _python),
    Check("cpus", "enough CPUs for the machine's role", _cpus, of_nodes=True),
    Check("memory", "enough memory for the machine's role", _memory, of_nodes=True),
    Check("disk", "enough free disk below /var/lib", _disk),
    Check("cgroup", "the Kubernetes version supports the cgroup version", _cgroup, of_nodes=True),
    Check("swap", "swap is off; gpunodes turns it off if it is on", _swap, Severity.WARNING, of_nodes=True),
    Check("hostname", "the host name is valid as a node's name", _hostname, of_nodes=True),
    Check("clock", "the clock agrees with the controller's", _clock),
    Check("ports", "the ports of the role are free", _ports, of_nodes=True),
    Check("modules", "the kernel has the modules for the pod network", _modules, of_nodes=True),
    Check("sources", "the package and image sources are reachable, and their keys are correct", _sources),
    Check("cluster", "the machine has no other role and belongs to no other cluster", _cluster),
    Check("runtime", "an existing node uses the requested container runtime", _runtime, of_nodes=True),
    Check("version", "no other Kubernetes version is installed", _version, of_nodes=True),
    Check("gates", "the kubelet of this version accepts the feature gates", _gates, of_nodes=True),
    Check("gpu", "driver, CUDA and runtime are compatible with the GPUs, the kernel and each other", _gpu),
    Check("gpu", "nothing in the plan for the GPUs needs a warning", _gpu_warnings, Severity.WARNING),
)

_NAMES_OF_SOURCES = {source.value for source in gpu.Source}
"""The names under which the machine checks sources of GPU software."""
# Identities that must be unique in a cluster. Source: kubernetes.io, "Verify the MAC address and product_uuid".
_UNIQUE = {
    "hostname": "set another with `hostnamectl set-hostname NAME`",
    "machine_id": "the disk was copied: remove /etc/machine-id, run `systemd-machine-id-setup`, reboot",
    "product_uuid": "the virtual machine was copied: give it its own UUID in the hypervisor",
}


def _shared(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, list[PreflightFinding]]:
    """Identities that machines share with each other or with nodes of the cluster, by machine."""
    found: dict[str, list[PreflightFinding]] = defaultdict(list)
    known = [candidate for candidate in candidates if candidate.facts and candidate.role is not Role.GPU_HOST]
    own = _node_names(known, requirements)
    other_nodes = [node for node in requirements.nodes if node["name"] not in own]
    for key, remedy in _UNIQUE.items():
        owners: dict[str, list[str]] = defaultdict(list)
        for candidate in known:
            if candidate.facts and (value := candidate.facts.get(key)):
                owners[str(value).lower()].append(candidate.name)
        for node in other_nodes:
            if value := node.get("name" if key == "hostname" else key):
                owners[value.lower()].append(f"node {node['name']}")
        for value, names in owners.items():
            # Vendors write placeholders into boards without a UUID; `same_uuid` never accepts these as equal.
            is_identity = key != "product_uuid" or same_uuid(value, value)
            if len(names) > 1 and is_identity:
                for name in names:
                    others = ", ".join(other for other in names if other != name)
                    title = key.replace("_", " ")
                    delete = "; or delete that node, if its machine no longer exists or was reinstalled"
                    what = f"{remedy}{delete if 'node ' in others else ''}"
                    fact = f"its {title} {value} is the same as that of {others}"
                    found[name].append(PreflightFinding(name, key, Problem(fact, f"a unique {title}", what)))
    return found


def _node_names(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> set[str]:
    """The names of the machines' nodes: those in the cluster, and those that rejoin after an interruption."""
    machines = {each.name: reported(each.name, each.address, each.facts) for each in candidates}
    matcher = Matcher([described(node) for node in requirements.nodes], machines.values())
    found = set()
    for candidate in candidates:
        member = bool((candidate.facts or {})["kubernetes"]["role"])
        find = matcher.match if member else matcher.joining
        if node := find(machines[candidate.name]).node:
            found.add(node.name)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
