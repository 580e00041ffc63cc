"""Requested versions of Kubernetes and containerd that a machine's package source does not have. Pure.

Installed packages stay: they are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpunodes.ansible.module_utils.packages import DOCKER_SOURCE, SYSTEM_SOURCES, RequestedPackage, fits
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import Role
from gpunodes.planner import runtime_versions, systems, versions
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.gpu_model import Facts

_KUBERNETES = "kubernetes"
_SETTING = "gpunodes_kubernetes_version"
_CONTAINERD = {DOCKER_SOURCE: "containerd.io", SYSTEM_SOURCES: "containerd"}
"""The package of containerd by its source."""
_SHOWN = 5


def packages(kubernetes: str, containerd: str) -> dict[str, list[str]]:
    """The packages whose versions host_facts reads, by source, because the settings request a version of them."""
    found = {_KUBERNETES: ["kubeadm", "kubectl", "kubelet"]} if versions.is_exact(kubernetes) else {}
    return found | ({source: [name] for source, name in _CONTAINERD.items()} if containerd else {})


def problems(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    """A check of preflight; a source that was not read is another check's problem."""
    listed = facts.get("versions") or {}
    version = requirements.kubernetes
    if versions.is_exact(version) and _KUBERNETES in listed:
        names = ["kubeadm", "kubelet", *(["kubectl"] if candidate.role is Role.CONTROL_PLANE else [])]
        wanted = [RequestedPackage(name, f"{version}-*") for name in names]
        yield from _absent(facts, listed[_KUBERNETES], wanted, version, _SETTING)
    if candidate.containerd and systems.known(facts["os"]) is not None:
        # A system that is treated as another one gets its packages from sources that the machine did not read.
        pattern = runtime_versions.pattern(candidate.containerd)
        for source, name in _CONTAINERD.items():
            if source in listed:
                package = RequestedPackage(name, pattern)
                yield from _absent(facts, listed[source], [package], candidate.containerd, runtime_versions.SETTING)


def _absent(
    facts: Facts,
    listed: Mapping[str, Sequence[str]],
    requested: Sequence[RequestedPackage],
    version: str,
    setting: str,
) -> Iterator[Problem]:
    missing = [
        each.name
        for each in requested
        if not facts["packages"].get(each.name) and not any(fits(each, found) for found in listed.get(each.name, ()))
    ]
    if missing:
        known = ", ".join(listed.get(missing[0], ())[:_SHOWN]) or "none"
        yield Problem(
            f"its package source has no {missing[0]} {version}; it offers {known}",
            f"{' and '.join(missing)} {version}",
            f"request another version ({setting}), or add it to the mirror",
        )
