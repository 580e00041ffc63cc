"""Brings a control plane to its settings: kubeadm's configuration in the cluster, then one static pod after another.

What is to be done follows from the machine and its cluster, so that a run after an interruption continues. The state
before is kept beside the manifests until the result is verified: a static pod that does not become ready gets its
earlier manifest back, and so does everything that was changed before it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from .. import containers, disk, etcd_snapshot, kube_api, ledger, static_pod_files, tree
from ..ledger import Ledger
from ..problem import MachineProblem
from ..report import Difference, Report
from . import api_certificate, command, compared, drift, expected, static_pods
from .compared import Compared, Wanted

KEPT = "/etc/kubernetes/gpunodes-settings"
"""The earlier state; on the same file system as the manifests, and removed by a reset."""
_BEGUN, _DONE = "begun", "done"
_PODS = tuple(drift.SECTIONS)
_SETTLE_S = 5.0
"""Seconds for which a component must stay ready: some respond before they have read everything."""
_RECOVERY_S = 30
"""Seconds in which a component must be ready that an interrupted run left."""
_POLL_S = 1.0


def apply(wanted: Wanted, limit_s: float, check: bool) -> Report:
    """Change what differs; ``limit_s`` is for each static pod. The report is empty if nothing does.

    Raises MachineProblem, with everything as before, if kubeadm refuses the settings or a static pod does not become
    ready with them.
    """
    machine_ledger = ledger.load()
    compared.check_machine(machine_ledger)
    report = Report()
    for name in static_pods.heal(machine_ledger, check):
        report.add(f"start {name}, which an interrupted run stopped")
    if not check:
        _recover(machine_ledger, limit_s)
    found = compared.compare(wanted, compared.own_client())
    begun = [name for name in _PODS if machine_ledger.control_plane.get(name) == _BEGUN]
    pods = [name for name in _PODS if found.pending(name) or name in begun]
    _describe(report, found, pods)
    if check or not report.actions:
        return report
    if drift.ETCD in pods:
        _check_members()
    try:
        _change(found, wanted, pods, machine_ledger, limit_s)
    except MachineProblem as error:
        raise _taken_back(error, machine_ledger, limit_s) from error
    return report


def verify(wanted: Wanted, check: bool) -> Report:
    """Raise MachineProblem unless the control plane has its settings and is ready; then forget the state before."""
    machine_ledger = ledger.load()
    found = compared.compare(wanted, compared.own_client())
    left = [each for each in found.drift if each.changes]
    if left:
        raise MachineProblem(
            f"{left[0].component} still differs from the settings: {left[0].name}",
            "a control plane with its settings",
            "run `gpunodes rollout apply` again",
        )
    for name in _PODS:
        if not _is_ready(name, found.address):
            raise MachineProblem(f"{name} is not ready", "a ready control plane", f"see `crictl ps -a --name {name}`")
    report = Report()
    if machine_ledger.control_plane or os.path.exists(KEPT):
        report.add("remove the copies of the earlier state", Difference(KEPT, {"earlier state": "kept"}, {}))
        if not check:
            _forget(machine_ledger)
    return report


def undo(limit_s: float, check: bool) -> Report:
    """Put everything back that was changed since the last verification."""
    machine_ledger = ledger.load()
    report = Report()
    for name in static_pods.heal(machine_ledger, check):
        report.add(f"start {name}, which an interrupted run stopped")
    for name in machine_ledger.control_plane:
        report.add(f"restore {name}", Difference("settings", {name: "new"}, {name: "earlier"}))
    if report.actions and not check:
        _undo(machine_ledger, limit_s)
    return report


def _describe(report: Report, found: Compared, pods: list[str]) -> None:
    """What is done, with the values."""
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for each in found.drift:
        if each.changes:
            before, after = changes.setdefault(each.component, ({}, {}))
            before[each.name], after[each.name] = drift.shown(each.running), drift.shown(each.wanted)
    differences = {name: Difference(f"settings of {name}", *sides) for name, sides in changes.items()}
    if drift.has_pending(found.drift, drift.CONFIG) or _config_changes(found):
        report.add("change kubeadm's configuration in the cluster", *_of(differences, drift.CONFIG))
    if found.names:
        names = ", ".join(found.names)
        report.add(f"make the API server's certificate for {names}, too", *_of(differences, drift.CERTIFICATE))
    for name in pods:
        more = _of(differences, drift.AUDIT_POLICY) if name == drift.API_SERVER else []
        report.add(f"restart {name} with its settings", *_of(differences, name), *more)


def _of(differences: Mapping[str, Difference], name: str) -> list[Difference]:
    return [differences[name]] if name in differences else []


def _config_changes(found: Compared) -> bool:
    return bool(drift.of_configuration(found.stored, found.configuration, ()))


def _change(found: Compared, wanted: Wanted, pods: list[str], machine_ledger: Ledger, limit_s: float) -> None:
    if _config_changes(found):
        _note(drift.CONFIG, json.dumps(_sections(found.stored)), machine_ledger)
        _upload(found.configuration, found.address, found.node, limit_s)
        _finish(drift.CONFIG, machine_ledger)
    if found.names:
        api_certificate.add_names(found.names, limit_s, check=False)
    for name in pods:
        _note(name, compared.manifest(name) or "", machine_ledger)
        if name == drift.API_SERVER:
            _write_files(wanted.files)
        _restart(name, found.manifests[name], machine_ledger, limit_s)
        _finish(name, machine_ledger)


def _note(name: str, earlier: str, machine_ledger: Ledger) -> None:
    """Keep the state before a change, unless an earlier one is kept already: that is the last one that was verified."""
    if name not in machine_ledger.control_plane:
        os.makedirs(KEPT, mode=0o700, exist_ok=True)
        disk.write(_kept(name), earlier, 0o600)
    machine_ledger.control_plane[name] = _BEGUN
    machine_ledger.save()


def _finish(name: str, machine_ledger: Ledger) -> None:
    machine_ledger.control_plane[name] = _DONE
    machine_ledger.save()


def _write_files(files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the API server's files; the earlier ones are kept as its manifest is."""
    kept = _files()
    if not os.path.exists(kept):
        disk.write(kept, json.dumps({path: disk.read(path) for path in files}), 0o600)
    for path, content in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        disk.write(path, json.dumps(content, indent=1) + "\n", 0o600)


def _restart(name: str, text: str, machine_ledger: Ledger, limit_s: float) -> None:
    """Restart a static pod with this manifest; raises MachineProblem if it does not become ready and stay so."""
    address, began = compared.address(), time.time()
    static_pods.restart(name, machine_ledger, limit_s, lambda: _is_ready(name, address), text)
    before = containers.ids(name)
    time.sleep(_SETTLE_S)
    if containers.ids(name) != before or not _is_ready(name, address):
        raise static_pods.not_ready(name, f"the static pod {name} did not stay ready for {_SETTLE_S:.0f} s", began)


def _is_ready(name: str, address: str) -> bool:
    # Another API server behind the cluster's endpoint is not the one that was changed.
    return not kube_api.local_problem(address) if name == drift.API_SERVER else static_pods.is_ready(name)


def _taken_back(error: MachineProblem, machine_ledger: Ledger, limit_s: float) -> MachineProblem:
    """The problem of a change, after everything was put back."""
    problem = error.problem
    try:
        _undo(machine_ledger, limit_s)
    except MachineProblem as second:
        return MachineProblem(
            f"{problem.found}; and the earlier settings could not be restored: {second.problem.found}",
            problem.wanted,
            f"correct that on the machine, then run the command again; the earlier manifests are in {KEPT}",
            output=error.output,
        )
    return MachineProblem(
        f"{problem.found}; the earlier settings are restored",
        problem.wanted,
        "correct the settings, then run the command again",
        output=error.output,
    )


def _undo(machine_ledger: Ledger, limit_s: float) -> None:
    static_pods.heal(machine_ledger)
    _drop_older_versions(machine_ledger)
    for name in reversed(_PODS):
        if name in machine_ledger.control_plane:
            _restore(name, machine_ledger, limit_s)
    if drift.CONFIG in machine_ledger.control_plane:
        _restore_config(machine_ledger, limit_s)
    _forget(machine_ledger)


def _restore(name: str, machine_ledger: Ledger, limit_s: float) -> None:
    """Start a static pod with the manifest and the files that it had before."""
    text = disk.read(_kept(name))
    # An interrupted run may have restored the files, and not restarted the server that has read the others.
    restores_files = name == drift.API_SERVER and os.path.exists(_files())
    if restores_files:
        _restore_files()
    if text and (text != compared.manifest(name) or restores_files or not _is_ready(name, compared.address())):
        _restart(name, text, machine_ledger, limit_s)
    machine_ledger.control_plane.pop(name, None)
    machine_ledger.save()
    disk.remove(_kept(name))
    if restores_files:
        disk.remove(_files())


def _restore_files() -> None:
    """Write the API server's earlier files. A file that did not exist is not read by it."""
    try:
        kept = json.loads(disk.read(_files()) or "{}")
    except ValueError:
        kept = {}
    for path, text in kept.items():
        if text is not None and disk.read(path) != text:
            disk.write(path, text, 0o600)


def _restore_config(machine_ledger: Ledger, limit_s: float) -> None:
    """Bring back the settings of kubeadm's configuration; what else was changed in it meanwhile stays."""
    try:
        earlier = json.loads(disk.read(_kept(drift.CONFIG)) or "null")
    except ValueError:
        earlier = None
    if isinstance(earlier, dict):
        with expected.Workshop() as workshop:
            stored = compared.stored_configuration(compared.own_client(), workshop)
        node = static_pod_files.argument(drift.ETCD, "name", compared.manifest(drift.ETCD) or "")
        made = {**stored, **{key: value for key, value in earlier.items() if key != "etcd"}}
        made["etcd"] = {**stored.get("etcd", {}), "local": earlier.get("etcd", {}).get("local", {})}
        _upload(made, compared.address(), node, limit_s)
    machine_ledger.control_plane.pop(drift.CONFIG, None)
    machine_ledger.save()


def _sections(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a ClusterConfiguration that settings change."""
    return {
        key: configuration[key]
        for key in ("apiServer", "controllerManager", "scheduler", "etcd")
        if key in configuration
    }


def _upload(configuration: Mapping[str, Any], address: str, node: str, limit_s: float) -> None:
    """Write the ClusterConfiguration into the cluster as kubeadm does."""
    place = {"name": node, "address": address}
    documents = [expected.init_document(place, f"{command.PRIVATE}/patches"), configuration]
    command.run("init phase upload-config kubeadm", documents, limit_s, finishes=True)


def _recover(machine_ledger: Ledger, limit_s: float) -> None:
    """After an interruption: a component that does not become ready gets its earlier manifest back.

    The settings are then compared with a control plane that works, and tried once more.
    """
    _drop_older_versions(machine_ledger)
    for name in _PODS:
        if machine_ledger.control_plane.get(name) != _BEGUN:
            continue
        deadline = time.monotonic() + _RECOVERY_S
        while not _is_ready(name, compared.address()):
            if time.monotonic() > deadline:
                _restore(name, machine_ledger, limit_s)
                break
            time.sleep(_POLL_S)


def _drop_older_versions(machine_ledger: Ledger) -> None:
    """Forget manifests of before an upgrade: they would bring back the older version."""
    for name in _PODS:
        kept = disk.read(_kept(name))
        if name in machine_ledger.control_plane and kept is not None:
            present = compared.manifest(name) or ""
            if static_pod_files.image(name, kept) != static_pod_files.image(name, present):
                del machine_ledger.control_plane[name]
                machine_ledger.save()
                disk.remove(_kept(name))
                if name == drift.API_SERVER:
                    disk.remove(_files())


def _check_members() -> None:
    """Raise MachineProblem if etcd would lose its majority while the member on this machine restarts."""
    found = etcd_snapshot.members()
    silent = [each["name"] or each["id"] for each in found["members"] if not each["healthy"]]
    if found["problem"] or silent:
        raise MachineProblem(
            found["problem"] or f"the member {silent[0]} of etcd does not respond",
            "healthy members of etcd before one of them is restarted",
            "start it, or remove that control plane; nothing was changed",
        )


def _forget(machine_ledger: Ledger) -> None:
    machine_ledger.control_plane = {}
    machine_ledger.save()
    tree.remove(KEPT)


def _kept(name: str) -> str:
    return f"{KEPT}/{name}"


def _files() -> str:
    """The earlier files of the API server."""
    return f"{KEPT}/files.json"
