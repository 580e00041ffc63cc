"""Shared folders, mounts of NFS, and the verification of claims."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api, ledger, nfs_clients, nfs_mounts, shared_folders
from gpunodes.ansible.module_utils.cluster import storage
from gpunodes.ansible.module_utils.problem import MachineProblem

MOUNTS = """\
proc /proc proc rw 0 0
10.0.0.5:/srv/training /var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/gpunodes-training.default nfs4 rw,vers=4.2 0 0
10.0.0.5:/srv/training/sub /mnt/sub nfs4 rw 0 0
10.0.0.5:/srv/training2 /mnt/other nfs4 rw 0 0
nas-1.example:/srv/scratch /mnt/named nfs4 rw,clientaddr=10.0.0.7,local_lock=none,addr=10.0.0.5 0 0
/dev/vda1 /srv/training ext4 rw 0 0
"""


@pytest.fixture(autouse=True)
def owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The owners that folders got: only root can give them."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(os, "fchown", lambda _, user, group: found.append((user, group)))
    return found


def test_missing_folders_are_created_for_everyone_and_removed_while_empty(
    tmp_path: Path, owners: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "srv/team/training"
    assert shared_folders.create([str(folder)], check=True).actions == [f"create {folder}"]
    assert not folder.exists()
    assert shared_folders.create([str(folder)], check=False).actions
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755
    assert owners.count((65534, 65534)) == 1, "of the innermost folder: the user that root of a pod is"
    assert not shared_folders.create([str(folder)], check=False).actions
    would = shared_folders.remove(check=True).actions
    assert folder.exists()
    assert shared_folders.remove(check=False).actions == would
    assert not (tmp_path / "srv").exists()
    assert shared_folders.remove(check=False).actions == []


def test_a_folder_with_a_file_and_one_that_existed_stay(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir(0o750)
    new = tmp_path / "new"
    shared_folders.create([str(old), str(new)], check=False)
    assert stat.S_IMODE(old.stat().st_mode) == 0o750
    (new / "data").write_text("x")
    assert shared_folders.remove(check=False).actions == []
    assert (new / "data").read_text() == "x"
    assert old.is_dir()


def test_a_link_or_a_file_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "file").write_text("")
    for path, found in (("link", "is a link"), ("file", "is no folder"), ("link/sub", "is a link")):
        with pytest.raises(MachineProblem, match=found):
            shared_folders.create([str(tmp_path / path)], check=False)
    with pytest.raises(MachineProblem, match="cannot be shared"):
        shared_folders.create(["/srv/../etc"], check=False)


def test_a_link_in_the_place_of_a_new_shared_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns its parent may put one there after the folder was made."""
    victim, folder = tmp_path / "etc", tmp_path / "share"
    victim.mkdir(mode=0o755)
    make = os.mkdir

    def replaced(path: str, mode: int = 0o777) -> None:
        if path.startswith(str(folder)):
            Path(path).symlink_to(victim)
        else:
            make(path, mode)

    monkeypatch.setattr(os, "mkdir", replaced)
    with pytest.raises(OSError, match="share"):
        shared_folders.create([str(folder)], check=False)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_is_killed_before_a_folder_has_its_mode_leaves_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The next one kept the folder, as root's and closed: users of pods could not write."""
    folder = tmp_path / "srv/share"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shared_folders, "_open_to_all", killed)
        with pytest.raises(KeyboardInterrupt):
            shared_folders.create([str(folder)], check=False)
    assert (tmp_path / "srv").exists()
    if goes_on:
        shared_folders.create([str(folder)], check=False)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
        assert [each.name for each in folder.parent.iterdir()] == ["share"]
    shared_folders.remove(check=False)
    assert not (tmp_path / "srv").exists()


def test_mounts_of_a_share_and_of_folders_in_it_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = nfs_mounts.mounted(MOUNTS, ["10.0.0.5:/srv/training"])
    assert [source for source, _ in found] == ["10.0.0.5:/srv/training", "10.0.0.5:/srv/training/sub"]
    assert nfs_mounts.mounted(MOUNTS, ["10.0.0.6:/srv/training"]) == []
    assert len(nfs_mounts.mounted(MOUNTS, ["10.0.0.5:/"])) == 4
    for share in ("10.0.0.5:/srv/scratch", "nas-1.example:/srv/scratch"):
        assert [source for source, _ in nfs_mounts.mounted(MOUNTS, [share])] == ["nas-1.example:/srv/scratch"]
    assert nfs_mounts.mounted(MOUNTS, ["10.0.0.7:/srv/scratch"]) == [], "the address of the client"
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(nfs_mounts, "MOUNTS", str(tmp_path / "mounts"))
    with pytest.raises(MachineProblem, match=r"10\.0\.0\.5:/srv/training is mounted on /var/lib/kubelet.* and 1 more"):
        nfs_mounts.check_unmounted(["10.0.0.5:/srv/training"], 0)
    nfs_mounts.check_unmounted(["10.0.0.5:/srv/nothing"], 0)


@pytest.fixture
def nfsd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's clients of NFS 4, and a port that is served here."""
    monkeypatch.setattr(nfs_clients, "NFSD", str(tmp_path / "clients"))
    monkeypatch.setattr(nfs_clients, "PORT", 0)
    return tmp_path / "clients"


def client(nfsd: Path, number: int, address: str, status: str) -> None:
    (nfsd / str(number)).mkdir(parents=True)
    lines = ["clientid: 0x4f0b7e2c", f'address: "{address}"', status, 'name: "Linux NFSv4.2 w1"', "minor version: 2"]
    (nfsd / str(number) / "info").write_text("\n".join(each for each in lines if each) + "\n")


def test_clients_of_nfs_4_count_until_their_lease_ends(nfsd: Path) -> None:
    assert nfs_clients.clients() == []
    nfs_clients.check_unused(0)
    client(nfsd, 3, "10.0.0.7:812", "status: confirmed")
    client(nfsd, 4, "10.0.0.8:812", "status: courtesy")
    client(nfsd, 5, "[fd00::9]:812", "")
    client(nfsd, 6, "{{ x }}:812", "status: confirmed")
    assert nfs_clients.clients() == ["10.0.0.7", "fd00::9"]
    with pytest.raises(MachineProblem, match=r"10\.0\.0\.7, fd00::9 use the NFS server of this machine") as raised:
        nfs_clients.check_unused(0)
    assert "or wait if nothing is mounted" in raised.value.problem.remedy


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.usefixtures("nfsd")
def test_whoever_is_connected_uses_the_server(monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily) -> None:
    """Also one outside the cluster, and one that NFS 3 leaves without state. The kernel's own tables."""
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family is socket.AF_INET6) as server:
        monkeypatch.setattr(nfs_clients, "PORT", server.getsockname()[1])
        assert nfs_clients.clients() == []
        with socket.create_connection(("127.0.0.1", nfs_clients.PORT)):
            accepted = server.accept()[0]
            assert nfs_clients.clients() == ["127.0.0.1"]
            with pytest.raises(MachineProblem, match=r"127\.0\.0\.1 uses the NFS server"):
                nfs_clients.check_unused(0)
        accepted.close()
        nfs_clients.check_unused(5)


@pytest.mark.parametrize(
    ("packages", "active", "removed"),
    [(["nfs-kernel-server"], False, True), ([], False, True), ([], True, False), ([], None, False)],
)
def test_a_server_that_was_there_before_is_not_looked_at(
    packages: list[str], active: bool | None, removed: bool
) -> None:
    found = ledger.Ledger(packages=packages)
    if active is not None:
        found.note_service("nfs-server", {"active": active, "enabled": active})
    found.save(ledger.path_of("nfs_server"))
    assert nfs_clients.is_removed() is removed


def node(name: str, *, ready: bool = True, control: bool = False, cordoned: bool = False) -> dict[str, Any]:
    labels = {"node-role.kubernetes.io/control-plane": ""} if control else {}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class Cluster:
    """A cluster whose pods end at once; ``ends`` is the message of a failed pod by its verb."""

    def __init__(self, nodes: list[dict[str, Any]], phase: str = "Bound") -> None:
        self.nodes, self.phase = nodes, phase
        self.ends: dict[str, str] = {}
        self.pods: dict[str, Any] = {}
        self.started: list[Any] = []

    def get(self, path: str, **_: str) -> Any:
        return {"items": self.nodes if path.endswith("/nodes") else []}

    def find(self, path: str) -> Any:
        if "/persistentvolumeclaims/" in path:
            return {"status": {"phase": self.phase}} if self.phase else None
        return self.pods.get(path)

    def call(self, _: str, path: str, body: Any, *more: Any) -> Any:
        self.started.append(body)
        failed = next((text for verb, text in self.ends.items() if f"-{verb}-" in body["metadata"]["name"]), "")
        state = {"state": {"terminated": {"message": failed, "exitCode": 1}}}
        status = {"phase": "Failed", "containerStatuses": [state]} if failed else {"phase": "Succeeded"}
        self.pods[f"{path}/{body['metadata']['name']}"] = {**body, "status": status}
        return body

    def delete(self, path: str, **_: str) -> bool:
        return self.pods.pop(path, None) is not None


CLAIMS = [("default", "training"), ("ml", "training")]


def verified(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, image: str = "x") -> list[str]:
    monkeypatch.setattr(kube_api, "admin", lambda *_: cluster)
    return storage.verify(CLAIMS, image, 0.01 if cluster.phase != "Bound" else 5)


def test_one_node_writes_and_another_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(
        [node("c", control=True), node("w1"), node("w2"), node("w3", cordoned=True), node("w4", ready=False)]
    )
    assert verified(monkeypatch, cluster) == ["2 claims are bound", "training: w1 wrote, w2 read"]
    writer, reader = cluster.started
    assert (writer["spec"]["nodeName"], reader["spec"]["nodeName"]) == ("w1", "w2")
    assert writer["metadata"]["namespace"] == "default"
    token = writer["metadata"]["name"].rpartition("-")[2]
    assert f"echo {token} >/share/.gpunodes-{token}" in writer["spec"]["containers"][0]["command"][3]
    assert f"grep -qx {token} /share/.gpunodes-{token}" in reader["spec"]["containers"][0]["command"][3]
    assert not cluster.pods, "pods are deleted"


def test_what_cannot_be_verified_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = verified(monkeypatch, Cluster([node("w1")]))
    assert (
        one == "2 claims are bound; not verified that pods on two nodes write and read: 1 of 2 nodes are ready for them"
    )
    [none] = verified(monkeypatch, Cluster([node("w1"), node("w2")]), "")
    assert none.endswith("there is no image for them")
    denied = Cluster([node("w1"), node("w2")])
    denied.ends["write"] = "sh: can't create /share/x: Permission denied"
    assert "mounted on w1, where user 65532 may not write" in verified(monkeypatch, denied)[1]


def test_the_first_problem_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for phase, found in (("Pending", "the claim default/training is Pending"), ("", "is missing")):
        with pytest.raises(MachineProblem, match=found):
            verified(monkeypatch, Cluster([], phase))
    stale = Cluster([node("w1"), node("w2")])
    stale.ends["read"] = "grep: /share/x: No such file or directory"
    with pytest.raises(MachineProblem, match="a pod on w2 cannot read in the share training: grep"):
        verified(monkeypatch, stale)
    assert not stale.pods
