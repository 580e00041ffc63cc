"""Drift: how a control plane or a kubelet differs from its settings, in sentences. Pure.

What a machine reports is data: its texts are shortened here, and each view makes them printable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Severity
from gpunodes.planner import reports

CHECK = "drift"
APPLY = "`gpunodes rollout apply` applies them"
KUBELET = "kubelet"
"""The kind of a difference of a kubelet: `gpunodes up` applies it, or a roll-out of its own."""
UPGRADE = "upgrade"
"""The same: kubeadm applies it when the machine is upgraded."""
_FIRST = 3
"""Differences in one finding."""
_LONGEST = 120
_AT_CREATION = "that is decided when a cluster is created, and stays"
_KNOWN: Mapping[str, tuple[str, str, str]] = {
    "--encryption-provider-config": ("gpunodes_encrypt_secrets", "Secrets are encrypted", "Secrets are not encrypted"),
    "--kubelet-certificate-authority": (
        "gpunodes_serving_certificates",
        "kubelets need serving certificates of the cluster's CA",
        "kubelets need no serving certificates of the cluster's CA",
    ),
}
"""Arguments that are never changed and stand for a setting, with what it means that they are there, or not."""
_NETWORKS = {
    "podSubnet": ("the network of pods", "gpunodes_pod_subnet"),
    "serviceSubnet": ("the network of services", "gpunodes_service_subnet"),
}


@dataclass(frozen=True, slots=True)
class DriftDifference:
    """One difference between a control plane or a kubelet and its settings."""

    component: str
    name: str
    running: str | None
    """None: it is not set."""
    wanted: str | None
    kind: str
    """"settings"; "foreign": neither kubeadm nor the settings know it; "fixed": it is never changed; "kubelet" and
    "upgrade", of kubelets."""
    text: str
    """The whole sentence."""


@dataclass(frozen=True, slots=True)
class MachineDrift:
    """The differences of one control plane, of one kubelet, or of both on one machine."""

    machine: str
    differences: Sequence[DriftDifference] = ()
    left_out: int = 0
    """How many more there are."""
    problem: str = ""
    """Why they are unknown."""
    managed: bool = True
    """Whether gpunodes made the machine a control plane, or a node: of others it changes nothing."""
    unverified: bool = False
    """Whether an earlier change of its settings was not verified."""

    @property
    def differs(self) -> bool:
        """Whether there is something to show."""
        return bool(self.problem or self.unverified or self.differences)

    @property
    def pending(self) -> bool:
        """Whether settings can be rolled out to it as a control plane."""
        return self.unverified or bool(self.left_out) or any(map(_is_pending, self.differences))


def _is_pending(difference: DriftDifference) -> bool:
    return difference.kind not in {"fixed", KUBELET, UPGRADE}


def of_report(machine: str, report: object) -> MachineDrift:
    """The differences in a result of control_plane_drift, which is untrusted."""
    if problem := reports.drift_problem(report):
        return MachineDrift(machine, problem=problem)
    assert isinstance(report, dict)  # noqa: S101 - for the type checker
    differences = [
        DriftDifference(
            component=_short(each["component"]),
            name=_short(each["name"]),
            running=None if each["running"] is None else _short(each["running"]),
            wanted=None if each["wanted"] is None else _short(each["wanted"]),
            kind=each["kind"],
            text=sentence(each),
        )
        for each in report["differences"]
    ]
    problem = _short(report["problem"], 500)
    return MachineDrift(
        machine, differences, max(0, report["left_out"]), problem, report["managed"], report["unverified"]
    )


def sentence(each: Mapping[str, Any]) -> str:
    """One difference as a sentence: ``kube-apiserver --v is 2, the settings say 4``."""
    component, name, kind = _short(each["component"]), _short(each["name"]), each["kind"]
    running, wanted = (None if each[key] is None else _short(each[key]) for key in ("running", "wanted"))
    if kind == "fixed" and name in _KNOWN:
        setting, present, absent = _KNOWN[name]
        return f"{present if running else absent}, {setting} says otherwise; {_AT_CREATION}"
    if kind == "fixed" and name in _NETWORKS:
        subject, setting = _NETWORKS[name]
        return f"{subject} is {running}, {setting} says {wanted}; {_AT_CREATION}"
    subject = f"{component} {name}"
    if wanted is None:
        known = "neither the settings nor kubeadm set it" if kind == "foreign" else "the settings do not set it"
        said = f"{subject} is {running}, {known}"
    elif running is None:
        said = f"{subject} is not set, the settings say {wanted}"
    else:
        said = f"{subject} is {running}, the settings say {wanted}"
    return f"{said}; {_AT_CREATION}" if kind == "fixed" else said


def findings(machines: Sequence[MachineDrift]) -> list[PreflightFinding]:
    """The drift of each control plane as a warning of preflight."""
    found = []
    for each in machines:
        if each.problem:
            problem = Problem(f"its settings cannot be compared: {each.problem}", "", "see `gpunodes status`")
            found.append(PreflightFinding(each.machine, CHECK, problem, Severity.WARNING))
        elif each.differences:
            found.append(PreflightFinding(each.machine, CHECK, _problem(each), Severity.WARNING))
    return found


def _problem(each: MachineDrift) -> Problem:
    pending = [one for one in each.differences if _is_pending(one)]
    chosen = pending or each.differences
    more = len(each.differences) + each.left_out - len(chosen[:_FIRST])
    texts = "; ".join(one.text for one in chosen[:_FIRST])
    suffix = f"; and {more} more" if more else ""
    remedy = f"{APPLY}, `gpunodes status` lists all" if each.pending else "correct the settings"
    return Problem(f"settings of the control plane differ from the running one: {texts}{suffix}", "", remedy)


def _short(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
