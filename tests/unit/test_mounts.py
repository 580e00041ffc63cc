"""What a reset may delete: real mounts, in a mount namespace of their own, that must outlive it.

Each test is a script in that namespace. Its /etc, /run and /var/lib are empty, so that nothing of this machine is
within its reach; what it prints is JSON.
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
from gpunodes.ansible.module_utils.gpunodes import disk, tree
from gpunodes.ansible.module_utils.gpunodes.problem import MachineProblem

NAMESPACE = ["unshare", "--mount", "--net", "--propagation=private", *(["--map-root-user"] if os.geteuid() else [])]

SETUP = """
import json, os, pathlib, subprocess, sys
from gpunodes.ansible.module_utils.gpunodes import firewall, kubeadm, ledger, packages, undo
from gpunodes.ansible.module_utils.gpunodes.problem import MachineProblem
from gpunodes.ansible.module_utils.gpunodes.process import CommandResult, run

for folder in ("/etc", "/run", "/var/lib"):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)

calls = []
def only_mounts(argv, *rest, **more):
    calls.append(" ".join(argv))
    return run(argv, *rest, **more) if argv[0] == "umount" else CommandResult(argv, 0, "", "")
kubeadm.run = undo.run = only_mounts
states = {}
kubeadm.host.service_states = lambda names: states
firewall.clean = firewall.remove_empty_tables = lambda *_: None

def make(path, text="precious"):
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)

def mount(*words):
    os.makedirs(words[-1], exist_ok=True)
    subprocess.run(["mount", *words], check=True)

def book(*directories):
    found = ledger.Ledger(kubeadm="join done")
    found.note_directories(directories)
    found.save()

def said(function):
    try:
        function()
    except MachineProblem as problem:
        return str(problem)
    return ""

def hold(folder):
    return subprocess.Popen(["sleep", "100"], cwd=folder)

def tell(**facts):
    there = [str(path) for path in map(pathlib.Path, facts.pop("paths", ())) if path.exists()]
    print(json.dumps({**facts, "there": there, "calls": calls}))
"""

NFS = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~nfs/data"


def inside(script: str) -> dict[str, Any]:
    """Run a script in a mount namespace of its own; what it prints."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts need root, or user namespaces that may be made by everybody")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", SETUP + script], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_busy_volume_below_the_kubelets_folder_survives_a_reset() -> None:
    """A reset that cannot unmount a pod's volume refuses before it removes anything, and names mount and user."""
    found = inside(f"""
make("/etc/kubernetes/kubelet.conf")
make("/var/lib/etcd/member/wal")
book("/var/lib/kubelet")
mount("-t", "tmpfs", "server:/export", "{NFS}")
make("{NFS}/theirs")
user = hold("{NFS}")
refused = said(kubeadm.reset)
survived = os.path.exists("{NFS}/theirs")
kept = os.path.exists("/etc/kubernetes/kubelet.conf") and os.path.exists("/var/lib/etcd/member/wal")
user.kill(); user.wait()
again = said(kubeadm.reset)
tell(refused=refused, survived=survived, kept=kept, again=again, pid=user.pid,
     paths=["/var/lib/kubelet", "/etc/kubernetes", "/var/lib/etcd"], removed=kubeadm.remains())
""")
    assert found["survived"]
    assert found["kept"]
    assert f"{NFS} (server:/export) is mounted and used by sleep ({found['pid']})" in found["refused"]
    assert "umount" in found["refused"]
    assert (found["again"], found["there"], found["removed"]) == ("", [], [])
    assert not [call for call in found["calls"] if "lazy" in call or "kubeadm reset" in call]


def test_a_kubelet_that_does_not_stop_could_mount_again() -> None:
    """Nothing is removed below one that still runs."""
    found = inside("""
make("/etc/kubernetes/kubelet.conf")
states["kubelet"] = {"enabled": True, "active": True}
tell(refused=said(kubeadm.reset), paths=["/etc/kubernetes/kubelet.conf"])
""")
    assert "the kubelet does not stop" in found["refused"]
    assert found["there"] == ["/etc/kubernetes/kubelet.conf"]


def test_the_kubelets_own_mounts_go_whatever_they_are_called() -> None:
    """Stacked mounts and names with spaces are the kubelet's too; a disk that was there before us stays mounted."""
    found = inside("""
mount("-t", "tmpfs", "disk", "/var/lib/kubelet")
make("/var/lib/kubelet/lost+found/x")
for folder in ("/var/lib/kubelet/pods/a/volumes/token", "/var/lib/kubelet/pods/a b\\\\c/d"):
    for _ in range(2):
        mount("-t", "tmpfs", "tmpfs", folder)
        make(f"{folder}/secret")
mount("--bind", "/var/lib/kubelet/pods/a", "/var/lib/kubelet/subpath")
refused = said(kubeadm.reset)
tell(refused=refused, left=sorted(os.listdir("/var/lib/kubelet")), mounted=os.path.ismount("/var/lib/kubelet"),
     removed=kubeadm.remains() if ledger.load().kubeadm else [])
""")
    assert (found["refused"], found["left"], found["mounted"], found["removed"]) == ("", ["lost+found"], True, [])


def test_a_disk_that_was_mounted_on_a_folder_of_ours_survives() -> None:
    """What is mounted on a folder that we made came after us: it is somebody else's."""
    found = inside("""
book("/var/lib/etcd")
mount("-t", "tmpfs", "backup", "/var/lib/etcd")
make("/var/lib/etcd/theirs")
tell(refused=said(kubeadm.reset), looked=said(kubeadm.remains), paths=["/var/lib/etcd/theirs"])
""")
    assert "/var/lib/etcd (backup) is mounted" in found["refused"]
    assert found["looked"] == found["refused"]
    assert found["there"] == ["/var/lib/etcd/theirs"]


@pytest.mark.parametrize("kind", [("-t", "tmpfs", "server:/export"), ("--bind", "/var/lib/elsewhere")])
@pytest.mark.parametrize("folder", ["/var/lib/docker", "/opt-of-ours"])
def test_a_busy_mount_in_a_folder_of_the_ledger_survives(kind: tuple[str, ...], folder: str) -> None:
    """Docker's volumes and every other folder: no mount is emptied, of another device or of the same one."""
    point = f"/var/lib{folder}/volumes/v/_data" if folder.startswith("/opt") else f"{folder}/volumes/v/_data"
    root = point.partition("/volumes")[0]
    found = inside(f"""
os.makedirs("/var/lib/elsewhere")
make("{root}/ours")
mount(*{kind!r}, "{point}")
make("{point}/theirs")
book("{root}")
user = hold("{point}")
refused = said(undo.Undoer().run)
survived = os.path.exists("{point}/theirs") and os.path.exists("{root}/ours")
looked = said(undo.Undoer(check=True).run)
user.kill(); user.wait()
subprocess.run(["umount", "{point}"], check=True)
again = said(undo.Undoer().run)
tell(refused=refused, survived=survived, looked=looked, again=again, paths=["{root}", ledger.PATH])
""")
    assert found["survived"]
    assert point in found["refused"]
    assert "sleep" in found["refused"]
    assert point in found["looked"], "a dry run says it, too"
    assert (found["again"], found["there"]) == ("", [])


@pytest.mark.parametrize("late", ["/opt-of-ours", "/var/lib/docker"])
def test_a_disk_that_is_mounted_while_packages_go_survives(late: str) -> None:
    """Purging takes minutes: what came on a folder of ours meanwhile is not emptied."""
    folder = f"/var/lib{late}" if late.startswith("/opt") else late
    found = inside(f"""
make("{folder}/ours")
book("{folder}")
undo.Undoer._files = lambda self: (mount("-t", "tmpfs", "backup", "{folder}"), make("{folder}/theirs"))
tell(refused=said(undo.Undoer().run), paths=["{folder}/theirs"])
""")
    assert f"something is mounted on {folder}" in found["refused"]
    assert found["there"] == [f"{folder}/theirs"]


def test_a_disk_that_is_mounted_while_a_cluster_goes_survives() -> None:
    """The same for the folders of kubeadm, between the look and the removal."""
    found = inside("""
from gpunodes.ansible.module_utils.gpunodes import tree
make("/etc/kubernetes/kubelet.conf")
book("/var/lib/etcd")
remove = tree.remove
def slow(path, **more):
    if path == "/var/lib/etcd":
        mount("-t", "tmpfs", "backup", path)
        make(f"{path}/theirs")
    remove(path, **more)
tree.remove = slow
tell(refused=said(kubeadm.reset), paths=["/var/lib/etcd/theirs"])
""")
    assert "something is mounted on /var/lib/etcd" in found["refused"]
    assert found["there"] == ["/var/lib/etcd/theirs"]


def test_a_mount_behind_a_link_is_seen() -> None:
    """/lib is a link on most systems: a folder of ours may have another name in mountinfo than in the ledger."""
    found = inside("""
os.makedirs("/var/lib/usr/updates")
os.symlink("/var/lib/usr", "/var/lib/link")
book("/var/lib/link/updates")
mount("-t", "tmpfs", "backup", "/var/lib/usr/updates")
make("/var/lib/usr/updates/theirs")
tell(refused=said(undo.Undoer().run), paths=["/var/lib/usr/updates/theirs"])
""")
    assert "/var/lib/usr/updates (backup) is mounted" in found["refused"]
    assert found["there"] == ["/var/lib/usr/updates/theirs"]


@pytest.mark.parametrize("sign", ["\\u2028", "\\x0b", "\\r", "\\x85", "\\x1c", " ", "\\n", "\\\\", "\\udcff"])
def test_a_mount_may_have_any_name(sign: str) -> None:
    """Whoever starts a pod chooses names that end up in mountinfo; of line ends only one is escaped there."""
    found = inside(f"""
from gpunodes.ansible.module_utils.gpunodes import tree
point = "/var/lib/ours/a{sign}b"
mount("-t", "tmpfs", "x", point)
make("/var/lib/others/file")
tree.remove("/var/lib/others")
found = [each.point for each in tree.below(["/var/lib/ours"])]
tell(refused=said(lambda: tree.see_bare(["/var/lib/ours"])), same=found == [point], paths=["/var/lib/others"])
""")
    assert found["same"]
    assert "is mounted" in found["refused"]
    assert found["refused"].isprintable()
    assert found["there"] == []


def test_the_network_of_another_container_engine_stays() -> None:
    """podman and nerdctl keep theirs beside ours."""
    found = inside("""
make("/etc/kubernetes/kubelet.conf")
make("/var/lib/cni/networks/podman/10.88.0.2")
make("/var/lib/cni/networks/cbr0/10.244.1.2")
make("/var/lib/cni/flannel/x")
book("/var/lib/cni")
tell(refused=said(kubeadm.reset), paths=["/var/lib/cni/networks/podman/10.88.0.2", "/var/lib/cni/networks/cbr0"])
""")
    assert (found["refused"], found["there"]) == ("", ["/var/lib/cni/networks/podman/10.88.0.2"])


@pytest.mark.parametrize(("module", "stays"), [("zfs", True), ("nvidia", False)])
def test_another_module_that_dkms_built_stays(module: str, stays: bool) -> None:
    """The driver's installation makes DKMS's folder; somebody may have built another module there since."""
    found = inside(f"""
make("/var/lib/dkms/{module}/2.2.2/source")
make("/var/lib/dkms/dkms_dbversion")
book("/var/lib/dkms")
tell(refused=said(undo.Undoer().run), paths=["/var/lib/dkms/{module}/2.2.2/source"])
""")
    assert (found["refused"], bool(found["there"])) == ("", stays)


@pytest.mark.parametrize(("ours", "how"), [(True, "purge"), (False, "remove")])
def test_docker_data_that_was_there_before_us_is_not_purged(ours: bool, how: str) -> None:
    """docker.io's own scripts empty /var/lib/docker when the package is purged."""
    found = inside(f"""
class Apt:
    def mend(self): pass
    def installed(self, names): return {{name: packages.PackageState("1", held=False) for name in names}}
    def purge(self, names): calls.append("purge " + " ".join(names))
    def remove(self, names): calls.append("remove " + " ".join(names))
packages.detect = Apt
found = ledger.Ledger()
found.packages += ["docker.io", "runc"]
found.note_directories(["/var/lib/docker"] if {ours} else [])
found.save()
make("/var/lib/docker/volumes/v/_data/theirs")
tell(refused=said(undo.Undoer().run))
""")
    assert found["refused"] == ""
    assert [call for call in found["calls"] if "docker.io" in call] == [f"{how} docker.io{' runc' if ours else ''}"]
    assert [call for call in found["calls"] if "runc" in call] == [f"purge {'docker.io ' if ours else ''}runc"]


def test_what_others_delete_meanwhile_is_no_error(tmp_path: Path) -> None:
    """A container that ends cleans up as well."""
    place = tmp_path / "busy"
    for name in range(300):
        (place / f"{name}/sub").mkdir(parents=True)
    other = subprocess.Popen(["rm", "-rf", *map(str, place.iterdir())])
    tree.remove(str(place))
    other.wait()
    assert not place.exists()


def test_what_is_still_written_to_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, not a command that never ends."""
    (tmp_path / "busy").mkdir()
    monkeypatch.setattr(tree, "_LIMIT_S", -1)
    with pytest.raises(MachineProblem, match="busy cannot be removed: it is still written to"):
        tree.remove(str(tmp_path / "busy"))


def test_what_a_link_points_to_survives() -> None:
    """Links in a folder are removed, never followed."""
    found = inside("""
make("/var/lib/elsewhere/theirs")
make("/var/lib/ours/file")
os.symlink("/var/lib/elsewhere", "/var/lib/ours/link")
book("/var/lib/ours")
tell(refused=said(undo.Undoer().run), paths=["/var/lib/ours", "/var/lib/elsewhere/theirs"])
""")
    assert (found["refused"], found["there"]) == ("", ["/var/lib/elsewhere/theirs"])


@pytest.mark.parametrize("kind", [("-t", "tmpfs", "x"), ("--bind", "/var/lib/elsewhere")])
def test_a_mount_that_came_a_moment_ago_survives(kind: tuple[str, ...]) -> None:
    """Removing looks at every folder again: a mount that came after the check is not entered."""
    found = inside(f"""
from gpunodes.ansible.module_utils.gpunodes import tree
os.makedirs("/var/lib/elsewhere")
mount(*{kind!r}, "/var/lib/ours/a/b")
make("/var/lib/ours/a/b/theirs")
tell(refused=said(lambda: tree.remove("/var/lib/ours")), paths=["/var/lib/ours/a/b/theirs"])
""")
    assert "something is mounted on /var/lib/ours/a/b" in found["refused"]
    assert found["there"] == ["/var/lib/ours/a/b/theirs"]


def test_a_link_in_place_of_a_folder_is_emptied_and_stays() -> None:
    """/var/lib/kubelet may be a link to another disk: mounts below it are found there."""
    found = inside("""
os.makedirs("/var/lib/data/kubelet")
os.symlink("/var/lib/data/kubelet", "/var/lib/kubelet")
make("/var/lib/data/kubelet/config.yaml")
mount("-t", "tmpfs", "x", "/var/lib/data/kubelet/pods/v")
user = hold("/var/lib/data/kubelet/pods/v")
make("/var/lib/data/kubelet/pods/v/theirs")
refused = said(kubeadm.reset)
survived = os.path.exists("/var/lib/data/kubelet/pods/v/theirs")
user.kill(); user.wait()
tell(refused=refused, survived=survived, again=said(kubeadm.reset), left=os.listdir("/var/lib/kubelet"))
""")
    assert "/var/lib/data/kubelet/pods/v" in found["refused"]
    assert found["survived"]
    assert (found["again"], found["left"]) == ("", [])


def test_one_place_removes_folders() -> None:
    """What travels to machines removes a folder by ``tree.remove`` alone."""
    ansible = Path(tree.__file__).parents[2]
    found = [
        path.name
        for path in ansible.rglob("*.py")
        if re.search(r"rmtree|removedirs|\brm['\",\s]+-[a-zA-Z]*[rR]|[\s'\"]-delete\b", path.read_text())
    ]
    assert found == []


def test_no_folder_is_too_deep(tmp_path: Path) -> None:
    """Pods may leave what they like: 3,000 folders in each other go."""
    place = tmp_path / "deep"
    place.mkdir()
    here = os.open(place, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        tree.remove(str(place))
        assert not place.exists()
        tree.remove(str(place))
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)  # pytest could not


def test_a_process_that_ends_while_it_is_looked_at_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the name of one that has just ended is ESRCH, not "no such file"."""

    def read(path: str) -> str:
        raise ProcessLookupError(3, "No such process", path)

    monkeypatch.setattr(disk, "read", read)
    assert any(one.startswith("? (") for one in tree.users(str(Path.cwd())))


def test_the_remedy_for_a_mount_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the folder chose its name: it must not end the quoting of a command that we propose."""
    mount = tree.Mount("/var/lib/x/a'; reboot; '", "tmpfs")
    monkeypatch.setattr(tree, "below", lambda _: [mount])
    monkeypatch.setattr(tree, "_mounts", list)
    monkeypatch.setattr(tree, "users", lambda _: [])
    with pytest.raises(MachineProblem) as message:
        tree.see_bare(["/var/lib/x"])
    command = re.search(r"`(umount .*)`", str(message.value))
    assert command
    assert shlex.split(command.group(1)) == ["umount", mount.point]
    odd = "/var/lib/x/a\x1b[31m'\u2028"
    monkeypatch.setattr(tree, "below", lambda _: [tree.Mount(odd, "tmpfs")])
    with pytest.raises(MachineProblem) as message:
        tree.see_bare(["/var/lib/x"])
    command = re.search(r"`umount (.*)`", str(message.value))
    assert command
    assert str(message.value).isprintable()
    echoed = subprocess.run(["bash", "-c", f"printf %s {command.group(1)}"], capture_output=True, check=True, text=True)
    assert echoed.stdout == odd
