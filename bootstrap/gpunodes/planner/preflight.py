"""Preflight: checks the facts of all machines against the limits, and reports all problems at once.

Pure: facts (the result of the module ``host_facts``) and requirements in, findings out. The limits are in the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import (
    clocks,
    cluster_addresses,
    control_planes,
    endpoint_checks,
    exact_versions,
    gates,
    gpu,
    network_checks,
    node_address,
    runtime_versions,
    space,
    systems,
    tables,
    versions,
)
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.gpu_installed import runtimes_of
from gpunodes.planner.membership import ETCD_IN_THE_WAY, membership
from gpunodes.planner.shared_identities import own_nodes, shared

Facts = Mapping[str, Any]


class Concerns(Enum):
    """What a check is about."""

    MACHINES = "all machines"
    NODES = "machines that are or become nodes, now or after they were prepared"
    JOINING = "machines that are nodes or join now"


@dataclass(frozen=True, slots=True)
class Check:
    """A named check of one machine."""

    name: str
    title: str
    run: Callable[[MachineFacts, Facts, ClusterRequirements], Iterator[Problem]]
    severity: Severity = Severity.ERROR
    concerns: Concerns = Concerns.MACHINES

    def applies(self, candidate: MachineFacts, requirements: ClusterRequirements) -> bool:
        """Whether it concerns this machine."""
        if self.concerns is Concerns.MACHINES:
            return True
        joins = not (requirements.prepares or requirements.alone)
        return candidate.role is not Role.GPU_HOST and (joins or self.concerns is not Concerns.JOINING)


def judge(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> list[PreflightFinding]:
    """Every problem of every machine, in the order of the machines."""
    findings = []
    own = own_nodes([candidate for candidate in candidates if candidate.facts], requirements)
    candidates = [replace(candidate, node=own.get(candidate.name, {})) for candidate in candidates]
    macs = frozenset(endpoint_checks.macs([candidate.facts for candidate in candidates if candidate.facts]))
    requirements = replace(requirements, addresses=cluster_addresses.of_all(candidates, requirements), macs=macs)
    requirements = replace(requirements, controls=cluster_addresses.of_controls(candidates, requirements))
    same = {} if requirements.prepares or requirements.alone else shared(candidates, requirements)
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
            if check.applies(candidate, requirements)
            for problem in check.run(candidate, candidate.facts, requirements)
        ]
        findings += same.get(candidate.name, [])
    return [*findings, *control_planes.judge(candidates, requirements)]


def _system(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    os = facts["os"]
    row = systems.nearest(os)
    if systems.known(os) is None and not (row and candidate.requested.unsupported_os):
        titles = ", ".join(each["title"] for each in tables.read("systems")["system"])
        remedy = f", or use --unsupported-os, which treats it as {row['title']}" if row else ""
        yield Problem(f"{os['name'] or os['id']} is not supported", f"one of {titles}", f"install one of these{remedy}")


def _treated(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    os = facts["os"]
    row = systems.nearest(os) if candidate.requested.unsupported_os else None
    if row and systems.known(os) is None:
        yield Problem(
            f"{os['name'] or os['id']} is not supported, and is treated as {row['title']} (gpunodes_unsupported_os)",
            "a supported system",
            "packages for another release may not install or work: try it on a machine that you can reinstall",
        )


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


def _disk(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    planned = _planned(candidate, facts, requirements)
    # Without a plan for the GPUs, which has its own findings, the rest still needs its space.
    plan = planned if isinstance(planned, gpu.Plan) else gpu.Plan(candidate.name)
    yield from space.problems(facts, candidate.role, plan, candidate.requested)


def _data_directory(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    # On a GPU host only Docker's data is there.
    moves = candidate.role is not Role.GPU_HOST or "docker" in {candidate.requested.runtime, *runtimes_of(facts)}
    if moves and (problem := facts["data_directory"]["problem"]):
        yield Problem(problem["found"], problem["wanted"], problem["remedy"])


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
    yield from clocks.disagreement(facts, candidate.asked_at, candidate.read_at)


def _time(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    yield from clocks.unattended(facts, candidate.asked_at, candidate.read_at, candidate.time_service)


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
    treated = candidate.requested.unsupported_os and systems.known(facts["os"]) is None
    if candidate.role is Role.GPU_HOST:
        # Kubernetes' sources do not concern it, and others only as far as its runtime comes from them.
        known = {source["name"] for source in facts["sources"]}
        unused |= known - _NAMES_OF_SOURCES - ({"docker"} if candidate.requested.runtime == "docker" else set())
    for source in facts["sources"]:
        if treated and not source["name"].startswith("images of "):
            continue  # the machine checked the addresses for its own system, not for the one that it is treated as
        # An installed driver, or one from another source, does not need NVIDIA's source.
        if not source["ok"] and source["name"] not in unused:
            yield Problem(
                f"{source['name']} at {source['url']}: {source['error']}",
                "a reachable source that is signed with the expected key",
                "check the network and the source's settings (gpunodes_*_url, gpunodes_*_key, gpunodes_image_mirrors)",
            )


def _proxies(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    for proxy in facts.get("proxies", ()):
        yield Problem(
            f"the proxy {proxy['url']} cannot be used: {proxy['error']}",
            "a proxy that the machine reaches, with credentials that it accepts",
            "correct gpunodes_http_proxy and gpunodes_https_proxy, or start the proxy",
        )


def _cluster(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    own = facts["kubernetes"]
    if requirements.prepares:
        yield from filter(None, [membership(candidate.name, facts)])
        return
    if not own["role"]:
        if candidate.role is Role.CONTROL_PLANE and own.get("foreign_etcd"):
            yield ETCD_IN_THE_WAY
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
    elif own["role"] != candidate.role.value and not requirements.alone:
        names = {"control_plane": "a control plane", "worker": "a worker"}
        yield Problem(
            f"it is already {names[own['role']]}",
            f"{names[candidate.role.value]}, or a machine of no cluster",
            f"run `gpunodes reset {candidate.name}` to remove it from its role",
        )


def _runtime(candidate: MachineFacts, _: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    # A node with Docker keeps Docker, also if a later run does not request it.
    if candidate.node.get("runtime") == "containerd" and candidate.requested.runtime == "docker":
        yield Problem(
            "its node uses the runtime containerd",
            "docker, as requested: a node keeps the runtime with which it joined",
            f"run `gpunodes remove {candidate.name}`, then join it again",
        )


def _address(candidate: MachineFacts, _: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    if requirements.joins:
        yield from node_address.problems(cluster_addresses.node_addresses(candidate), requirements.nodes)


def _lost_address(candidate: MachineFacts, _: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    yield from node_address.lost(cluster_addresses.node_addresses(candidate))


def _version(_: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    for package in () if requirements.alone and facts["kubernetes"]["role"] else ("kubelet", "kubeadm"):
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


def _network(
    find: Callable[[network_checks.Case], Iterator[Problem]],
    candidate: MachineFacts,
    facts: Facts,
    requirements: ClusterRequirements,
) -> Iterator[Problem]:
    """A check of the network; each machine is checked against the addresses of all others."""
    others, controls = (
        {name: address for name, address in found.items() if name != candidate.name}
        for found in (requirements.addresses, requirements.controls)
    )
    shared = controls if candidate.endpoint.vip else {}
    in_cluster, network = bool(requirements.ca_hash), candidate.network
    unread = requirements.unread
    return find(network_checks.Case(facts, candidate.role, network, others, in_cluster, controls, shared, unread))


CHECKS: Sequence[Check] = (
    Check("os", "the operating system and its release are supported", _system),
    Check("os", "no system is treated as another one (--unsupported-os)", _treated, Severity.WARNING),
    Check("arch", "Kubernetes supports the architecture", _architecture),
    Check("python", "Python is new enough for gpunodes' Ansible modules", _python),
    Check("cpus", "enough CPUs for the machine's role", _cpus, concerns=Concerns.JOINING),
    Check("memory", "enough memory for the machine's role", _memory, concerns=Concerns.JOINING),
    Check("disk", "enough free space for what is installed and pulled, on each file system", _disk),
    Check("data_directory", "gpunodes_data_directory can be used, and no data would have to move", _data_directory),
    Check("cgroup", "the Kubernetes version supports the cgroup version", _cgroup, concerns=Concerns.NODES),
    Check("swap", "swap is off; gpunodes turns it off if it is on", _swap, Severity.WARNING, concerns=Concerns.NODES),
    Check("hostname", "the host name is valid as a node's name", _hostname, concerns=Concerns.JOINING),
    Check("clock", "the clock agrees with the controller's", _clock),
    *(
        Check(name, title, partial(_network, find), severity, concerns=Concerns.JOINING)
        for name, title, find, severity in network_checks.CHECKS
    ),
    Check("time", "a time service runs, and the clock is synchronised", _time, Severity.WARNING),
    Check("modules", "the kernel has the modules for the pod network", _modules, concerns=Concerns.NODES),
    Check("proxy", "the HTTP proxies of the settings are reachable and accept their credentials", _proxies),
    Check("sources", "the package and image sources are reachable, and their keys are correct", _sources),
    Check("sources", "they have the versions that are requested", exact_versions.problems, concerns=Concerns.NODES),
    Check("cluster", "the machine has no other role and belongs to no other cluster", _cluster),
    Check("runtime", "an existing node uses the requested container runtime", _runtime, concerns=Concerns.NODES),
    Check("runtime", "a node has the requested versions of its runtime", runtime_versions.kept, Severity.WARNING),
    Check(
        "address",
        "the machine has the address that its settings request, and keeps it in its cluster",
        _address,
        concerns=Concerns.NODES,
    ),
    Check(
        "address",
        "a node's machine still has the address with which it joined",
        _lost_address,
        Severity.WARNING,
        concerns=Concerns.NODES,
    ),
    *(
        Check("endpoint", title, find, severity, concerns=Concerns.JOINING)
        for title, find, severity in endpoint_checks.CHECKS
    ),
    Check("version", "no other Kubernetes version is installed", _version, concerns=Concerns.NODES),
    Check("gates", "the kubelet of this version accepts the feature gates", _gates, concerns=Concerns.NODES),
    Check("gpu", "driver, CUDA and runtime are compatible with the GPUs, the kernel and each other", _gpu),
    Check("gpu", "nothing in the plan for the GPUs needs a warning", _gpu_warnings, Severity.WARNING),
)

_NAMES_OF_SOURCES = {source.value for source in gpu.Source}
"""The names under which the machine checks sources of GPU software."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
