"""Kubernetes versions: which ones gpunodes can install, and how a requested version is parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.planner import tables

_NAMED = 5


def minors() -> Mapping[str, Mapping[str, Any]]:
    """Known minors, oldest first: ``{"1.36": {"tested": True, "cgroup_v1": "refused"}}``."""
    return {row["version"]: row for row in tables.read("kubernetes")["minor"]}


def minor_of(version: str) -> str:
    """The minor of a version: ``1.36`` of ``v1.36.3``, ``1.36.3`` and ``1.36``."""
    return ".".join(version.removeprefix("v").split(".")[:2])


def is_exact(version: str) -> bool:
    """Whether a version names its patch."""
    return version.count(".") == 2  # noqa: PLR2004 - major, minor and patch


def numbers(version: str) -> tuple[int, ...]:
    """A version that can be compared: (1, 36, 3) for ``v1.36.3``, (3, 6, 8) for ``3.6.8-0``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def known(reported: object) -> str:
    """A version of Kubernetes, such as v1.36.3, that a node or an API server reports; "" for anything else."""
    found = re.match(r"v1\.[0-9]{1,3}\.[0-9]{1,3}(?![0-9.])", reported) if isinstance(reported, str) else None
    return found[0] if found else ""


def control_plane_skew() -> int:
    """By how many minors an upgrade of a control plane may raise its version."""
    return int(tables.read("upgrades")["skew"]["control_plane"])


def kubelet_skew() -> int:
    """How many minors a kubelet may be older than an API server."""
    return int(tables.read("upgrades")["skew"]["kubelet"])


def too_old(kubelet: str, version: str) -> str:
    """Why a kubelet must not serve a control plane of a version, "" if it may, or if one of both is unknown."""
    allowed = kubelet_skew()
    if not kubelet or not version or numbers(version)[1] - numbers(kubelet)[1] <= allowed:
        return ""
    return f"its kubelet is {kubelet}, more than {allowed} minors older than the control plane, {version}"


def behind(version: str, kubelets: Mapping[str, str]) -> str:
    """A sentence about the nodes whose kubelet is older than ``version``, the API server's; "" if none is."""
    old = sorted(name for name, each in kubelets.items() if numbers(each) < numbers(version))
    if not old:
        return ""
    more = f" and {len(old) - _NAMED} more" if len(old) > _NAMED else ""
    names = f"{', '.join(old[:_NAMED])}{more}"
    plain = version.removeprefix("v")
    return f"kubelets are older than the API server ({plain}): {names}; `gpunodes upgrade {plain}` upgrades them"


def check(version: str) -> str:
    """``version`` without a leading v; raises WrongInput for a version that gpunodes cannot install."""
    plain = str(version).removeprefix("v")
    known = minors()
    if not re.fullmatch(r"1\.\d+(\.\d+)?", plain):
        raise WrongInput(
            f"{version!r} is not a Kubernetes version",
            f"a minor version such as {list(known)[-1]} or an exact one such as 1.36.3",
        )
    if minor_of(plain) not in known:
        fact = f"gpunodes cannot install Kubernetes {version}"
        raise WrongInput(fact, f"one of {', '.join(known)}", "choose one of these")
    return plain
