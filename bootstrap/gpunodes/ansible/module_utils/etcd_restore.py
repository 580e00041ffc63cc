"""Replaces the data of etcd by a snapshot, in steps that may be interrupted anywhere.

How far a restore has come follows from what exists in etcd's folder and from the ledger, which is written before each
step. The old data is kept. etcdutl runs in a static pod of etcd's own image: where the kubelet can run etcd it can run
this, whichever the container runtime is, and without an API.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import containers, disk, etcd_data, etcd_snapshot, etcd_upload, kube_api, ledger, static_pod_files, tree
from .kube_api import ApiError, Client
from .kubeadm import static_pods
from .ledger import Ledger
from .problem import MachineProblem
from .process import last_line
from .report import Difference, Report

COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")
"""Static pods of a control plane, in the order in which they are stopped; they start the other way round."""
BUMP = 1_000_000_000
"""Revisions that are skipped above the snapshot and above the replaced data: clients' caches are older than any object
then (etcd, issue 16028)."""
POD = "gpunodes-etcd-restore"
_RESTORED, _PARTIAL = "gpunodes-restored-", "gpunodes-restoring"
STOP_S = 300
_RESTORE_S = 1800
_STATUS_S = 600
_POLL_S = 1.0
_URL = r"https?://[A-Za-z0-9.:\[\]-]{1,200}"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
_LOCKS = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_LOCK_LABEL = "app.kubernetes.io/managed-by=gpunodes"
_APPS = "/apis/apps/v1/namespaces/kube-system"


def stop(snapshot: str, ca_hash: str, version: str, check: bool) -> Report:
    """Stop the control plane of this machine for a restore of the snapshot with this SHA-256.

    It stays stopped, also after a reboot: its manifests are away, which the ledger has. Raises MachineProblem for a
    machine of another cluster, or with an etcd that cannot read a snapshot of one with this ``version``.
    """
    etcd_upload.check_authority(ca_hash)
    machine_ledger = ledger.load()
    etcd_upload.check_version(version, machine_ledger)
    report = Report()
    for name in COMPONENTS:
        if os.path.exists(static_pod_files.path(name)):
            report.add(f"stop {name}", Difference("static pods", {name: "runs"}, {name: "stopped"}))
    known = machine_ledger.etcd_restore
    if not report.actions and not known:
        raise MachineProblem(
            "no manifest of a control plane is on this machine",
            "a control plane that kubeadm made",
            f"restore {static_pod_files.FOLDER} from a copy",
        )
    another = known.get("snapshot") != snapshot or known.get("state") == etcd_data.ABORTED
    if known and another:
        report.add("give up an unfinished restore of another backup, or the end of one that was given up")
    if report.actions and not check:
        if another:
            # The old data of an unfinished restore of another backup stays the old data.
            unfinished = {key: text for key, text in known.items() if key == "before"}
            machine_ledger.etcd_restore = {"snapshot": snapshot, "state": "stopped", **unfinished}
        _note_running(machine_ledger)
        machine_ledger.save()
        static_pods.stop(COMPONENTS, machine_ledger, STOP_S)
    return report


def _note_running(machine_ledger: Ledger) -> None:
    """Note the revision of the member that runs on this machine: its clients know it."""
    with contextlib.suppress(MachineProblem):
        _note_replaced(etcd_snapshot.revision(), machine_ledger)


def _note_replaced(revision: int, machine_ledger: Ledger) -> None:
    state = machine_ledger.etcd_restore
    state["replaced"] = str(max(revision, int(state.get("replaced", 0))))


def restore(snapshot: str, revision: int, limit_s: float, check: bool) -> tuple[Report, list[str]]:
    """Restore the snapshot with this SHA-256 into a new member, start the control plane, and verify it.

    ``revision`` is the snapshot's. Returns also what a person must know. Raises MachineProblem; the next run continues.
    """
    report = Report()
    machine_ledger = ledger.load()
    if check or machine_ledger.etcd_restore.get("snapshot") == snapshot:
        report.add(
            "restore etcd",
            Difference("etcd", {"data": "present"}, {"data": f"of the snapshot {snapshot[:16]}"}),
        )
    if check or not report.actions:
        return report, []
    state = machine_ledger.etcd_restore
    if state["state"] != "swapped":
        _unpack(snapshot, revision, machine_ledger)
        _swap(snapshot, machine_ledger)
    for name in reversed(COMPONENTS):
        static_pods.start([name], machine_ledger)
        wait_ready(name, limit_s)
    _verify(revision + int(state.get("bump", BUMP)), limit_s)
    before = f"{etcd_snapshot.DATA}/{state['before']}"
    _clean(state["before"])
    notes = [f"the old data of etcd is in {before}; delete it when it is not needed"]
    if state.get("replaced") == "0":
        notes.append(
            "the revision of the old data could not be read: if the cluster was restored before by other means, its "
            "kubelets and controllers may miss changes until they are restarted"
        )
    machine_ledger.etcd_restore = {}
    machine_ledger.save()
    return report, notes


def restored_folder(snapshot: str) -> str:
    """The folder of the data that etcdutl made completely from a snapshot."""
    return f"{etcd_snapshot.DATA}/{_RESTORED}{snapshot[:16]}"


def _unpack(snapshot: str, revision: int, machine_ledger: Ledger) -> None:
    """Make the new data, unless an earlier run did."""
    if os.path.isdir(restored_folder(snapshot)):
        return
    path = etcd_upload.path_of(snapshot)
    if not os.path.lexists(path) or etcd_upload.digest(path) != snapshot:
        raise MachineProblem(f"{path} is not the snapshot of the backup", "the snapshot", "run the command again")
    partial = f"{etcd_snapshot.DATA}/{_PARTIAL}"
    end_pods()
    tree.remove(partial)
    text = disk.read(machine_ledger.manifests.get("etcd", static_pod_files.path("etcd"))) or ""
    _choose_bump(revision, text, machine_ledger)
    attempt = f"{POD}-{int(time.time())}"
    bump = int(machine_ledger.etcd_restore["bump"])
    code, output = _run(POD, pod(attempt, text, path, partial, bump), _RESTORE_S)
    if code or not os.path.isdir(f"{partial}/member"):
        raise MachineProblem(
            f"`etcdutl snapshot restore` failed: {last_line(output) or f'exit code {code}'}",
            "restored data; the old data is unchanged",
            f"see `crictl logs` of the container {attempt}, then run the command again",
            output=output,
        )
    os.replace(partial, restored_folder(snapshot))


def _choose_bump(revision: int, etcd_manifest: str, machine_ledger: Ledger) -> None:
    """Note by how much the snapshot's ``revision`` is raised: above all that clients of this cluster know.

    They know the revision of the data that is replaced, and where it cannot be read, at least that of an earlier
    restore.
    """
    state = machine_ledger.etcd_restore
    if "bump" in state:
        return
    if "replaced" not in state:
        _note_replaced(_old_revision(etcd_manifest) or machine_ledger.etcd_revision, machine_ledger)
    highest = max(revision, int(state["replaced"]), machine_ledger.etcd_revision)
    state["bump"] = str(highest - revision + BUMP)
    machine_ledger.etcd_revision = highest + BUMP
    machine_ledger.save()


def _old_revision(etcd_manifest: str) -> int:
    """The revision of the data on this machine, whose member does not run; 0 if it cannot be read."""
    database = f"{etcd_snapshot.DATA}/member/snap/db"
    if not os.path.isfile(database):
        return 0
    name = f"{POD}-status"
    command = ["etcdutl", "snapshot", "status", database, "--write-out=json"]
    with contextlib.suppress(MachineProblem):
        spec = _pod(name, f"{name}-{int(time.time())}", static_pod_files.image("etcd", etcd_manifest), command)
        for line in _run(name, spec, _STATUS_S)[1].splitlines():
            # Lines of its log are JSON, too.
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                return int(json.loads(line)["revision"])
    return 0


def _run(name: str, spec: Mapping[str, Any], limit_s: float) -> tuple[int, str]:
    """Run a static pod of one container until it has ended; its exit code and output."""
    manifest = _pod_path(name)
    container = str(spec["spec"]["containers"][0]["name"])
    try:
        # Written elsewhere: after a power cut no temporary file is in the kubelet's folder.
        os.makedirs(static_pods.AWAY, mode=0o700, exist_ok=True)
        disk.write(f"{static_pods.AWAY}/{name}.json", json.dumps(spec), 0o600)
        os.replace(f"{static_pods.AWAY}/{name}.json", manifest)
        _wait(lambda: bool(_ended(container)), limit_s, "etcdutl does not end", name)
        return _ended(container)[0]
    finally:
        disk.remove(manifest)


def end_pods() -> None:
    """End etcdutl of a run that was killed: it must not write into the folder that this one makes."""
    for name in (POD, f"{POD}-status"):
        disk.remove(_pod_path(name))
        for each in containers.ids(f"{name}-[0-9]+"):
            containers.crictl(["stop", "--timeout=0", each])


def _pod_path(name: str) -> str:
    return f"{static_pod_files.FOLDER}/{name}.json"


def pod(name: str, etcd_manifest: str, path: str, folder: str, bump: int) -> dict[str, Any]:
    """The static pod that makes data from a snapshot for the member of this machine.

    Raises MachineProblem unless etcd's manifest has the arguments of kubeadm.
    """
    member = static_pod_files.argument("etcd", "name", etcd_manifest)
    url = static_pod_files.argument("etcd", "initial-advertise-peer-urls", etcd_manifest)
    image = static_pod_files.image("etcd", etcd_manifest)
    if not re.fullmatch(_NAME, member) or not re.fullmatch(_URL, url) or not image:
        raise MachineProblem(
            "etcd's manifest has no name, peer address or image", "a manifest of kubeadm", "restore it from a copy"
        )
    command = [
        *("etcdutl", "snapshot", "restore", path, f"--data-dir={folder}", f"--name={member}"),
        *(f"--initial-cluster={member}={url}", f"--initial-advertise-peer-urls={url}"),
        *(f"--bump-revision={bump}", "--mark-compacted"),
    ]
    return _pod(POD, name, image, command)


def _pod(name: str, container: str, image: str, command: Sequence[str]) -> dict[str, Any]:
    """A static pod with etcd's folder that runs a program of etcd's image once."""
    data = {"name": "etcd-data", "mountPath": etcd_snapshot.DATA}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {
            "hostNetwork": True,
            "restartPolicy": "Never",
            "priorityClassName": "system-node-critical",
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [*command],
                    "volumeMounts": [data],
                }
            ],
            "volumes": [{"name": "etcd-data", "hostPath": {"path": etcd_snapshot.DATA, "type": "Directory"}}],
        },
    }


def _ended(name: str) -> list[tuple[int, str]]:
    """The exit code and output of a container that has ended; empty while it has not."""
    for each in containers.ids(name, every=True):
        try:
            status = json.loads(containers.crictl(["inspect", each]).out)["status"]
            if status["state"] == "CONTAINER_EXITED":
                return [(int(status["exitCode"]), containers.crictl(["logs", each]).text)]
        except (ValueError, KeyError, TypeError):
            continue
    return []


def _swap(snapshot: str, machine_ledger: Ledger) -> None:
    """Move the old data aside and the new data into its place; each move is atomic, on one file system."""
    state = machine_ledger.etcd_restore
    if "before" not in state:
        state["before"] = f"{etcd_data.BEFORE}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        machine_ledger.save()
    member, before = f"{etcd_snapshot.DATA}/member", f"{etcd_snapshot.DATA}/{state['before']}"
    new = f"{restored_folder(snapshot)}/member"
    os.makedirs(before, mode=0o700, exist_ok=True)
    # Without the new data there the second move was made, and only its note in the ledger is missing.
    if os.path.isdir(new):
        if os.path.isdir(f"{before}/member"):
            # What is in its place is of an unfinished restore of another backup.
            tree.remove(member)
        elif os.path.isdir(member):
            os.replace(member, f"{before}/member")
        os.replace(new, member)
    state["state"] = "swapped"
    machine_ledger.save()
    tree.remove(restored_folder(snapshot))


def _verify(least: int, limit_s: float) -> None:
    """Raise MachineProblem unless the restored cluster works, from etcd, at revision ``least``, to a controller."""
    found = etcd_snapshot.status()
    if found["revision"] < least or len(found["members"]) != 1:
        raise MachineProblem(
            f"etcd is at revision {found['revision']} with {len(found['members'])} members",
            f"one member, at revision {least} or above",
            "run the command again",
        )
    client = kube_api.admin()
    client.get("/api/v1/nodes")
    # Locks and unfinished repairs of the time of the backup: nobody holds them now.
    for lock in client.get(_LOCKS, labelSelector=_LOCK_LABEL)["items"]:
        client.delete(f"{_LOCKS}/{lock['metadata']['name']}")
    _probe_controller(client, limit_s)


def _probe_controller(client: Client, limit_s: float) -> None:
    """Make a Deployment without pods, wait for the controller to follow it, and delete it."""
    name = f"gpunodes-restored-{int(time.time())}"
    labels = {"app.kubernetes.io/name": name}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "none", "image": "registry.k8s.io/pause"}]},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
    }
    selector = f"app.kubernetes.io/name={name}"
    client.call("POST", f"{_APPS}/deployments", deployment)

    def sets() -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = client.get(f"{_APPS}/replicasets", labelSelector=selector)["items"]
        return found

    try:
        _wait(lambda: bool(sets()), limit_s, "no controller follows a new Deployment", "kube-controller-manager")
    finally:
        client.delete(f"{_APPS}/deployments/{name}", propagationPolicy="Background")
    _wait(lambda: not sets(), limit_s, "no controller deletes what a Deployment owned", "kube-controller-manager")


def _clean(kept: str) -> None:
    """Delete the snapshot, and what this restore and earlier ones left; the old data ``kept`` stays."""
    clean_new()
    for name in os.listdir(etcd_snapshot.DATA):
        if name.startswith(etcd_data.BEFORE) and name != kept:
            tree.remove(f"{etcd_snapshot.DATA}/{name}")


def clean_new() -> None:
    """Delete the snapshot, and data that was made from it and is not in use."""
    etcd_upload.clear()
    for name in os.listdir(etcd_snapshot.DATA):
        if name.startswith((_RESTORED, _PARTIAL)):
            tree.remove(f"{etcd_snapshot.DATA}/{name}")


def wait_ready(name: str, limit_s: float) -> None:
    """Wait until a component of the control plane is ready; raises MachineProblem."""
    _wait(lambda: static_pods.is_ready(name), limit_s, f"{name} does not become ready", name)


def _wait(done: Callable[[], bool], limit_s: float, found: str, name: str) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if done():
                return
        except ApiError:
            # An API server that has just started may refuse or lose a request.
            pass
        if time.monotonic() > deadline:
            remedy = (
                f"see `crictl ps -a --name {name}` and its logs, and `journalctl -u kubelet`; run the command again"
            )
            raise MachineProblem(found, "a control plane that works", remedy)
        time.sleep(_POLL_S)
