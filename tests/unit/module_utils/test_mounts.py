"""A reset never deletes data on mounts: tested with real mounts in a mount namespace.

Each test is a script in that namespace. Its /etc, /run and /var/lib are empty, so that it cannot change the local
machine; its output is JSON.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import disk, tree
from gpunodes.ansible.module_utils.problem import MachineProblem

NAMESPACE = ["unshare", "--mount", "--net", "--propagation=private", *(["--map-root-user"] if os.geteuid() else [])]

SETUP = """
import json, os, pathlib, subprocess, sys
from gpunodes.ansible.module_utils import firewall, kubeconfig, ledger, packages, tree, undo
from gpunodes.ansible.module_utils.host import services
from gpunodes.ansible.module_utils.kubeadm import reset
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult, run

for folder in ("/etc", "/run", "/var/lib"):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)

calls = []
def only_mounts(argv, *rest, **options):
    calls.append(" ".join(argv))
    return run(argv, *rest, **options) if argv[0] == "umount" else CommandResult(argv, 0, "", "")
reset.run = undo.run = only_mounts
states = {}
services.states = lambda names: states
firewall.clean = firewall.remove_empty_tables = lambda *_: None

def make(path, text="precious"):
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)

def mount(*arguments):
    os.makedirs(arguments[-1], exist_ok=True)
    subprocess.run(["mount", *arguments], check=True)

def save_ledger(*directories):
    found = ledger.Ledger(kubeadm="join done")
    found.note_directories(directories)
    found.save()

def error(function):
    try:
        function()
    except MachineProblem as problem:
        return str(problem)
    return ""

def hold(folder):
    return subprocess.Popen(["sleep", "100"], cwd=folder)

def report(**facts):
    existing = [str(path) for path in map(pathlib.Path, facts.pop("paths", ())) if path.exists()]
    print(json.dumps({**facts, "existing": existing, "calls": calls}))
"""

NFS = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~nfs/data"


def in_namespace(script: str) -> dict[str, Any]:
    """Run a script in a mount namespace; its output."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts need root, or unprivileged user namespaces")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", SETUP + script], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_busy_volume_below_the_kubelet_folder_survives_a_reset() -> None:
    """A reset that cannot unmount a pod's volume refuses before it removes anything, and names mount and process."""
    found = in_namespace(f"""
make("/etc/kubernetes/kubelet.conf")
make("/etc/kubernetes/admin.conf")
make("/var/lib/etcd/member/wal")
save_ledger("/var/lib/kubelet")
mount("-t", "tmpfs", "server:/export", "{NFS}")
make("{NFS}/data")
user = hold("{NFS}")
refused = error(reset.reset)
survived = os.path.exists("{NFS}/data")
kept = os.path.exists("/etc/kubernetes/kubelet.conf") and os.path.exists("/var/lib/etcd/member/wal")
user.kill(); user.wait()
again = error(reset.reset)
report(refused=refused, survived=survived, kept=kept, again=again, pid=user.pid,
     paths=["/var/lib/kubelet", "/etc/kubernetes", "/var/lib/etcd"], removed=reset.remains())
""")
    assert found["survived"]
    assert found["kept"]
    assert f"{NFS} (server:/export) is mounted and used by sleep ({found['pid']})" in found["refused"]
    assert "umount" in found["refused"]
    assert (found["again"], found["existing"], found["removed"]) == ("", [], [])
    assert not [call for call in found["calls"] if "lazy" in call or "kubeadm reset" in call]


def test_the_load_balancer_ends_by_itself_before_the_pods_are_removed() -> None:
    """It takes its addresses from the network card only then: another node has them soon."""
    found = in_namespace("""
make("/etc/kubernetes/kubelet.conf")
make("/run/containerd/containerd.sock", "")
save_ledger("/var/lib/kubelet")
others = reset.run
def listed(argv, *rest, **options):
    done = others(argv, *rest, **options)
    return CommandResult(argv, 0, "0a1b\\n2c3d\\n", "") if "ps" in argv else done
reset.run = listed
report(error=error(reset.reset))
""")
    own = [call.partition("containerd.sock ")[2] for call in found["calls"] if call.startswith("crictl ")]
    assert (own, found["error"]) == (
        [
            "ps --quiet --label=io.kubernetes.pod.namespace=kube-vip",
            "--timeout=60s stop --timeout=25 0a1b 2c3d",
            "--timeout=30s rmp --force --all",
        ],
        "",
    )


def test_machine_that_others_joined_is_reset_only_if_it_leaves_its_own_cluster() -> None:
    """An interrupted reset goes on, although the CA that allowed it is gone."""
    found = in_namespace("""
make("/etc/kubernetes/pki/ca.crt", "ours")
make("/etc/kubernetes/kubelet.conf", "broken")
make("/etc/kubernetes/admin.conf", "broken")
make("/var/lib/etcd/member")
kubeconfig.ca_hash = lambda text: f"sha256:{text}"
kubeconfig.load = lambda path: None
refused = [error(reset.remains), error(lambda: reset.remains("sha256:another"))]
removed = reset.remains("sha256:ours")
trees = tree.remove
def stop(path, **options):
    if path == "/etc/kubernetes":
        os.unlink("/etc/kubernetes/pki/ca.crt")
        raise MachineProblem("interrupted", "", "")
    trees(path, **options)
tree.remove = stop
stopped = error(reset.reset)
tree.remove = trees
left = reset.remains()
reset.reset()
report(refused=refused, removed=removed, stopped=stopped, left=left, end=reset.remains(),
    paths=["/var/lib/etcd/member"])
""")
    assert all("gpunodes did not create it" in each for each in found["refused"])
    assert {"/etc/kubernetes", "/var/lib/etcd"} <= set(found["removed"])
    assert "interrupted" in found["stopped"]
    assert (found["left"], found["end"], found["existing"]) == (["/etc/kubernetes"], [], [])


def test_data_of_a_users_own_etcd_survives_a_join_and_a_reset() -> None:
    """It was there before gpunodes, and the machine is no control plane: its folder is not kubeadm's."""
    found = in_namespace("""
make("/var/lib/etcd/member/wal")
make("/var/lib/etcd/default/member/wal")
before = reset.leftovers()
ledger.Ledger(kubeadm="join done").save()
make("/etc/kubernetes/kubelet.conf")
mount("-t", "tmpfs", "disk", "/var/lib/etcd/default")
make("/var/lib/etcd/default/member/wal")
listed = reset.remains()
report(before=before, listed=listed, refused=error(reset.reset),
    paths=["/var/lib/etcd/member/wal", "/var/lib/etcd/default/member/wal", "/etc/kubernetes"])
""")
    assert (found["before"], found["listed"], found["refused"]) == ([], ["/etc/kubernetes"], "")
    assert found["existing"] == ["/var/lib/etcd/member/wal", "/var/lib/etcd/default/member/wal"]


def test_files_of_a_user_survive_attempts_that_fail_and_a_reset() -> None:
    """A CA, which kubeadm uses, and a file of another program: kubeadm did not write them."""
    found = in_namespace("""
from gpunodes.ansible.module_utils.kubeadm import command, init
paths = ["/etc/kubernetes/pki/ca.crt", "/etc/kubernetes/pki/ca.key", "/etc/kubernetes/cloud.conf"]
for path in paths:
    make(path)
firewall.tables = lambda: []
def fail(*_, **__):
    make("/etc/kubernetes/pki/apiserver.crt")
    make("/etc/kubernetes/bootstrap-kubelet.conf")
    make("/etc/kubernetes/gpunodes/audit.yaml")
    raise MachineProblem("kubeadm failed", "", "")
command.run = fail
def attempt():
    planned = init.init([], {}, {}, 60, check=True).actions
    failure = error(lambda: init.init([], {}, {}, 60, check=False))
    return planned, failure, [path for path in paths if os.path.exists(path)]
attempts = [attempt(), attempt()]
listed = reset.remains()
reset.reset()
left = [reset.remains()]
ledger.remove()
left.append(reset.remains())
report(attempts=attempts, listed=listed, left=left, paths=[*paths, "/etc/kubernetes/pki/apiserver.crt",
    "/etc/kubernetes/bootstrap-kubelet.conf", "/etc/kubernetes/gpunodes"])
""")
    paths = ["/etc/kubernetes/pki/ca.crt", "/etc/kubernetes/pki/ca.key", "/etc/kubernetes/cloud.conf"]
    again = ["reset an interrupted kubeadm init", "kubeadm init"]
    failed = "kubeadm failed"
    assert [actions for actions, *_ in found["attempts"]] == [["kubeadm init"], again]
    assert all(failed in error and left == paths for _, error, left in found["attempts"])
    assert (found["listed"], found["left"]) == (["/etc/kubernetes"], [[], []])
    assert found["existing"] == paths


def test_a_control_plane_is_not_made_beside_a_users_own_etcd() -> None:
    """kubeadm would fail at its data, and the next attempt would take it for that of the first."""
    found = in_namespace("""
from gpunodes.ansible.module_utils.kubeadm import init
make("/var/lib/etcd/default/member/wal")
refused = [error(lambda: init.init([], {}, {}, 60, check=check)) for check in (True, False)]
report(refused=refused, progress=ledger.load().kubeadm, paths=["/var/lib/etcd/default/member/wal"])
""")
    assert all("/var/lib/etcd has files" in each for each in found["refused"])
    assert (found["progress"], found["existing"]) == ("", ["/var/lib/etcd/default/member/wal"])


def test_other_files_survive_the_reset_of_a_machine_that_others_joined() -> None:
    """What kubeadm writes is removed, links are not followed, and a refused reset takes nothing over."""
    found = in_namespace("""
make("/etc/kubernetes/pki/ca.crt", "ours")
make("/etc/kubernetes/kubelet.conf", "broken")
make("/etc/kubernetes/agent/settings/agent.conf")
os.symlink("/etc/kubernetes/pki", "/etc/kubernetes/agent/pki")
kubeconfig.ca_hash = lambda text: f"sha256:{text}"
kubeconfig.load = lambda path: None
mount("-t", "tmpfs", "disk", "/etc/kubernetes/manifests/disk")
refused = error(reset.reset)
progress = ledger.load().kubeadm
subprocess.run(["umount", "/etc/kubernetes/manifests/disk"], check=True)
reset.remains("sha256:ours")
reset.reset()
report(refused=refused, progress=progress, left=reset.remains(), linked=os.path.islink("/etc/kubernetes/agent/pki"),
    paths=["/etc/kubernetes/agent/settings/agent.conf", "/etc/kubernetes/pki", "/etc/kubernetes/manifests"])
""")
    assert "is mounted" in found["refused"]
    assert (found["progress"], found["left"], found["linked"]) == ("", [], True)
    assert found["existing"] == ["/etc/kubernetes/agent/settings/agent.conf"]


def test_the_ca_of_the_cluster_that_a_machine_leaves_does_not_stay() -> None:
    """Also if the user made it: the cluster goes on without this machine. A join of it finds no CA in its way."""
    found = in_namespace("""
from gpunodes.ansible.module_utils.kubeadm import command, join
kubeconfig.ca_hash = lambda text: f"sha256:{text}"
kubeconfig.load = lambda path: None
firewall.tables = lambda: []
pki = ["/etc/kubernetes/pki/ca.crt", "/etc/kubernetes/pki/ca.key"]
for path in (*pki, "/etc/kubernetes/cloud.conf"):
    make(path, "ours")
ledger.Ledger(kubeadm="init done", given=[*pki, "/etc/kubernetes/cloud.conf"]).save()
make("/etc/kubernetes/admin.conf")
trees = tree.remove
def stop(path, **options):
    os.unlink(pki[0])
    raise MachineProblem("interrupted", "", "")
tree.remove = stop
stopped = error(lambda: reset.reset("sha256:ours"))
tree.remove = trees
listed = reset.remains()
reset.reset()
ledger.remove()
keys = [path for path in pki if os.path.exists(path)]
make(pki[0], "ours")
alone = reset.remains("sha256:ours"), reset.remains("sha256:another"), reset.remains()
seen = []
def run_kubeadm(*_, **__):
    seen.append(os.path.exists(pki[0]))
    raise MachineProblem("kubeadm failed", "", "")
command.run = run_kubeadm
failed = error(lambda: join.join("10.0.0.1:6443", "a.b", "sha256:ours", False, {}, 60, False))
report(stopped=stopped, listed=listed, keys=keys, alone=alone, seen=seen, failed=failed,
    paths=["/etc/kubernetes/cloud.conf", *pki])
""")
    assert "interrupted" in found["stopped"]
    assert (found["listed"], found["keys"]) == (["/etc/kubernetes"], [])
    assert found["alone"] == [["/etc/kubernetes"], [], []]
    assert (found["seen"], "kubeadm failed" in found["failed"]) == ([False], True)
    assert found["existing"] == ["/etc/kubernetes/cloud.conf"]


def test_running_kubelet_blocks_a_reset() -> None:
    """A running kubelet could mount again: nothing is removed."""
    found = in_namespace("""
make("/etc/kubernetes/kubelet.conf")
states["kubelet"] = {"enabled": True, "active": True}
report(refused=error(reset.reset), paths=["/etc/kubernetes/kubelet.conf"])
""")
    assert "the kubelet does not stop" in found["refused"]
    assert found["existing"] == ["/etc/kubernetes/kubelet.conf"]


def test_mounts_of_the_kubelet_are_unmounted_whatever_their_names() -> None:
    """That includes stacked mounts and names with spaces; a disk that existed before gpunodes stays mounted."""
    found = in_namespace("""
mount("-t", "tmpfs", "disk", "/var/lib/kubelet")
make("/var/lib/kubelet/lost+found/x")
for folder in ("/var/lib/kubelet/pods/a/volumes/token", "/var/lib/kubelet/pods/a b\\\\c/d"):
    for _ in range(2):
        mount("-t", "tmpfs", "tmpfs", folder)
        make(f"{folder}/secret")
mount("--bind", "/var/lib/kubelet/pods/a", "/var/lib/kubelet/subpath")
refused = error(reset.reset)
report(refused=refused, left=sorted(os.listdir("/var/lib/kubelet")), mounted=os.path.ismount("/var/lib/kubelet"),
     removed=reset.remains() if ledger.load().kubeadm else [])
""")
    assert (found["refused"], found["left"], found["mounted"], found["removed"]) == ("", ["lost+found"], True, [])


def test_disk_that_is_mounted_on_a_created_folder_survives() -> None:
    """A mount on a folder that gpunodes created is newer and belongs to another user."""
    found = in_namespace("""
save_ledger("/var/lib/etcd")
mount("-t", "tmpfs", "backup", "/var/lib/etcd")
make("/var/lib/etcd/data")
report(refused=error(reset.reset), dry_run=error(reset.remains), paths=["/var/lib/etcd/data"])
""")
    assert "/var/lib/etcd (backup) is mounted" in found["refused"]
    assert found["dry_run"] == found["refused"]
    assert found["existing"] == ["/var/lib/etcd/data"]


@pytest.mark.parametrize("kind", [("-t", "tmpfs", "server:/export"), ("--bind", "/var/lib/elsewhere")])
@pytest.mark.parametrize("folder", ["/var/lib/docker", "/opt-of-ours"])
def test_busy_mount_in_a_folder_of_the_ledger_survives(kind: tuple[str, ...], folder: str) -> None:
    """In Docker's volumes and any other folder, no mount is emptied, neither of another device nor of the same."""
    point = f"/var/lib{folder}/volumes/v/_data" if folder.startswith("/opt") else f"{folder}/volumes/v/_data"
    root = point.partition("/volumes")[0]
    found = in_namespace(f"""
os.makedirs("/var/lib/elsewhere")
make("{root}/ours")
mount(*{kind!r}, "{point}")
make("{point}/data")
save_ledger("{root}")
user = hold("{point}")
refused = error(undo.Undoer().run)
survived = os.path.exists("{point}/data") and os.path.exists("{root}/ours")
dry_run = error(undo.Undoer(check=True).run)
user.kill(); user.wait()
subprocess.run(["umount", "{point}"], check=True)
again = error(undo.Undoer().run)
report(refused=refused, survived=survived, dry_run=dry_run, again=again, paths=["{root}", ledger.PATH])
""")
    assert found["survived"]
    assert point in found["refused"]
    assert "sleep" in found["refused"]
    assert point in found["dry_run"], "a dry run reports it, too"
    assert (found["again"], found["existing"]) == ("", [])


@pytest.mark.parametrize("path", ["/opt-of-ours", "/var/lib/docker"])
def test_disk_that_is_mounted_while_packages_are_purged_survives(path: str) -> None:
    """Purging takes minutes: a disk that is mounted in that time is not emptied."""
    folder = f"/var/lib{path}" if path.startswith("/opt") else path
    found = in_namespace(f"""
make("{folder}/ours")
save_ledger("{folder}")
undo.Undoer._files = lambda self: (mount("-t", "tmpfs", "backup", "{folder}"), make("{folder}/data"))
report(refused=error(undo.Undoer().run), paths=["{folder}/data"])
""")
    assert f"{folder} is a mount point" in found["refused"]
    assert found["existing"] == [f"{folder}/data"]


def test_disk_that_is_mounted_during_a_reset_survives() -> None:
    """The same for the folders of kubeadm, between the check and the removal."""
    found = in_namespace("""
from gpunodes.ansible.module_utils import tree
make("/etc/kubernetes/kubelet.conf")
save_ledger("/var/lib/etcd")
remove = tree.remove
def slow(path, **options):
    if path == "/var/lib/etcd":
        mount("-t", "tmpfs", "backup", path)
        make(f"{path}/data")
    remove(path, **options)
tree.remove = slow
report(refused=error(reset.reset), paths=["/var/lib/etcd/data"])
""")
    assert "/var/lib/etcd is a mount point" in found["refused"]
    assert found["existing"] == ["/var/lib/etcd/data"]


def test_mount_behind_a_link_is_found() -> None:
    """/lib is a link on most systems: a folder may have another name in mountinfo than in the ledger."""
    found = in_namespace("""
os.makedirs("/var/lib/usr/updates")
os.symlink("/var/lib/usr", "/var/lib/link")
save_ledger("/var/lib/link/updates")
mount("-t", "tmpfs", "backup", "/var/lib/usr/updates")
make("/var/lib/usr/updates/data")
report(refused=error(undo.Undoer().run), paths=["/var/lib/usr/updates/data"])
""")
    assert "/var/lib/usr/updates (backup) is mounted" in found["refused"]
    assert found["existing"] == ["/var/lib/usr/updates/data"]


@pytest.mark.parametrize("character", ["\\u2028", "\\x0b", "\\r", "\\x85", "\\x1c", " ", "\\n", "\\\\", "\\udcff"])
def test_mount_may_have_any_name(character: str) -> None:
    """Users who start pods choose names in mountinfo; the kernel escapes only line feeds there."""
    found = in_namespace(f"""
from gpunodes.ansible.module_utils import tree
point = "/var/lib/ours/a{character}b"
mount("-t", "tmpfs", "x", point)
make("/var/lib/others/file")
tree.remove("/var/lib/others")
found = [each.point for each in tree.below(["/var/lib/ours"])]
report(refused=error(lambda: tree.check_unmounted(["/var/lib/ours"])), same=found == [point], paths=["/var/lib/others"])
""")
    assert found["same"]
    assert "is mounted" in found["refused"]
    assert found["refused"].isprintable()
    assert found["existing"] == []


def test_network_of_another_container_engine_stays() -> None:
    """podman and nerdctl keep their networks in the same folder."""
    found = in_namespace("""
make("/etc/kubernetes/kubelet.conf")
make("/var/lib/cni/networks/podman/10.88.0.2")
make("/var/lib/cni/networks/cbr0/10.244.1.2")
make("/var/lib/cni/flannel/x")
save_ledger("/var/lib/cni")
report(refused=error(reset.reset), paths=["/var/lib/cni/networks/podman/10.88.0.2", "/var/lib/cni/networks/cbr0"])
""")
    assert (found["refused"], found["existing"]) == ("", ["/var/lib/cni/networks/podman/10.88.0.2"])


@pytest.mark.parametrize(("module", "stays"), [("zfs", True), ("nvidia", False)])
def test_other_modules_of_dkms_stay(module: str, stays: bool) -> None:
    """The driver installation creates the folder of DKMS; a user may have built another module there since."""
    found = in_namespace(f"""
make("/var/lib/dkms/{module}/2.2.2/source")
make("/var/lib/dkms/dkms_dbversion")
save_ledger("/var/lib/dkms")
report(refused=error(undo.Undoer().run), paths=["/var/lib/dkms/{module}/2.2.2/source"])
""")
    assert (found["refused"], bool(found["existing"])) == ("", stays)


@pytest.mark.parametrize(("created", "action"), [(True, "purge"), (False, "remove")])
def test_existing_docker_data_is_not_purged(created: bool, action: str) -> None:
    """The scripts of docker.io empty /var/lib/docker when the package is purged."""
    found = in_namespace(f"""
class Apt:
    def finish_interrupted(self): pass
    def installed(self, names): return {{name: packages.PackageState("1", held=False) for name in names}}
    def removals(self, names): return names
    def purge(self, names): calls.append("purge " + " ".join(names))
    def remove(self, names): calls.append("remove " + " ".join(names))
packages.detect = Apt
found = ledger.Ledger()
found.packages += ["docker.io", "runc"]
found.note_directories(["/var/lib/docker"] if {created} else [])
found.save()
make("/var/lib/docker/volumes/v/_data/data")
report(refused=error(undo.Undoer().run))
""")
    assert found["refused"] == ""
    assert [call for call in found["calls"] if "docker.io" in call] == [
        f"{action} docker.io{' runc' if created else ''}"
    ]
    assert [call for call in found["calls"] if "runc" in call] == [f"purge {'docker.io ' if created else ''}runc"]


def test_concurrent_deletion_is_not_an_error(tmp_path: Path) -> None:
    """A container that ends removes its folders, too."""
    folder = tmp_path / "busy"
    for name in range(300):
        (folder / f"{name}/sub").mkdir(parents=True)
    other = subprocess.Popen(["rm", "-rf", *map(str, folder.iterdir())])
    tree.remove(str(folder))
    other.wait()
    assert not folder.exists()


def test_folder_that_is_still_written_to_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with a message."""
    (tmp_path / "busy/1").mkdir(parents=True)
    monkeypatch.setattr(tree, "_LIMIT_S", -1)
    removed = tree._removed

    def writes(name: str, parent: int) -> bool:
        (tmp_path / f"busy/{int(name) + 1}").mkdir()
        return removed(name, parent)

    monkeypatch.setattr(tree, "_removed", writes)
    with pytest.raises(MachineProblem, match="busy cannot be removed: it is still written to"):
        tree.remove(str(tmp_path / "busy"))


def test_folder_that_nobody_writes_to_may_take_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of files on a slow disk were "still written to" after 600 s."""
    for name in range(tree._RESCANS + 20):
        (tmp_path / f"full/{name}/sub").mkdir(parents=True)
    (tmp_path / "full/0/kept").mkdir()
    monkeypatch.setattr(tree, "_LIMIT_S", -1)
    tree.remove(str(tmp_path / "full"), kept=[str(tmp_path / "full/0/kept")])
    assert [path.name for path in (tmp_path / "full").rglob("*")] == ["0", "kept"]
    tree.remove(str(tmp_path / "full"))
    assert not (tmp_path / "full").exists()


def test_target_of_a_link_survives() -> None:
    """Links in a folder are removed, never followed."""
    found = in_namespace("""
make("/var/lib/elsewhere/data")
make("/var/lib/ours/file")
os.symlink("/var/lib/elsewhere", "/var/lib/ours/link")
save_ledger("/var/lib/ours")
report(refused=error(undo.Undoer().run), paths=["/var/lib/ours", "/var/lib/elsewhere/data"])
""")
    assert (found["refused"], found["existing"]) == ("", ["/var/lib/elsewhere/data"])


@pytest.mark.parametrize("kind", [("-t", "tmpfs", "x"), ("--bind", "/var/lib/elsewhere")])
def test_mount_after_the_check_survives(kind: tuple[str, ...]) -> None:
    """The removal checks every folder again and does not enter a mount that is newer than the first check."""
    found = in_namespace(f"""
from gpunodes.ansible.module_utils import tree
os.makedirs("/var/lib/elsewhere")
mount(*{kind!r}, "/var/lib/ours/a/b")
make("/var/lib/ours/a/b/data")
report(refused=error(lambda: tree.remove("/var/lib/ours")), paths=["/var/lib/ours/a/b/data"])
""")
    assert "/var/lib/ours/a/b is a mount point" in found["refused"]
    assert found["existing"] == ["/var/lib/ours/a/b/data"]


def test_link_in_place_of_a_folder_is_emptied_and_stays() -> None:
    """/var/lib/kubelet may be a link to another disk: mounts below it are found there."""
    found = in_namespace("""
os.makedirs("/var/lib/data/kubelet")
os.symlink("/var/lib/data/kubelet", "/var/lib/kubelet")
make("/var/lib/data/kubelet/config.yaml")
mount("-t", "tmpfs", "x", "/var/lib/data/kubelet/pods/v")
user = hold("/var/lib/data/kubelet/pods/v")
make("/var/lib/data/kubelet/pods/v/data")
refused = error(reset.reset)
survived = os.path.exists("/var/lib/data/kubelet/pods/v/data")
user.kill(); user.wait()
report(refused=refused, survived=survived, again=error(reset.reset), left=os.listdir("/var/lib/kubelet"))
""")
    assert "/var/lib/data/kubelet/pods/v" in found["refused"]
    assert found["survived"]
    assert (found["again"], found["left"]) == ("", [])


def test_only_one_module_removes_folders() -> None:
    """Code that runs on machines removes folders only with ``tree.remove``."""
    ansible = Path(tree.__file__).parents[1]
    found = [
        path.name
        for path in ansible.rglob("*.py")
        if re.search(r"rmtree|removedirs|\brm['\",\s]+-[a-zA-Z]*[rR]|[\s'\"]-delete\b", path.read_text())
    ]
    assert found == []


def test_deep_folder_is_removed(tmp_path: Path) -> None:
    """Pods may leave any folders: here 3,000 nested ones."""
    folder = tmp_path / "deep"
    folder.mkdir()
    current = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=current)
        child = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = child
    os.close(current)
    try:
        tree.remove(str(folder))
        assert not folder.exists()
        tree.remove(str(folder))
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # too deep for pytest's own cleanup


def test_process_that_ends_during_the_search_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the name of a process that has just ended fails with ESRCH, not with "no such file"."""

    def read(path: str) -> str:
        raise ProcessLookupError(3, "No such process", path)

    monkeypatch.setattr(disk, "read", read)
    assert any(user.startswith("? (") for user in tree.users(str(Path.cwd())))


def test_remedy_for_a_mount_is_quoted_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user chose the name of the folder: it must not escape from the quotes of the suggested command."""
    mount = tree.Mount("/var/lib/x/a'; reboot; '", "tmpfs")
    monkeypatch.setattr(tree, "below", lambda _: [mount])
    monkeypatch.setattr(tree, "_mounts", list)
    monkeypatch.setattr(tree, "users", lambda _: [])
    with pytest.raises(MachineProblem) as message:
        tree.check_unmounted(["/var/lib/x"])
    command = re.search(r"`(umount .*)`", str(message.value))
    assert command
    assert shlex.split(command.group(1)) == ["umount", mount.point]
    unprintable = "/var/lib/x/a\x1b[31m'\u2028"
    monkeypatch.setattr(tree, "below", lambda _: [tree.Mount(unprintable, "tmpfs")])
    with pytest.raises(MachineProblem) as message:
        tree.check_unmounted(["/var/lib/x"])
    command = re.search(r"`umount (.*)`", str(message.value))
    assert command
    assert str(message.value).isprintable()
    echoed = subprocess.run(["bash", "-c", f"printf %s {command.group(1)}"], capture_output=True, check=True, text=True)
    assert echoed.stdout == unprintable
