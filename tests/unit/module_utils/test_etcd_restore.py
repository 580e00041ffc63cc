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
        self.dead = False

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.kill_at:
            self.dead = True
        if self.dead:
            raise Killed

    def ids(self, name: str, every: bool = False) -> list[str]:
        if name in etcd_restore.COMPONENTS:
            return [name] if (self.manifests / f"{name}.yaml").exists() else []
        pod = self.manifests / f"{etcd_restore.POD}.json"
        if not every or not pod.exists():
            return []
        spec = json.loads(pod.read_text())["spec"]["containers"][0]
        assert spec["name"] == name
        folder = next(each for each in spec["command"] if each.startswith("--data-dir=")).partition("=")[2]
        if not Path(folder).exists() and not self.code:
            self.runs += 1
            (Path(folder) / "member").mkdir(parents=True)
            (Path(folder) / "member/db").write_text("restored")
        return [name]

    def crictl(self, argv: Sequence[str], *_: Any) -> CommandResult:
        if argv[0] == "inspect":
            status = {"state": "CONTAINER_EXITED", "exitCode": self.code}
            return CommandResult(argv, 0, json.dumps({"status": status}), "")
        return CommandResult(argv, 0, "", "Error: snapshot is damaged\n" if self.code else "")

    @property
    def db(self) -> str:
        return (self.data / "member/db").read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPlane:
    made = ControlPlane(tmp_path)
    made.manifests.mkdir()
    (made.data / "member").mkdir(parents=True)
    (made.data / "member/db").write_text("old")
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
    etcd_restore.stop(SHA, HASH, check=False)
    return etcd_restore.restore(SHA, 7, 1.0, check=False)[1]


def restored(machine: ControlPlane) -> bool:
    """Whether the new data is in its place, the old data is kept, and nothing else is left."""
    kept = [each.name for each in machine.data.iterdir() if each.name != "member"]
    return (
        machine.db == "restored"
        and len(kept) == 1
        and (machine.data / kept[0] / "member/db").read_text() == "old"
        and sorted(each.name for each in machine.manifests.iterdir())
        == sorted(f"{name}.yaml" for name in etcd_restore.COMPONENTS)
        and ledger.load() == ledger.Ledger()
    )


def test_the_data_is_replaced_and_the_old_data_named(machine: ControlPlane) -> None:
    notes = restore(machine)
    assert restored(machine)
    assert "gpunodes-before-" in notes[0]
    # The same backup once more is a new restore; what the cluster wrote meanwhile is kept this time.
    (machine.data / "member/db").write_text("newer")
    Path(etcd_upload.path_of(SHA)).write_bytes(DATA)
    for each in machine.data.glob("gpunodes-before-*"):
        each.rename(machine.data / "gpunodes-before-1")
    restore(machine)
    assert machine.db == "restored"
    assert [(each / "member/db").read_text() for each in machine.data.glob("gpunodes-before-*")] == ["newer"]


def test_a_kill_before_any_step_is_continued_by_the_next_run(machine: ControlPlane, tmp_path: Path) -> None:
    shutil.copytree(tmp_path, tmp_path.with_name("pristine"))
    step = 0
    while True:
        step += 1
        machine.steps, machine.kill_at, machine.dead = 0, step, False
        try:
            restore(machine)
        except Killed:
            machine.kill_at, machine.dead = 0, False
            assert (machine.data / "member/db").exists() or list(machine.data.glob("gpunodes-before-*/member/db"))
            restore(machine)
            assert restored(machine), f"killed before step {step}"
        else:
            break
        for each in tmp_path.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        shutil.copytree(tmp_path.with_name("pristine"), tmp_path, dirs_exist_ok=True)
    assert step > 15, "every change of the machine is a step"


OTHER = b"another snapshot"
OTHER_SHA = hashlib.sha256(OTHER).hexdigest()


@pytest.mark.parametrize("kill_at", range(14, 30))
def test_another_backup_after_an_unfinished_restore_keeps_the_old_data(machine: ControlPlane, kill_at: int) -> None:
    """The data from before the first restore is what is kept, never that of the unfinished one."""
    machine.kill_at = kill_at
    with pytest.raises(Killed):
        restore(machine)
    machine.kill_at, machine.dead = 0, False
    Path(etcd_upload.path_of(OTHER_SHA)).write_bytes(OTHER)
    etcd_restore.stop(OTHER_SHA, HASH, check=False)
    etcd_restore.restore(OTHER_SHA, 7, 1.0, check=False)
    assert restored(machine)
    assert machine.runs == 2 or kill_at < 20


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
    assert len(etcd_restore.stop(SHA, HASH, check=True).actions) == 4
    assert etcd_restore.restore(SHA, 7, 1.0, check=True)[0].actions == ["restore etcd"]
    assert machine.steps == 0


@pytest.mark.parametrize(
    "manifest",
    ["", ETCD.replace("control-1", "$(reboot)"), ETCD.replace("https://10.0.0.1:2380", "https://a,b=c"), ETCD[:60]],
)
def test_a_manifest_that_is_not_kubeadm_s_is_refused(manifest: str) -> None:
    with pytest.raises(MachineProblem, match="no name, peer address or image"):
        etcd_restore.pod("x", manifest, "/a", "/b")


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
    etcd_restore._verify(7, 1.0)
    assert api.deleted[0] == "gpunodes-machine-gpu-1", "locks of the time of the backup are released"
    assert api.deleted[1].startswith("gpunodes-restored-")
    api.follows = False
    with pytest.raises(MachineProblem, match="no controller follows"):
        etcd_restore._verify(7, 0.05)
    assert api.deleted[-1].startswith("gpunodes-restored-"), "the probe is deleted in any case"


def test_a_revision_that_was_not_raised_is_a_problem(api: Api) -> None:
    assert api
    with pytest.raises(MachineProblem, match="above revision"):
        etcd_restore._verify(8, 1.0)


def test_an_api_that_is_not_ready_yet_is_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([ApiError(0, "refused"), ApiError(503, "starting")])
    get = api.get

    def starting(path: str, **query: str) -> Any:
        if path.endswith("replicasets") and (error := next(calls, None)):
            raise error
        return get(path, **query)

    monkeypatch.setattr(api, "get", starting)
    etcd_restore._verify(7, 1.0)


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
        etcd_upload.main({"size": len(DATA), "sha256": SHA, "ca_hash": HASH, **options})
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
    peer = "http://127.0.0.1:1"
    text = ETCD.replace("https://10.0.0.1:2380", peer)
    spec = etcd_restore.pod("x", text, str(tmp_path / "snapshot.db"), str(tmp_path / "two/data"))["spec"]
    (tmp_path / "two").mkdir()
    command = spec["containers"][0]["command"]
    subprocess.run([str(found / command[0]), *command[1:]], check=True, capture_output=True)
    shutil.copytree(folder / "pki", tmp_path / "two/pki")
    with etcd_member.running(tmp_path / "two") as member:
        monkeypatch.setattr(containers, "execute", member.execute)
        assert member.etcdctl("get", "/registry/namespaces/a", "--print-value-only").strip() == "there"
        now = etcd_snapshot.status()
        assert now["revision"] >= about["revision"] + etcd_restore.BUMP
        assert [each["name"] for each in now["members"]] == ["control-1"]
        reported = etcd_snapshot.members()
        assert [(each["leader"], each["learner"]) for each in reported["members"]] == [(True, False)]
        # A watcher that knows an old revision must learn that it is gone, and list everything again.
        watch = ["etcdctl", f"--endpoints=https://127.0.0.1:{member.port}", f"--cacert={member.folder}/pki/ca.crt"]
        watch += [f"--cert={member.folder}/pki/server.crt", f"--key={member.folder}/pki/server.key"]
        done = member.execute("", [*watch, "watch", "/registry", "--prefix", "--rev=3"], 20)
        assert "compacted" in done.text
