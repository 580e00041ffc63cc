"""What would stop a machine from becoming a node: the facts of all machines held against the limits, all at once.

Pure: facts (what the module ``host_facts`` returns) and wants in, findings out. The limits stand in the tables.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes.ansible.module_utils.gpunodes.identity import Matcher, described, reported, same_uuid
from gpunodes.errors import WrongInput
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import gates, gpu, tables, versions

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine that is to become a node, or is one: its facts, or why there are none."""

    name: str
    role: Role
    facts: Facts | None
    unreachable: str = ""
    """Why its facts could not be read."""
    read_at: float | None = None
    """Our own clock when its facts came, in seconds since 1970; None where nobody noted it."""
    requested: gpu.RequestedSoftware = field(default_factory=lambda: gpu.RequestedSoftware(""))
    """What its settings ask for; the version is that of ``Wants``."""
    address: str = ""
    """That of the inventory."""


@dataclass(frozen=True, slots=True)
class ClusterRequirements:
    """What the machines are wanted for."""

    kubernetes: str
    """Minor or exact version."""
    ca_hash: str | None = None
    """The cluster's ``sha256:...``, or None when there is no cluster yet."""
    nodes: Sequence[Mapping[str, str]] = ()
    """The cluster's nodes: name, address, boot_id, machine_id, product_uuid, runtime."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a check found on a machine: the fact, the limit it breaks, what to do."""

    fact: str
    limit: str
    remedy: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True)
class Check:
    """A named check of one machine."""

    name: str
    title: str
    run: Callable[[MachineFacts, Facts, ClusterRequirements], Iterator[Problem]]


def requirements_of(cluster: Mapping[str, Any] | None, kubernetes: str) -> ClusterRequirements:
    """What machines are wanted for: the cluster's own version where there is one (a result of ``cluster_info``)."""
    cluster = cluster or {}
    return ClusterRequirements(
        kubernetes=str(cluster.get("version") or kubernetes).removeprefix("v"),
        ca_hash=cluster.get("ca_hash"),
        nodes=[{key: str(node.get(key) or "") for key in _OF_NODES} for node in cluster.get("nodes", ())],
    )


_OF_NODES = ("name", "address", "boot_id", "machine_id", "product_uuid", "runtime")


def judge(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> list[PreflightFinding]:
    """Every problem of every machine, in the order of the machines."""
    findings = []
    shared = _shared(candidates, requirements)
    for candidate in candidates:
        if candidate.facts is None:
            problem = Problem(
                candidate.unreachable, "a machine that answers", "see that `ssh` to it works, with sudo and Python"
            )
            findings.append(_finding(candidate, "reachable", problem))
            continue
        findings += [
            _finding(candidate, check.name, problem)
            for check in CHECKS
            for problem in check.run(candidate, candidate.facts, requirements)
        ]
        findings += shared.get(candidate.name, [])
    return findings


def _finding(candidate: MachineFacts, check: str, problem: Problem) -> PreflightFinding:
    return PreflightFinding(candidate.name, check, problem.fact, problem.limit, problem.remedy, problem.severity)


def _system(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    os = facts["os"]
    rows = [row for row in tables.read("systems")["system"] if row["id"] == os["id"]]
    version = str(os["version"] or "")
    if not any(version == row["version"] or version.startswith(row["version"] + ".") for row in rows):
        known = ", ".join(f"{row['id']} {row['version']}" for row in tables.read("systems")["system"])
        yield Problem(f"{os['name'] or os['id']} is not supported", f"one of {known}", "install one of these")


def _architecture(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    wanted = tables.read("limits")["architectures"]
    if facts["arch"] not in wanted:
        yield Problem(f"its architecture is {facts['arch']}", " or ".join(wanted), "use another machine")


def _python(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    floor = tables.read("limits")["python"]
    if _numbers(facts["python"]) < _numbers(floor):
        yield Problem(
            f"Python is {facts['python']}",
            f"{floor} or newer",
            "install a newer one and name it in ansible_python_interpreter",
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
    # A node that is in a cluster has used what it needs: its images lie there.
    if facts["disk_free_mib"] < least and not facts["kubernetes"]["role"]:
        yield Problem(
            f"{facts['disk_free_mib']} MiB are free below /var/lib",
            f"at least {least} MiB",
            "free some, or mount a larger disk there",
        )


def _cgroup(_: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    row = versions.minors().get(versions.minor_of(requirements.kubernetes), {})
    if facts["cgroup"] == 1 and row.get("cgroup_v1") == "refused":
        yield Problem(
            "it runs cgroup v1",
            f"cgroup v2: Kubernetes {requirements.kubernetes} refuses v1",
            "boot with systemd.unified_cgroup_hierarchy=1, or choose Kubernetes 1.34",
        )


def _swap(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    if facts["swap"]:
        devices = ", ".join(facts["swap"])
        yield Problem(
            f"swap is on ({devices})",
            "none: the kubelet refuses it",
            "nothing to do: it will be turned off",
            Severity.WARNING,
        )


def _hostname(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    name = facts["hostname"]
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name.lower()) or name.split(".")[0] == "localhost":
        yield Problem(
            f"its host name is {name!r}",
            "letters, digits, dots and dashes, and not localhost: the node is called so",
            "set it with `hostnamectl set-hostname NAME`",
        )


def _clock(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    limit = tables.read("limits")["clock_skew_s"]
    if candidate.read_at is None:
        return
    skew = facts["time"] - candidate.read_at
    if abs(skew) > limit:
        word = "ahead of" if skew > 0 else "behind"
        yield Problem(
            f"its clock is {abs(skew):.0f} s {word} this machine's",
            f"at most {limit} s",
            "set it, and run a time service there",
        )


def _ports(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    if facts["kubernetes"]["role"]:
        return  # its own services listen there
    taken = sorted(set(tables.read("limits")[candidate.role.value]["ports"]) & set(facts["listening"]))
    if taken:
        ports = ", ".join(map(str, taken))
        yield Problem(
            f"something listens on port {ports} already",
            "free ports",
            f"see `ss -ltnp 'sport = :{taken[0]}'` and stop it",
        )


def _modules(_: MachineFacts, facts: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    for name in tables.read("limits")["modules"]:
        if facts["modules"].get(name) == "missing":
            yield Problem(
                f"kernel {facts['kernel']} has no module {name}",
                "it is there",
                "install the kernel's modules, or reboot into the installed kernel",
            )


def _sources(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    planned = _planned(candidate, facts, requirements)
    packages = planned.packages if isinstance(planned, gpu.Plan) else ()
    idle = {source.value for source in gpu.Source} - {package.source.value for package in packages}
    for source in facts["sources"]:
        # A driver that is there, or comes from elsewhere, needs nothing of NVIDIA's.
        if not source["ok"] and source["name"] not in idle:
            yield Problem(
                f"{source['name']} at {source['url']}: {source['error']}",
                "it answers, signed by the key we know",
                "check the network and the source's settings (gpunodes_*_url, gpunodes_*_key, gpunodes_image_mirrors)",
            )


def _cluster(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    own = facts["kubernetes"]
    if not own["role"]:
        return
    if requirements.ca_hash and own["ca_hash"] and own["ca_hash"] != requirements.ca_hash:
        yield Problem(
            f"it belongs to another cluster ({own['server']})",
            "a machine of no cluster, or of this one",
            f"if that cluster is gone: gpunodes reset {candidate.name}",
        )
    elif own["role"] != candidate.role.value:
        names = {"control_plane": "a control plane", "worker": "a worker"}
        yield Problem(
            f"it is {names[own['role']]} already",
            f"a machine that is, or can become, {names[candidate.role.value]}",
            f"gpunodes reset {candidate.name} makes it free",
        )


def _runtime(candidate: MachineFacts, _: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    own = _node_names([candidate], requirements)
    for node in requirements.nodes:
        # A node of Docker stays one without being told so at every run.
        if node["name"] in own and node.get("runtime") == "containerd" and candidate.requested.runtime == "docker":
            yield Problem(
                "its node runs containers by containerd",
                "docker, which is wished: a node keeps what it has joined with",
                f"gpunodes remove {candidate.name}, then join it again",
            )


def _version(_: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    for package in ("kubelet", "kubeadm"):
        installed = (facts["packages"].get(package) or "").split("-")[0]
        wanted = requirements.kubernetes
        if installed and installed != wanted and not installed.startswith(wanted + "."):
            yield Problem(
                f"{package} {installed} is installed",
                f"{wanted}: nothing is upgraded or downgraded here",
                f"choose --kubernetes-version {installed}, or remove the package",
            )


def _gates(candidate: MachineFacts, _: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    if not candidate.requested.gates:
        return
    try:
        found = gates.check(requirements.kubernetes, candidate.requested.gates)
    except WrongInput as error:
        found = [gates.Conflict(error.found, error.wanted, "take the wishes for feature gates out")]
    yield from (Problem(conflict.fact, conflict.limit, conflict.remedy) for conflict in found)


def _planned(
    candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements
) -> gpu.Plan | Sequence[gates.Conflict]:
    """What the machine gets for its GPUs; feature gates are judged elsewhere."""
    requested = replace(candidate.requested, kubernetes_version=requirements.kubernetes, gates={})
    return gpu.plan(candidate.name, facts, requested)


def _gpu(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    planned = _planned(candidate, facts, requirements)
    if not isinstance(planned, gpu.Plan):
        yield from (Problem(conflict.fact, conflict.limit, conflict.remedy) for conflict in planned)
        return
    for warning in planned.warnings:
        yield Problem(warning, "nothing to be warned of", f"see `gpunodes gpu plan {candidate.name}`", Severity.WARNING)


CHECKS: Sequence[Check] = (
    Check("os", "the operating system and its release are supported", _system),
    Check("arch", "the architecture is one that Kubernetes is built for", _architecture),
    Check("python", "Python is new enough for our modules", _python),
    Check("cpus", "enough CPUs for the machine's role", _cpus),
    Check("memory", "enough memory for the machine's role", _memory),
    Check("disk", "enough free disk below /var/lib", _disk),
    Check("cgroup", "a cgroup version that the Kubernetes version takes", _cgroup),
    Check("swap", "swap, which the node role turns off", _swap),
    Check("hostname", "a host name that can be a node's name", _hostname),
    Check("clock", "a clock that agrees with this machine's", _clock),
    Check("ports", "the ports of the role are free", _ports),
    Check("modules", "the kernel modules that pods' networking needs", _modules),
    Check("sources", "packages and images can be reached and their keys are right", _sources),
    Check("cluster", "in no other cluster, and in no other role", _cluster),
    Check("runtime", "a node's containers are run by what is wished", _runtime),
    Check("version", "no other Kubernetes version is installed", _version),
    Check("gates", "feature gates that the kubelet of this version takes", _gates),
    Check("gpu", "a driver, CUDA and a runtime that fit its GPUs, its kernel and each other", _gpu),
)

# What must differ between all machines of a cluster. Source: kubernetes.io, "Verify the MAC address and product_uuid".
_UNIQUE = {
    "hostname": "set another with `hostnamectl set-hostname NAME`",
    "machine_id": "a copied disk: remove /etc/machine-id, run `systemd-machine-id-setup`, reboot",
    "product_uuid": "a copied virtual machine: give it a UUID of its own in its hypervisor",
}


def _shared(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, list[PreflightFinding]]:
    """What two machines have in common and must not, by machine; the cluster's nodes count too."""
    found: dict[str, list[PreflightFinding]] = defaultdict(list)
    known = [candidate for candidate in candidates if candidate.facts]
    own = _node_names(known, requirements)
    strangers = [node for node in requirements.nodes if node["name"] not in own]
    for key, remedy in _UNIQUE.items():
        owners: dict[str, list[str]] = defaultdict(list)
        for candidate in known:
            if candidate.facts and (value := candidate.facts.get(key)):
                owners[str(value).lower()].append(candidate.name)
        for node in strangers:
            if value := node.get("name" if key == "hostname" else key):
                owners[value.lower()].append(f"node {node['name']}")
        for value, names in owners.items():
            # What vendors write into boards that they give no UUID is none: it is not even the same as itself.
            told = key != "product_uuid" or same_uuid(value, value)
            if len(names) > 1 and told:
                for name in names:
                    others = ", ".join(other for other in names if other != name)
                    word = key.replace("_", " ")
                    gone = "; or delete that node, if its machine is gone or was installed anew"
                    what = f"{remedy}{gone if 'node ' in others else ''}"
                    problem = Problem(f"its {word} {value} is also that of {others}", "one of its own", what)
                    found[name].append(PreflightFinding(name, key, problem.fact, problem.limit, problem.remedy))
    return found


def _node_names(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> set[str]:
    """The nodes that these machines are: in the cluster already, or joining again after an interruption."""
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
