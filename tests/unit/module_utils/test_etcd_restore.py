"""A restore of etcd: killed before every step and run again; and with a real etcd, if the lab has built one."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import (
    containers,
    disk,
    etcd_restore,
    etcd_restore_abort,
    etcd_snapshot,
    etcd_upload,
    etcdctl,
    kube_api,
    kubeconfig,
    ledger,
    lock,
    static_pod_files,
    tree,
)
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.kubeadm import static_pods
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

from tests.unit import etcd_member
from tests.unit.etcd_member import needs_etcd

DATA = b"a snapshot"
SHA = hashlib.sha256(DATA).hexdigest()
ETCD = """
    - etcd
    - --name=control-1
    - --initial-advertise-peer-urls=https://10.0.0.1:2380
    image: registry.k8s.io/etcd:3.6.8-0
"""
HASH = f"sha256:{'0' * 64}"


class Killed(BaseException):
    """SIGKILL."""


class ControlPlane:
    """A machine with etcd's folder, whose kubelet runs what is in the folder of manifests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests, self.data = root / "manifests", root / "etcd"
        self.steps, self.kill_at = 0, 0
        self.code = 0
        self.runs = 0
        self.bump = 0
        self.dead = False
        self.revision = 5
        """Of the data that is replaced, as etcdutl reports it; 0: it cannot be read."""

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.kill_at:
            self.dead = True
        if self.dead:
            raise Killed

    def ids(self, name: str, every: bool = False) -> list[str]:
        if name in etcd_restore.COMPONENTS:
            return [name] if (self.manifests / f"{name}.yaml").exists() else []
        pod = self.manifests / f"{name.rpartition('-')[0]}.json"
        if not every or not pod.exists():
            return []
        spec = json.loads(pod.read_text())["spec"]["containers"][0]
        assert spec["name"] == name
        if "status" in name:
            return [name]
        folder = next(each for each in spec["command"] if each.startswith("--data-dir=")).partition("=")[2]
        if not Path(folder).exists() and not self.code:
            self.runs += 1
            (Path(folder) / "member/snap").mkdir(parents=True)
            (Path(folder) / "member/snap/db").write_text("restored")
            bump = next(each for each in spec["command"] if each.startswith("--bump-revision="))
            self.bump = int(bump.partition("=")[2])
        return [name]

    def crictl(self, argv: Sequence[str], *_: Any) -> CommandResult:
        if argv[0] == "inspect":
            status = {"state": "CONTAINER_EXITED", "exitCode": self.code}
            return CommandResult(argv, 0, json.dumps({"status": status}), "")
        if argv[0] == "logs" and "status" in argv[1]:
            text = json.dumps({"hash": 1, "revision": self.revision, "totalKey": 1})
            return CommandResult(argv, 0, text if self.revision else "Error: it is damaged", '{"level": "info"}\n')
        return CommandResult(argv, 0, "", "Error: snapshot is damaged\n" if self.code else "")

    @property
    def db(self) -> str:
        return (self.data / "member/snap/db").read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPlane:
    made = ControlPlane(tmp_path)
    made.manifests.mkdir()
    (made.data / "member/snap").mkdir(parents=True)
    (made.data / "member/snap/db").write_text("old")
    for name in etcd_restore.COMPONENTS:
        (made.manifests / f"{name}.yaml").write_text(ETCD if name == "etcd" else "")
    monkeypatch.setattr(etcd_snapshot, "DATA", str(made.data))
    Path(etcd_upload.path_of(SHA)).write_bytes(DATA)
    monkeypatch.setattr(etcd_upload, "check_authority", lambda _: None)
    monkeypatch.setattr(static_pod_files, "FOLDER", str(made.manifests))
    monkeypatch.setattr(static_pods, "AWAY", str(tmp_path / "away"))
    monkeypatch.setattr(static_pods, "_POLL_S", 0.0)
    monkeypatch.setattr(etcd_restore, "_POLL_S", 0.0)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(containers, "ids", made.ids)
    monkeypatch.setattr(containers, "crictl", made.crictl)
    monkeypatch.setattr(etcd_restore, "_verify", lambda *_: made.step())
    monkeypatch.setattr(static_pods, "is_ready", lambda name: bool(made.ids(name)))

    def stepping(function: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            made.step()
            return function(*arguments, **options)

        return called

    # Every change of the machine passes one of these.
    for module, name in ((os, "replace"), (disk, "write"), (disk, "remove"), (tree, "remove")):
        monkeypatch.setattr(module, name, stepping(getattr(module, name)))
    return made


def restore(machine: ControlPlane) -> list[str]:
    """The whole play on this machine."""
    assert machine
    etcd_restore.stop(SHA, HASH, "3.6.8", check=False)
    return etcd_restore.restore(SHA, 7, 1.0, check=False)[1]


def restored(machine: ControlPlane) -> bool:
    """Whether the new data is in its place, the old data is kept, and nothing else is left."""
    kept = [each.name for each in machine.data.iterdir() if each.name != "member"]
    return (
        machine.db == "restored"
        and len(kept) == 1
        and (machine.data / kept[0] / "member/snap/db").read_text() == "old"
        and sorted(each.name for each in machine.manifests.iterdir())
        == sorted(f"{name}.yaml" for name in etcd_restore.COMPONENTS)
        and ledger.load() == ledger.Ledger(etcd_revision=ledger.load().etcd_revision)
    )


def test_the_data_is_replaced_and_the_old_data_named(machine: ControlPlane) -> None:
    notes = restore(machine)
    assert restored(machine)
    assert "gpunodes-before-" in notes[0]
    # The same backup once more is a new restore; what the cluster wrote meanwhile is kept this time.
    (machine.data / "member/snap/db").write_text("newer")
    Path(etcd_upload.path_of(SHA)).write_bytes(DATA)
    for each in machine.data.glob("gpunodes-before-*"):
        each.rename(machine.data / "gpunodes-before-1")
    restore(machine)
    assert machine.db == "restored"
    assert [(each / "member/snap/db").read_text() for each in machine.data.glob("gpunodes-before-*")] == ["newer"]


def test_a_kill_before_any_step_is_continued_by_the_next_run(machine: ControlPlane, tmp_path: Path) -> None:
    shutil.copytree(tmp_path, _pristine(tmp_path))
    step = 0
    while True:
        step += 1
        machine.steps, machine.kill_at, machine.dead = 0, step, False
        try:
            restore(machine)
        except Killed:
            machine.kill_at, machine.dead = 0, False
            assert list(machine.data.glob("**/member/snap/db"))
            restore(machine)
            assert restored(machine), f"killed before step {step}"
        else:
            break
        again(tmp_path)
    assert step > 15, "every change of the machine is a step"


OTHER = b"another snapshot"
OTHER_SHA = hashlib.sha256(OTHER).hexdigest()


@pytest.mark.parametrize("kill_at", range(20, 46))
def test_another_backup_after_an_unfinished_restore_keeps_the_old_data(machine: ControlPlane, kill_at: int) -> None:
    """The data from before the first restore is what is kept, never that of the unfinished one."""
    machine.kill_at = kill_at
    with pytest.raises(Killed):
        restore(machine)
    machine.kill_at, machine.dead = 0, False
    Path(etcd_upload.path_of(OTHER_SHA)).write_bytes(OTHER)
    etcd_restore.stop(OTHER_SHA, HASH, "3.6.8", check=False)
    etcd_restore.restore(OTHER_SHA, 7, 1.0, check=False)
    assert restored(machine)
    assert machine.runs == 2 or kill_at < 27


@pytest.mark.parametrize(
    ("old", "running", "record", "bump"),
    [
        (5, 0, 0, etcd_restore.BUMP),
        (2_000_000_000, 0, 0, 2_000_000_000 - 7 + etcd_restore.BUMP),
        (5, 3_000_000_000, 0, 3_000_000_000 - 7 + etcd_restore.BUMP),
        (0, 0, 4_000_000_000, 4_000_000_000 - 7 + etcd_restore.BUMP),
    ],
)
def test_revisions_are_raised_above_those_of_the_replaced_data(
    machine: ControlPlane, monkeypatch: pytest.MonkeyPatch, old: int, running: int, record: int, bump: int
) -> None:
    """Its clients know them: with the snapshot's alone, a watch would miss everything until they are passed."""
    machine.revision = old
    ledger.Ledger(etcd_revision=record).save()
    if running:
        monkeypatch.setattr(etcd_snapshot, "revision", lambda: running)
    least: list[int] = []
    monkeypatch.setattr(etcd_restore, "_verify", lambda wanted, _: least.append(wanted))
    notes = restore(machine)
    assert machine.bump == bump
    assert least == [7 + bump]
    assert ledger.load().etcd_revision == 7 + bump
    assert len(notes) == 1


def test_a_revision_that_nothing_knows_is_reported(machine: ControlPlane) -> None:
    machine.revision = 0
    assert "could not be read" in restore(machine)[1]
    assert machine.bump == etcd_restore.BUMP


def test_a_failing_etcdutl_leaves_the_old_data(machine: ControlPlane) -> None:
    machine.code = 1
    with pytest.raises(MachineProblem, match="failed: Error: snapshot is damaged"):
        restore(machine)
    assert machine.db == "old"
    assert not (machine.manifests / f"{etcd_restore.POD}.json").exists()


def test_another_snapshot_on_the_machine_is_refused(machine: ControlPlane) -> None:
    Path(etcd_upload.path_of(SHA)).write_bytes(b"changed")
    with pytest.raises(MachineProblem, match="is not the snapshot"):
        restore(machine)
    assert machine.db == "old"


def test_a_restore_that_has_not_begun_does_nothing(machine: ControlPlane) -> None:
    assert etcd_restore.restore(SHA, 7, 1.0, check=False)[0].actions == []
    assert machine.steps == 0


def test_a_machine_without_manifests_is_refused(machine: ControlPlane) -> None:
    """Else a restore would do nothing, and report success."""
    for each in machine.manifests.iterdir():
        each.unlink()
    with pytest.raises(MachineProblem, match="no manifest of a control plane"):
        restore(machine)


def test_a_check_changes_nothing(machine: ControlPlane) -> None:
    assert len(etcd_restore.stop(SHA, HASH, "3.6.8", check=True).actions) == 4
    assert etcd_restore.restore(SHA, 7, 1.0, check=True)[0].actions == ["restore etcd"]
    assert machine.steps == 0


@pytest.mark.parametrize(
    "manifest",
    ["", ETCD.replace("control-1", "$(reboot)"), ETCD.replace("https://10.0.0.1:2380", "https://a,b=c"), ETCD[:60]],
)
def test_a_manifest_that_is_not_kubeadm_s_is_refused(manifest: str) -> None:
    with pytest.raises(MachineProblem, match="no name, peer address or image"):
        etcd_restore.pod("x", manifest, "/a", "/b", 1)


@pytest.mark.parametrize(
    ("version", "image", "refused"),
    [
        ("3.7.0", "registry.k8s.io/etcd:3.6.8-0", True),
        ("4.0.0", "registry.k8s.io/etcd:3.6.8-0@sha256:00", True),
        ("3.6.16", "registry.k8s.io/etcd:3.6.8-0", False),
        ("3.5.0", "10.0.0.1:5000/etcd:v3.6.8", False),
        ("3.7.0", "10.0.0.1:5000/etcd@sha256:00", False),
    ],
)
def test_a_backup_of_a_newer_etcd_is_refused_before_anything_is_stopped(
    machine: ControlPlane, version: str, image: str, refused: bool
) -> None:
    """An older etcd does not start with its data, and everything would be stopped by then."""
    (machine.manifests / "etcd.yaml").write_text(ETCD.replace("registry.k8s.io/etcd:3.6.8-0", image))
    if not refused:
        assert len(etcd_restore.stop(SHA, HASH, version, check=True).actions) == 4
        return
    with pytest.raises(
        MachineProblem, match=rf"the backup is of etcd {version}, and this control plane has etcd 3.6.8"
    ):
        etcd_restore.stop(SHA, HASH, version, check=False)
    assert machine.steps == 0


# The way back


def abort() -> list[str]:
    """The whole play on this machine."""
    _, notes = etcd_restore_abort.start(check=False)
    etcd_restore_abort.verify(1.0)
    return notes


def given_up(machine: ControlPlane) -> bool:
    """Whether the control plane runs with its old data, and nothing is left of the restore."""
    return (
        machine.db == "old"
        and [each.name for each in machine.data.iterdir()] == ["member"]
        and sorted(each.name for each in machine.manifests.iterdir())
        == sorted(f"{name}.yaml" for name in etcd_restore.COMPONENTS)
        and ledger.load() == ledger.Ledger(etcd_revision=ledger.load().etcd_revision)
    )


def test_a_restore_that_was_killed_before_any_step_can_be_given_up(machine: ControlPlane, tmp_path: Path) -> None:
    """Else nothing but the restore itself, which may fail each time, starts the control plane again."""
    shutil.copytree(tmp_path, _pristine(tmp_path))
    step = 0
    while True:
        step += 1
        machine.steps, machine.kill_at, machine.dead = 0, step, False
        try:
            restore(machine)
        except Killed:
            machine.kill_at, machine.dead = 0, False
            moved = bool(list(machine.data.glob("gpunodes-before-*/member")))
            begun = bool(ledger.load().etcd_restore)
            assert bool(abort()) is moved
            # Before its note in the ledger there was no restore: only the snapshot that was sent is there.
            Path(etcd_upload.path_of(SHA)).unlink(missing_ok=True) if not begun else None
            assert given_up(machine), f"killed before step {step}"
        else:
            break
        again(tmp_path)
    assert step > 20


def test_an_abort_that_is_killed_before_any_step_is_continued(machine: ControlPlane, tmp_path: Path) -> None:
    machine.kill_at = 48
    with pytest.raises(Killed):
        restore(machine)
    machine.kill_at, machine.dead = 0, False
    assert ledger.load().etcd_restore["state"] == "swapped"
    assert len(list(machine.manifests.iterdir())) == 4, "the control plane runs with the restored data"
    shutil.copytree(tmp_path, _pristine(tmp_path))
    step = 0
    while True:
        step += 1
        machine.steps, machine.kill_at, machine.dead = 0, step, False
        try:
            abort()
        except Killed:
            machine.kill_at, machine.dead = 0, False
            if step % 2:
                abort()
                assert given_up(machine), f"killed before step {step}"
            else:
                # The restore may be what is wanted after all.
                Path(etcd_upload.path_of(SHA)).write_bytes(DATA)
                restore(machine)
                assert restored(machine), f"killed before step {step}"
        else:
            break
        again(tmp_path)
    assert step > 10


def _pristine(tmp_path: Path) -> Path:
    return tmp_path.with_name(f"{tmp_path.name}-pristine")


def again(tmp_path: Path) -> None:
    """The machine as it was before."""
    for each in tmp_path.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    shutil.copytree(_pristine(tmp_path), tmp_path, dirs_exist_ok=True)


def test_an_abort_without_old_data_changes_nothing(machine: ControlPlane) -> None:
    """etcd would begin an empty cluster."""
    state = {"snapshot": SHA, "state": "swapped", "before": "gpunodes-before-1"}
    ledger.Ledger(etcd_restore=state).save()
    machine.steps = 0
    with pytest.raises(MachineProblem, match="from before the restore is not in"):
        abort()
    assert machine.steps == 0


def test_an_abort_without_a_restore_and_a_check_change_nothing(machine: ControlPlane) -> None:
    assert etcd_restore_abort.start(check=False)[0].actions == []
    ledger.Ledger(etcd_restore={"snapshot": SHA, "state": "stopped"}).save()
    machine.steps = 0
    assert etcd_restore_abort.start(check=True)[0].actions == ["start the old data of etcd again"]
    etcd_restore_abort.verify(1.0)
    assert machine.steps == 0


# Verification


class Api:
    """An API whose controller follows Deployments, or not."""

    def __init__(self, *, follows: bool = True) -> None:
        self.follows = follows
        self.sets: list[Any] = []
        self.deleted: list[str] = []

    def get(self, path: str, **_: str) -> Any:
        if path.endswith("leases"):
            return {"items": [{"metadata": {"name": "gpunodes-machine-gpu-1"}}]}
        return {"items": self.sets if path.endswith("replicasets") else []}

    def call(self, _: str, __: str, body: Any) -> None:
        self.sets = [body] if self.follows else []

    def delete(self, path: str, **_: str) -> None:
        self.deleted.append(path.rpartition("/")[2])
        if "deployments" in path:
            self.sets = []


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setattr(etcd_restore, "_POLL_S", 0.0)
    monkeypatch.setattr(kube_api, "admin", lambda: made)
    monkeypatch.setattr(etcd_snapshot, "status", lambda: {"revision": etcd_restore.BUMP + 7, "members": [{}]})
    return made


def test_a_controller_must_follow_a_deployment(api: Api) -> None:
    etcd_restore._verify(etcd_restore.BUMP + 7, 1.0)
    assert api.deleted[0] == "gpunodes-machine-gpu-1", "locks of the time of the backup are released"
    assert api.deleted[1].startswith("gpunodes-restored-")
    api.follows = False
    with pytest.raises(MachineProblem, match="no controller follows"):
        etcd_restore._verify(etcd_restore.BUMP + 7, 0.05)
    assert api.deleted[-1].startswith("gpunodes-restored-"), "the probe is deleted in any case"


def test_a_revision_that_was_not_raised_is_a_problem(api: Api) -> None:
    assert api
    with pytest.raises(MachineProblem, match=r"wanted: .*at revision 1000000008 or above"):
        etcd_restore._verify(etcd_restore.BUMP + 8, 1.0)


def test_an_api_that_is_not_ready_yet_is_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([ApiError(0, "refused"), ApiError(503, "starting")])
    get = api.get

    def starting(path: str, **query: str) -> Any:
        if path.endswith("replicasets") and (error := next(calls, None)):
            raise error
        return get(path, **query)

    monkeypatch.setattr(api, "get", starting)
    etcd_restore._verify(etcd_restore.BUMP + 7, 1.0)


# The upload

lock_held = lock.held


class Input:
    """Standard input of the program, by descriptor 0."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def read(self, _: int, most: int) -> bytes:
        return self.data.read(min(most, 4))


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "etcd"
    data.mkdir()
    monkeypatch.setattr(etcd_snapshot, "DATA", str(data))
    monkeypatch.setattr(etcd_upload, "check_authority", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(lock, "held", lambda: lock_held(wait_s=0, path=str(tmp_path / "lock")))
    return data


def upload(
    data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **options: Any
) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", Input(data).read)
        etcd_upload.main({"size": len(DATA), "sha256": SHA, "ca_hash": HASH, "etcd": "3.6.8", **options})
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_snapshot_is_received_once(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (target / "gpunodes-restore-0123.db").write_text("of an earlier restore")
    assert upload(DATA + b"more", monkeypatch, capsys) == [{"state": "send"}, {"state": "present"}]
    assert [each.name for each in target.iterdir()] == [f"gpunodes-restore-{SHA[:16]}.db"]
    assert next(target.iterdir()).read_bytes() == DATA
    assert next(target.iterdir()).stat().st_mode & 0o777 == 0o600
    assert upload(b"", monkeypatch, capsys) == [{"state": "present"}]


def test_a_restore_that_a_killed_command_left_ends_first(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It deletes the snapshot at its end: one that is present until then would be missing for the next restore."""
    upload(DATA, monkeypatch, capsys)
    with lock.held():
        [answer] = upload(b"", monkeypatch, capsys)
    assert "another run of gpunodes is changing this machine" in answer["error"]["found"]
    assert len(list(target.iterdir())) == 1


@pytest.mark.parametrize("data", [b"a snap", b"a snapshoX", b""])
def test_an_incomplete_or_changed_snapshot_is_not_kept(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    assert "error" in upload(data, monkeypatch, capsys)[-1]
    assert list(target.iterdir()) == []


def test_a_snapshot_that_does_not_fit_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert target
    assert "MiB free" in upload(b"", monkeypatch, capsys, size=1 << 60)[0]["error"]["found"]


def test_a_machine_of_another_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd_member.certificates(tmp_path / "pki")
    monkeypatch.setattr(etcd_snapshot, "DATA", str(tmp_path))
    monkeypatch.setattr(kubeconfig, "CA", str(tmp_path / "pki/ca.crt"))
    with pytest.raises(MachineProblem, match="the backup is of the cluster with the CA"):
        etcd_upload.check_authority(HASH)
    etcd_upload.check_authority(kubeconfig.ca_hash((tmp_path / "pki/ca.crt").read_text()))
    monkeypatch.setattr(kubeconfig, "CA", str(tmp_path / "none"))
    with pytest.raises(MachineProblem, match="this machine is no control plane"):
        etcd_upload.check_authority(HASH)


# A real etcd


@needs_etcd
def test_a_real_etcd_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshot, change, restore with the arguments of the static pod: the old value is back, at a higher revision."""
    found = etcd_member.programs()
    assert found
    folder = tmp_path / "one"
    folder.mkdir()
    with etcd_member.running(folder) as member:
        monkeypatch.setattr(containers, "ids", lambda *_: ["0123456789ab"])
        monkeypatch.setattr(containers, "execute", member.execute)
        monkeypatch.setattr(etcd_snapshot, "DATA", str(member.data))
        monkeypatch.setattr(etcdctl, "PKI", str(folder / "pki"))
        monkeypatch.setattr(etcd_snapshot, "_LOCK", str(tmp_path / "lock"))
        member.etcdctl("put", "/registry/namespaces/a", "there")
        with etcd_snapshot.snapshot() as (path, about):
            shutil.copy(path, tmp_path / "snapshot.db")
        member.etcdctl("del", "/registry/namespaces/a")
        assert about["revision"] == 2
    restored_into(tmp_path / "two", folder, tmp_path / "snapshot.db", etcd_restore.BUMP)
    with etcd_member.running(tmp_path / "two") as member:
        monkeypatch.setattr(containers, "execute", member.execute)
        assert member.etcdctl("get", "/registry/namespaces/a", "--print-value-only").strip() == "there"
        now = etcd_snapshot.status()
        assert now["revision"] >= about["revision"] + etcd_restore.BUMP
        assert [each["name"] for each in now["members"]] == ["control-1"]
        reported = etcd_snapshot.members()
        assert [(each["leader"], each["learner"]) for each in reported["members"]] == [(True, False)]
        # A watcher that knows an old revision must learn that it is gone, and list everything again.
        assert "compacted" in watched(member, 3)
        member.etcdctl("put", "/registry/namespaces/b", "of the first restore")
        known = etcd_snapshot.revision()
    # The same backup once more: its own revision plus the same number is what clients know already.
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(etcd_snapshot, "DATA", str(tmp_path / "two/data"))
    monkeypatch.setattr(etcd_restore, "_run", run_here)
    machine_ledger = ledger.Ledger(etcd_restore={"snapshot": SHA, "state": "stopped"})
    etcd_restore._choose_bump(about["revision"], ETCD, machine_ledger)
    bump = int(machine_ledger.etcd_restore["bump"])
    assert bump == known - about["revision"] + etcd_restore.BUMP
    restored_into(tmp_path / "three", folder, tmp_path / "snapshot.db", bump)
    with etcd_member.running(tmp_path / "three") as member:
        monkeypatch.setattr(containers, "execute", member.execute)
        assert etcd_snapshot.revision() >= known + etcd_restore.BUMP
        assert "compacted" in watched(member, known + 1)


def restored_into(target: Path, first: Path, snapshot: Path, bump: int) -> None:
    """Restore as the static pod does, with the certificates of the member in ``first``."""
    text = ETCD.replace("https://10.0.0.1:2380", "http://127.0.0.1:1")
    target.mkdir()
    code, output = run_here("", etcd_restore.pod("x", text, str(snapshot), str(target / "data"), bump), 60)
    assert code == 0, output
    shutil.copytree(first / "pki", target / "pki")


def run_here(_: str, spec: Any, limit_s: float) -> tuple[int, str]:
    """What the kubelet does with a static pod."""
    found = etcd_member.programs()
    assert found
    command = spec["spec"]["containers"][0]["command"]
    done = subprocess.run(
        [str(found / command[0]), *command[1:]], check=False, capture_output=True, text=True, timeout=limit_s
    )
    return done.returncode, done.stdout + done.stderr


def watched(member: etcd_member.Member, revision: int) -> str:
    """What a client is told that watches from this revision on."""
    argv = ["etcdctl", f"--endpoints=https://127.0.0.1:{member.port}", f"--cacert={member.folder}/pki/ca.crt"]
    argv += [f"--cert={member.folder}/pki/server.crt", f"--key={member.folder}/pki/server.key"]
    return member.execute("", [*argv, "watch", "/registry", "--prefix", f"--rev={revision}"], 20).text
