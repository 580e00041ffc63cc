"""Data on another disk: tested with real mounts in a mount namespace; a stand-in for systemctl mounts as units say.

Its disks are of tmpfs, which the module refuses: the tests allow it, except the one of that refusal.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import data_directory, ledger
from gpunodes.ansible.module_utils.host.spec import data_folders

from tests.unit.module_utils.test_mounts import in_namespace

SETUP = """
import configparser
from gpunodes.ansible.module_utils import data_directory
from gpunodes.ansible.module_utils.host import mounts
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Spec, data_folders

make("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\\n")
for folder in ("/run", "/etc", "/var/lib"):
    os.chmod(folder, 0o755)
os.makedirs("/run/disks")
def insert(point="/run/disks/data", options="mode=755"):
    mount("-t", "tmpfs", "-o", options, "disk", point)
DATA = "/run/disks/data"
make("/etc/fstab", f"# comment\\nUUID=1 {DATA} ext4 nofail 0 2\\n")
data_directory.FILE_SYSTEMS += ("tmpfs",)

def systemctl(argv, *rest):
    calls.append(" ".join(argv))
    if argv[1] == "start":
        unit = configparser.ConfigParser(strict=False)
        unit.optionxform = str
        unit.read(f"/etc/systemd/system/{argv[2]}")
        if not os.path.ismount(unit["Unit"]["AssertPathIsMountPoint"]):
            raise MachineProblem("Assertion failed on job")
        if not os.path.isdir(unit["Unit"]["AssertPathIsDirectory"]):
            raise MachineProblem("Assertion failed on job")
        here = unit["Mount"]
        os.makedirs(here["Where"], exist_ok=True)
        subprocess.run(["mount", "-o", here["Options"], here["What"], here["Where"]], check=True)
    return CommandResult(argv, 0, "", "")
mounts.run = mounts.must = systemctl

def spec(directory=DATA, runtime="containerd"):
    return Spec(moved=data_folders(runtime), data_directory=directory)
def moved(directory=DATA, runtime="containerd", check=False):
    return converge(spec(directory, runtime), check)
def refused(directory=DATA, runtime="containerd"):
    found = error(lambda: moved(directory, runtime))
    assert found == error(lambda: moved(directory, runtime, check=True)), "check mode reports the same"
    return found
def points():
    return sorted(line.split()[4] for line in open("/proc/self/mountinfo") if "/var/lib/" in line or DATA in line)
"""


def test_data_moves_to_the_disk_and_back() -> None:
    """Check mode changes nothing, a second run neither; a reset removes what gpunodes created and nothing else."""
    found = in_namespace(
        SETUP
        + """
insert(); make(f"{DATA}/foreign/file")
planned = moved(check=True)
untouched = not os.path.exists("/etc/systemd") and points() == [DATA]
done = moved()
again = moved().actions
make("/var/lib/kubelet/pods/a/file"); make("/var/lib/containerd/blob")
mount("-t", "tmpfs", "secret", "/var/lib/kubelet/pods/a/token")
inside = points()
on_disk = [os.path.exists(f"{DATA}/{name}") for name in ("kubelet/pods/a/file", "containerd/blob")]
book = ledger.load(); book.kubeadm = "join done"; book.note_directories(["/etc/kubernetes"]); book.save()
make("/etc/kubernetes/kubelet.conf")
dry = undo.Undoer(check=True).run()
reset.reset()
emptied, still = os.listdir(f"{DATA}/kubelet"), points()
actions = undo.Undoer().run()
report(planned=planned.actions, done=done.actions, same=planned.differences == done.differences, again=again,
       untouched=untouched, inside=inside, on_disk=on_disk, emptied=emptied, still=still, dry=dry, actions=actions,
       left=points(), disk=sorted(os.listdir(DATA)), lib=sorted(os.listdir("/var/lib")),
       units=os.path.exists("/etc/systemd"), twice=undo.Undoer().run())
"""
    )
    data = "/run/disks/data"
    assert found["planned"] == found["done"]
    assert found["untouched"]
    assert found["same"]
    assert found["done"][:3] == [
        "write /etc/systemd/system/var-lib-containerd.mount",
        "write /etc/systemd/system/containerd.service.d/15-gpunodes-data.conf",
        f"mount {data}/containerd on /var/lib/containerd",
    ]
    assert found["again"] == []
    # A mount of a pod appears once, not in the source of the mount as well.
    assert found["inside"] == [data, "/var/lib/containerd", "/var/lib/kubelet", "/var/lib/kubelet/pods/a/token"]
    assert found["on_disk"] == [True, True]
    assert (found["emptied"], found["still"]) == ([], [data, "/var/lib/containerd", "/var/lib/kubelet"])
    assert {"unmount /var/lib/containerd", "unmount /var/lib/kubelet"} <= set(found["dry"]) & set(found["actions"])
    assert (found["left"], found["disk"], found["lib"], found["units"]) == ([data], ["foreign"], [], False)
    assert found["twice"] == []


def test_a_mount_in_use_stops_a_reset_before_anything_is_removed() -> None:
    found = in_namespace(
        SETUP
        + """
insert(); moved(); make("/var/lib/containerd/blob")
user = hold("/var/lib/containerd")
refused_reset = error(undo.Undoer().run)
user.kill(); user.wait()
report(refused=refused_reset, kept=os.path.exists(f"{DATA}/containerd/blob"), again=error(undo.Undoer().run),
       disk=os.listdir(DATA), pid=user.pid)
"""
    )
    assert f"/var/lib/containerd (disk) is mounted and used by sleep ({found['pid']})" in found["refused"]
    assert (found["kept"], found["again"], found["disk"]) == (True, "", [])


def test_a_mount_of_somebody_else_on_the_same_folder_stops_a_reset() -> None:
    found = in_namespace(
        SETUP
        + """
insert(); moved(); make("/var/lib/containerd/blob")
mount("-t", "tmpfs", "theirs", "/var/lib/containerd"); make("/var/lib/containerd/data")
report(refused=error(undo.Undoer(check=True).check_unmounted), real=error(undo.Undoer().run),
       paths=["/var/lib/containerd/data", f"{DATA}/containerd/blob"])
"""
    )
    assert "/var/lib/containerd (theirs) is mounted" in found["refused"]
    assert found["refused"] == found["real"]
    assert len(found["existing"]) == 2


def test_without_its_disk_nothing_starts_and_a_reset_removes_nothing_of_that_name() -> None:
    """A folder on the root disk in the place of the missing one is not the one that gpunodes created."""
    found = in_namespace(
        SETUP
        + """
insert(); moved()
for folder in ("/var/lib/kubelet", "/var/lib/containerd", DATA):
    subprocess.run(["umount", folder], check=True)
missing = refused()
start = error(lambda: systemctl(["systemctl", "start", "var-lib-containerd.mount"]))
make(f"{DATA}/containerd/theirs")
shadow = error(lambda: systemctl(["systemctl", "start", "var-lib-containerd.mount"]))
actions = undo.Undoer().run()
report(missing=missing, start=start, shadow=shadow, actions=actions, paths=[f"{DATA}/containerd/theirs"],
       lib=os.listdir("/var/lib"))
"""
    )
    assert "is on the file system" in found["missing"] or "is on /run, which no boot mounts" in found["missing"]
    assert found["start"] == found["shadow"] == "Assertion failed on job"
    assert found["existing"] == ["/run/disks/data/containerd/theirs"]
    assert (found["lib"], [each for each in found["actions"] if "/run/disks" in each]) == ([], [])


def test_docker_moves_too_and_an_interrupted_run_continues() -> None:
    found = in_namespace(
        SETUP
        + """
insert(); os.makedirs("/var/lib/docker")
mounts.must = lambda argv: (_ for _ in ()).throw(MachineProblem("power cut"))
cut = error(lambda: moved(runtime="docker"))
mounts.must = systemctl
done = moved(runtime="docker").actions
undo.Undoer().run()
report(cut=cut, done=done, lib=os.listdir("/var/lib"), disk=os.listdir(DATA))
"""
    )
    assert found["cut"] == "power cut"
    assert "mount /run/disks/data/containerd on /var/lib/containerd" in found["done"]
    assert "mount /run/disks/data/docker on /var/lib/docker" in found["done"]
    # The folder that existed stays.
    assert (found["lib"], found["disk"]) == (["docker"], [])


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("", "cannot be used: No such file"),
        ("os.makedirs(DATA)", "is on /run, which no boot mounts"),
        ("DATA = '/usr'", "is on the root file system"),
        ("insert(options='mode=777')", "has the owner 0 and the mode 0777"),
        ("insert(options='mode=775')", "the mode 0775"),
        ("insert(options='mode=755,uid=5')", "has the owner 5"),
        ("insert(); os.chmod('/run/disks', 0o757)", "/run/disks of gpunodes_data_directory has"),
        ("insert(options='mode=755,ro')", "mounted with ro"),
        ("insert(options='mode=755,noexec')", "mounted with noexec"),
        ("insert(); data_directory.FILE_SYSTEMS = ('ext4',)", "is on the file system tmpfs"),
        ("insert(); make('/etc/fstab', '#UUID=1 /run/disks/data ext4 nofail 0 2')", "no boot mounts"),
        ("insert('/run/disks/real'); os.symlink('/run/disks/real', DATA)", "leads through a link"),
        ("make(DATA, 'a file')", "is not a directory"),
        ("DATA = '/var/lib'", "contains /var/lib/containerd, or is in it"),
        ("DATA = '/var/lib/kubelet/data'; insert(DATA)", "contains /var/lib/kubelet, or is in it"),
        ("DATA = '/da ta'", "is not a path"),
        ("DATA = '/data\\nOptions=suid'", "is not a path"),
        ("insert(); make('/var/lib/containerd/blob')", "/var/lib/containerd contains data"),
        ("insert(); mount('-t', 'tmpfs', 'own', '/var/lib/kubelet')", "/var/lib/kubelet is a mount point already"),
        ("insert(); os.symlink('/run', '/var/lib/kubelet')", "/var/lib/kubelet is a link or a file"),
        ("insert(); make(f'{DATA}/kubelet/precious')", "/kubelet exists, and gpunodes did not create it"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_and_nothing_is_changed(prepare: str, message: str) -> None:
    found = in_namespace(
        f"""{SETUP}
{prepare}
before = points()
report(refused=refused(DATA), changed=points() != before or os.path.exists("/etc/systemd"), ledger=ledger.PATH,
       paths=[ledger.PATH])
"""
    )
    assert message in found["refused"]
    assert re.fullmatch(r".+; wanted: [^;]+; .+", found["refused"], re.DOTALL)
    assert (found["changed"], found["existing"]) == (False, [])


@pytest.mark.parametrize("directory", ["/run/disks/other", ""])
def test_a_change_is_refused_and_not_half_made(directory: str) -> None:
    found = in_namespace(
        f"""{SETUP}
insert(); moved(); insert("/run/disks/other")
make("/etc/fstab", "a {{DATA}} ext4 x 0 0\\nb /run/disks/other ext4 x 0 0")
before = points(), ledger.load()
report(refused=refused("{directory}"), same=before == (points(), ledger.load()))
"""
    )
    assert f"its data is in /run/disks/data, and gpunodes_data_directory is {directory or 'empty'}" in found["refused"]
    assert "reset the machine, then join it again" in found["refused"]
    assert found["same"]


def test_a_machine_that_joined_without_it_is_refused_a_directory() -> None:
    found = in_namespace(
        SETUP
        + """
insert(); make("/var/lib/containerd/io.containerd.content.v1.content/blobs/a")
report(refused=refused(), without=error(lambda: moved("")), calls_=calls)
"""
    )
    assert "/var/lib/containerd contains data, and gpunodes_data_directory would hide it" in found["refused"]
    assert (found["without"], found["calls_"]) == ("", [])


def test_an_empty_folder_of_a_package_is_no_data() -> None:
    found = in_namespace(SETUP + "insert(); make('/var/lib/kubelet/.kubelet-keep'); report(refused=error(moved))\n")
    assert found["refused"] == ""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/var/lib/kubelet", "var-lib-kubelet.mount"),
        ("/data", "data.mount"),
        ("/mnt/disk-1/x_y", "mnt-disk\\x2d1-x_y.mount"),
        ("/.hidden/.x", "\\x2ehidden-.x.mount"),
        ("/mnt/ä", "mnt-\\xc3\\xa4.mount"),
    ],
)
def test_units_are_named_as_systemd_escapes_paths(path: str, name: str) -> None:
    assert data_directory.unit(path) == name


def test_the_folders_of_a_runtime() -> None:
    assert list(data_folders("containerd")) == ["containerd", "kubelet"]
    assert list(data_folders("docker")) == ["containerd", "docker", "kubelet"]


def test_free_space_is_that_of_the_nearest_existing_folder(tmp_path: Path) -> None:
    (own,) = data_directory.free([str(tmp_path)])
    (missing,) = data_directory.free([f"{tmp_path}/a/b"])
    assert {**missing, "path": str(tmp_path), "free_mib": 0} == {**own, "free_mib": 0}
    assert isinstance(own["free_mib"], int)


def test_a_ledger_without_mounts_is_that_of_an_earlier_version() -> None:
    assert ledger.from_json('{"version": 1, "files": {}}').mounts == {}
