"""Which settings of running kubelets are not those of their machines, in sentences. Pure.

What a kubelet reports is untrusted: its texts are shortened here, and each view makes them printable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes.ansible.module_utils import nesting
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Severity
from gpunodes.planner import drift, kubelet_layers, registration, reports
from gpunodes.planner.drift import DriftDifference, MachineDrift
from gpunodes.planner.kubelet_layers import GATES, PIDS, PROVIDER, TAINTS, Kubelet, Path, Wanted

APPLY = "`gpunodes up` applies them"
_FIRST = 3
"""Kubelets, or differences of one, that a sentence names."""
_LONGEST = 200
_MOST_GATES = 500
"""Gates of one kubelet; it knows some 250."""
_GATE = re.compile(r"[A-Za-z0-9]{1,100}")
_ANY_NUMBER = -1
"""The default of podPidsLimit."""
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


@dataclass(frozen=True, slots=True)
class KubeletDrift:
    """What is known of the kubelets of a cluster."""

    machines: Sequence[MachineDrift] = ()
    """Those that differ."""
    unknown: str = ""
    """Which are not known, and why; "" if all are."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Why, by machine."""


def compare(report: object, kubelets: Sequence[Kubelet]) -> KubeletDrift:
    """Compare these kubelets with a result of kubelet_settings, which is untrusted.

    Kubelets that it does not name are not compared: their nodes are not Ready, or gpunodes did not make them.
    """
    invalid = "they were not reported" if report is None else reports.kubelet_settings_problem(report)
    seen: Mapping[str, Any] = report if isinstance(report, dict) and not invalid else {"problem": invalid}
    of_cluster: Mapping[str, Any] = {}
    problem = _short(seen["problem"])
    try:
        of_cluster = {} if problem else _read(seen["cluster"], "the ConfigMap kubelet-config")
    except ValueError as error:
        problem = str(error)
    if problem:
        unknown = f"the settings of the kubelets are unknown: {problem}" if kubelets else ""
        return KubeletDrift(unknown=unknown, unread={each.machine: problem for each in kubelets})
    found, silent = [], {each.machine: seen["silent"][each.node] for each in kubelets if each.node in seen["silent"]}
    for each in kubelets:
        if each.node in seen["nodes"]:
            try:
                running = _read(seen["nodes"][each.node], "its answer")
            except ValueError as error:
                silent[each.machine] = str(error)
            else:
                found.append(MachineDrift(each.machine, differences(running, each, of_cluster)))
    unread = {machine: _short(why) for machine, why in silent.items()}
    return KubeletDrift(tuple(each for each in found if each.differs), _unknown(unread), unread)


def _read(reported: Mapping[str, str], what: str) -> dict[str, Any]:
    """The fields of a configuration; raises ValueError, with ``what`` it is, unless they are valid."""
    try:
        found = {name: json.loads(text) for name, text in reported.items()}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON") from error
    if nesting.is_deep(found):
        raise ValueError(f"{what} is nested too deeply")
    gates = found.get(GATES) or {}
    if not (
        isinstance(gates, dict)
        and len(gates) <= _MOST_GATES
        and all(_GATE.fullmatch(name) and isinstance(value, bool) for name, value in gates.items())
    ):
        raise ValueError(f"{what} has no valid feature gates")
    return found


def differences(running: Mapping[str, Any], kubelet: Kubelet, of_cluster: Mapping[str, Any]) -> list[DriftDifference]:
    """The settings that differ; none for settings that are templates, which only Ansible can render."""
    layers = kubelet_layers.of(kubelet, of_cluster)
    if layers is None:
        return []
    found = {
        path: _difference(path, value, wanted)
        for path, wanted in layers.wanted.items()
        if not layers.is_unknown(path) and not _same(value := _at(running, path), wanted.value)
    }
    found |= {path: _difference(path, value, None) for path, value in _left(running) if not layers.knows(path)}
    return [found[path] for path in sorted(found)]


def _at(running: Any, path: Path) -> Any:
    """The value at a path, None without one."""
    for name in path:
        running = running.get(name) if isinstance(running, Mapping) else None
    return running


def _left(running: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """What a kubelet has only if something sets it, as gpunodes may have done. Other fields have defaults."""
    yield from (((GATES, name), value) for name, value in sorted((running.get(GATES) or {}).items()))
    if running.get(PIDS) not in (None, _ANY_NUMBER):
        yield (PIDS,), running[PIDS]
    if str(running.get(PROVIDER)).startswith(registration.provider_id("")):
        yield (PROVIDER,), running[PROVIDER]
    # Of other nodes kubeadm gives the taints to the kubelet.
    if kubelet_layers.STARTING in str(running.get(TAINTS)):
        yield (TAINTS,), running[TAINTS]


def _same(running: Any, wanted: Any) -> bool:
    """Whether values mean the same: the kubelet writes 60s as 1m0s, and no empty values in taints."""
    if isinstance(running, str) and isinstance(wanted, str):
        seconds = [_seconds(text) for text in (running, wanted)]
        return running == wanted or (seconds[0] is not None and seconds[0] == seconds[1])
    if isinstance(running, list) and isinstance(wanted, list):
        return sorted(map(_item, running)) == sorted(map(_item, wanted))
    return type(running) is type(wanted) and bool(running == wanted)


def _item(each: Any) -> str:
    plain = {name: value for name, value in each.items() if value != ""} if isinstance(each, Mapping) else each
    return json.dumps(plain, sort_keys=True)


def _seconds(text: str) -> float | None:
    """The seconds of a duration as Go writes it (1h0m10s), None for another text."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        return None
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds


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
    # Each of the others says what applies it.
    applied = f"{APPLY}, " if any(one.kind == drift.KUBELET for one in each.differences) else ""
    return Problem(
        f"settings of the kubelet differ from the running one: {texts}{suffix}",
        "",
        f"{applied}`gpunodes status` lists all",
    )


def _difference(path: Path, running: Any, wanted: Wanted | None) -> DriftDifference:
    subject = f"feature gate {path[1]}" if path[0] == GATES and len(path) > 1 else _short(".".join(path))
    present = "is not set" if running is None else f"is {_text(running)}"
    known = f"{wanted.source} {_text(wanted.value)}" if wanted else "neither the settings nor the cluster set it"
    kind = wanted.kind if wanted else drift.KUBELET
    remedy = "; the next `gpunodes upgrade` applies it" if kind == drift.UPGRADE else ""
    return DriftDifference(
        component="kubelet",
        name=subject,
        running=None if running is None else _text(running),
        wanted=_text(wanted.value) if wanted else None,
        kind=kind,
        text=f"kubelet {subject} {present}, {known}{remedy}",
    )


def _unknown(silent: Mapping[str, str]) -> str:
    """Which kubelets did not respond, by machine."""
    if not silent:
        return ""
    names = list(silent)
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    count = "1 kubelet" if len(names) == 1 else f"{len(names)} kubelets"
    which = f"the settings of {count} were not read: {', '.join(names[:_FIRST])}{more}"
    return f"{which} ({names[0]}: {silent[names[0]]})"


def _text(value: Any) -> str:
    return _short(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
