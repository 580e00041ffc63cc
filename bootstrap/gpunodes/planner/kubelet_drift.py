"""Which feature gates of running kubelets are not those of their machines' settings. Pure.

A gate is known, and no drift, if the cluster sets it for all kubelets or a patch of kubeadm's names it: those are
applied when a machine joins or is upgraded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Severity
from gpunodes.planner import drift, gates, reports
from gpunodes.planner.drift import DriftDifference, MachineDrift

APPLY = "`gpunodes up` applies them"
GATES = "gpunodes_feature_gates"
PATCHES = "gpunodes_kubeadm_patches"
_PATCHED = "kubeletconfiguration"
"""How the names of patches of the kubelets' configuration begin. Source: `kubeadm join --help`, --patches."""
_FIRST = 3
"""Kubelets, or differences of one, that a sentence names."""
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The kubelet of a machine."""

    machine: str
    node: str
    version: str
    gpus: bool
    """Whether its node has GPUs."""
    settings: Mapping[str, Any]
    """The machine's settings, as the inventory has them."""


@dataclass(frozen=True, slots=True)
class KubeletDrift:
    """What is known of the kubelets of a cluster."""

    machines: Sequence[MachineDrift] = ()
    """Those that differ."""
    unknown: str = ""
    """Which are not known, and why; "" if all are."""


def compare(report: object, kubelets: Sequence[Kubelet]) -> KubeletDrift:
    """Compare these kubelets with a result of kubelet_gates, which is untrusted.

    Kubelets that it does not name are not compared: their nodes are not Ready, or gpunodes did not make them.
    """
    invalid = "they were not reported" if report is None else reports.kubelet_gates_problem(report)
    seen: Mapping[str, Any] = report if isinstance(report, dict) and not invalid else {"problem": invalid}
    if problem := _short(seen["problem"]):
        return KubeletDrift(unknown=f"the feature gates of the kubelets are unknown: {problem}" if kubelets else "")
    found = [
        MachineDrift(each.machine, list(differences(seen["nodes"][each.node], each, seen["cluster"])))
        for each in kubelets
        if each.node in seen["nodes"]
    ]
    silent = {each.machine: seen["silent"][each.node] for each in kubelets if each.node in seen["silent"]}
    return KubeletDrift(tuple(each for each in found if each.differs), _unknown(silent))


def differences(
    running: Mapping[str, bool], kubelet: Kubelet, of_cluster: Mapping[str, bool]
) -> Iterator[DriftDifference]:
    """The gates that differ; none for settings that are templates, which only Ansible can render."""
    requested, patches = kubelet.settings[GATES] or {}, kubelet.settings[PATCHES] or {}
    if not isinstance(requested, Mapping) or not isinstance(patches, Mapping):
        return
    plain = {name: value for name, value in requested.items() if isinstance(value, bool)}
    wanted = gates.wanted(kubelet.version, plain, gpus=kubelet.gpus)
    known = {*requested, *of_cluster, *patched(patches)}
    for name in sorted({*wanted, *running}):
        if name in wanted and wanted[name] != running.get(name):
            yield _difference(name, running.get(name), wanted[name])
        elif name not in wanted and name not in known:
            yield _difference(name, running[name], None)


def patched(patches: Mapping[str, Any]) -> set[str]:
    """The feature gates that patches of the kubelet's configuration name, in the forms of `kubeadm --patches`."""
    found: set[str] = set()
    for name, patch in patches.items():
        if not str(name).startswith(_PATCHED):
            continue
        if isinstance(patch, Mapping):
            found |= _names(patch.get("featureGates"))
        for operation in patch if isinstance(patch, list) else ():
            # RFC 6902
            path = str(operation.get("path")) if isinstance(operation, Mapping) else ""
            if path == "/featureGates":
                found |= _names(operation.get("value"))
            elif one := re.fullmatch(r"/featureGates/([A-Za-z0-9]+)", path):
                found.add(one.group(1))
    return found


def merged(control_planes: Sequence[MachineDrift], kubelets: Sequence[MachineDrift]) -> list[MachineDrift]:
    """One entry for each machine: a control plane has a kubelet, too."""
    own = {each.machine: each for each in kubelets}
    found = [
        replace(each, differences=[*each.differences, *own.pop(each.machine).differences])
        if each.machine in own
        else each
        for each in control_planes
    ]
    return found + list(own.values())


def findings(found: KubeletDrift, control: str) -> list[PreflightFinding]:
    """The drift of each kubelet as a warning of preflight, and at the control plane which are unknown."""
    warnings = [
        PreflightFinding(each.machine, drift.CHECK, _problem(each), Severity.WARNING) for each in found.machines
    ]
    if found.unknown:
        problem = Problem(found.unknown, "", "`gpunodes status` reads them again")
        warnings.append(PreflightFinding(control, drift.CHECK, problem, Severity.WARNING))
    return warnings


def _problem(each: MachineDrift) -> Problem:
    more = len(each.differences) - _FIRST
    texts = "; ".join(one.text for one in each.differences[:_FIRST])
    suffix = f"; and {more} more" if more > 0 else ""
    return Problem(
        f"settings of the kubelet differ from the running one: {texts}{suffix}",
        "",
        f"{APPLY}, `gpunodes status` lists all",
    )


def _difference(name: str, running: bool | None, wanted: bool | None) -> DriftDifference:
    subject = f"feature gate {name}"
    present = "is not set" if running is None else f"is {_yaml(running)}"
    known = "neither the settings nor the cluster set it" if wanted is None else f"the settings say {_yaml(wanted)}"
    return DriftDifference(
        component="kubelet",
        name=subject,
        running=None if running is None else _yaml(running),
        wanted=None if wanted is None else _yaml(wanted),
        kind=drift.KUBELET,
        text=f"kubelet {subject} {present}, {known}",
    )


def _unknown(silent: Mapping[str, str]) -> str:
    """Which kubelets did not respond, by machine."""
    if not silent:
        return ""
    names = list(silent)
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    count = "1 kubelet" if len(names) == 1 else f"{len(names)} kubelets"
    which = f"{count} did not report feature gates: {', '.join(names[:_FIRST])}{more}"
    return f"{which} ({names[0]}: {_short(silent[names[0]])})"


def _names(gates_of_patch: object) -> set[str]:
    return {str(name) for name in gates_of_patch} if isinstance(gates_of_patch, Mapping) else set()


def _yaml(value: bool) -> str:
    return "true" if value else "false"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
