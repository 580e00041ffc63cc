"""Versions of the container runtime and the container toolkit: what machines get, and what nodes keep. Pure.

A node keeps the versions that it has until `gpunodes runtime upgrade` replaces them, one drained node after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpunodes.ansible.module_utils.host.spec import Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage, fits
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import tables
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.gpu_model import Facts

SETTING = "gpunodes_containerd_version"
ROLES = ("containerd", "docker", "cri_dockerd", "container_toolkit")
"""The roles whose packages `gpunodes runtime upgrade` replaces, in the order in which it configures them."""
_CONTAINERD = ("containerd", "containerd.io")
_EXACT_PARTS = 3
# Debian's containerd starts containers with runc, a package of its own; Docker's containerd.io contains it.
_RUNC = RequestedPackage("runc", replace=True)


def pattern(version: str) -> str:
    """The pattern of the packages of a version: any patch of a minor (2.1), or any revision of an exact one (2.1.4)."""
    if not version:
        return ""
    # Revisions: 2.1.4-1~debian.13 (Docker), 1.7.24~ds1-6 (Debian), 2.1.4-0ubuntu1.
    return f"{version}[-~+]*" if len(version.split(".")) == _EXACT_PARTS else f"{version}.*"


def chosen(wanted: Mapping[str, Spec], facts: Facts, *, replaces: bool) -> dict[str, Spec]:
    """``wanted`` with the versions that a machine gets: a node keeps those that it has, unless they are replaced."""
    return {role: _chosen(spec, facts, replaces) if role in ROLES else spec for role, spec in wanted.items()}


def _chosen(spec: Spec, facts: Facts, replaces: bool) -> Spec:
    if replaces:
        packages = [replace(package, replace=True) for package in spec.packages]
        runc = [_RUNC] if any(package.name == "containerd" for package in packages) else []
        return replace(spec, packages=(*packages, *runc))
    if not _is_node(facts):
        return spec
    found = installed(facts)
    kept = [replace(package, version="" if package.name in found else package.version) for package in spec.packages]
    return replace(spec, packages=tuple(kept))


def kept(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    """A check of preflight: the packages of a node that keep another version than its settings request."""
    if not _is_node(facts):
        return
    row = tables.read("toolkit")["packages"]
    requested = {**dict.fromkeys(_CONTAINERD, pattern(candidate.containerd)), row["names"][0]: row["version"]}
    for name, version in installed(facts).items():
        if not fits(RequestedPackage(name, requested.get(name, "")), version):
            yield Problem(
                f"it has {name} {version}, and keeps it",
                f"{candidate.containerd if name in _CONTAINERD else row['version'].removesuffix('.*')}",
                f"`gpunodes runtime upgrade {candidate.name}` drains the node and replaces it",
            )


def installed(facts: Facts) -> dict[str, str]:
    """The installed packages of container runtimes and of the container toolkit, with their versions."""
    gpu = facts.get("gpu") or {}
    found = {**facts["packages"], **(gpu.get("runtimes") or {}), **(gpu.get("toolkit") or {})}
    return {name: str(version) for name, version in found.items() if version}


def _is_node(facts: Facts) -> bool:
    return bool((facts.get("kubernetes") or {}).get("role"))
