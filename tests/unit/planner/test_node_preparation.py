"""What a node needs before Kubernetes: a clock that is set, free space where it is used, limits, and its data disk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpunodes.ansible.module_utils.host.spec import Spec
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import tables
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.desired import Desired, desired
from gpunodes.planner.gpu import RequestedSoftware
from gpunodes.planner.preflight import judge

from tests.stand_ins import facts, given, gpu_machine

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
DNF = {"package_manager": "dnf", "os": {"id": "rocky", "version": "9.4", "codename": None, "name": "Rocky Linux 9.4"}}
NO_SERVICE = {"began": 1000.0, "synchronised": False, "services": [], "own": ""}


def findings(check: str, found: dict[str, Any] | None = None, **more: Any) -> list[PreflightFinding]:
    role = more.pop("role", Role.WORKER)
    candidate = MachineFacts("worker-1", role, found or facts(), **{"read_at": 1000.0, **more})
    return [each for each in judge([candidate], ClusterRequirements(kubernetes="1.36")) if each.check == check]


def node(found: dict[str, Any] | None = None, **settings: Any) -> Spec:
    made = desired(given(found or facts(), **settings))
    assert isinstance(made, Desired), made
    return made.wanted["node"]


# The clock


@pytest.mark.parametrize(
    ("asked", "began", "time", "read", "shown"),
    [
        # A slow round trip, or a slow module, is no offset.
        (1000.0, 1150.0, 1150.0, 1300.0, None),
        (1000.0, 1000.0, 1300.0, 1300.0, None),
        # What is certain is beyond the limit.
        (1000.0, 1100.0, 1100.0, 1010.0, "95 s ahead of"),
        (1000.0, 900.0, 920.0, 1021.0, "100 s behind"),
        # The offset may be 0: the whole difference may be a slow way back.
        (1000.0, 1001.0, 1001.0, 1100.0, None),
        # A machine's lies about its own work change no more than the round trip.
        (1000.0, 9e15, 1000.0, 1000.0, None),
        (1000.0, -9e15, 5000.0, 1010.0, "3990 s ahead of"),
    ],
)
def test_the_round_trip_is_no_offset(asked: float, began: float, time: float, read: float, shown: str | None) -> None:
    clock = {"began": began, "synchronised": True, "services": ["chrony"], "own": ""}
    found = findings("clock", facts(time=time, clock=clock), asked_at=asked, read_at=read)
    assert [f"its clock is {shown} the controller's"] * bool(shown) == [each.problem.found for each in found]


def test_a_machine_without_a_time_service_is_a_warning_with_its_remedy() -> None:
    machine = facts(clock=NO_SERVICE, time=1000.5)
    (finding,) = findings("time", machine)
    assert finding.severity is Severity.WARNING
    assert finding.problem.found == "no time service runs; its clock is 0.5 s ahead of the controller's"
    assert "gpunodes_time_service" in finding.problem.remedy
    (installed,) = findings("time", machine, time_service="install")
    assert installed.problem.remedy == "nothing to do: gpunodes installs one"
    (unknown,) = findings("time", machine, read_at=None)
    assert unknown.problem.found == "no time service runs"


def test_a_service_that_does_not_synchronise_is_a_warning() -> None:
    clock = {**NO_SERVICE, "services": ["chrony", "ptp4l"]}
    (finding,) = findings("time", facts(clock=clock))
    assert finding.problem.found.startswith(
        "its clock is not synchronised, although a time service runs (chrony, ptp4l); "
    )
    assert findings("time", facts(clock={**clock, "synchronised": None})) == []
    assert findings("time") == []


@pytest.mark.parametrize(
    ("machine", "package", "service"),
    [({}, "systemd-timesyncd", "systemd-timesyncd"), (DNF, "chrony", "chronyd")],
)
def test_a_time_service_is_installed_only_where_none_is_and_it_is_requested(
    machine: dict[str, Any], package: str, service: str
) -> None:
    bare = facts(**machine, clock=NO_SERVICE)
    assert (node(bare).packages, node(bare).services) == ((), ())
    wanted = node(bare, gpunodes_time_service="install")
    assert [each.name for each in wanted.packages] == [package]
    assert [each.name for each in wanted.services] == [service]
    assert list(wanted.files) == [], "the servers of the package"
    assert wanted.modules, "the rest of the role stays"
    # The next run sees its own service, and keeps it.
    own = facts(**machine, clock={**NO_SERVICE, "services": [service], "own": service})
    assert node(own, gpunodes_time_service="install") == wanted
    # Another one is never accompanied, also if it came later.
    for others in (["ntpsec"], ["ntpsec", service]):
        running = facts(**machine, clock={**NO_SERVICE, "services": others, "own": service})
        assert node(running, gpunodes_time_service="install") == node(bare)


def test_time_servers_are_written_for_the_service_that_is_installed() -> None:
    given_ = {"gpunodes_time_service": "install", "gpunodes_time_servers": ["ntp.example", "10.0.0.1"]}
    (file,) = node(facts(clock=NO_SERVICE), **given_).files
    assert (file.path, file.content.splitlines()[1:]) == (
        "/etc/systemd/timesyncd.conf.d/10-gpunodes.conf",
        ["[Time]", "NTP=ntp.example 10.0.0.1"],
    )
    (file,) = node(facts(**DNF, clock=NO_SERVICE), **given_).files
    assert file.path == "/etc/chrony.conf"
    assert file.content.splitlines()[1:3] == ["server ntp.example iburst", "server 10.0.0.1 iburst"]
    assert "rtcsync" in file.content, "without it the kernel's flag says nothing"


# Limits


def test_limits_are_raised_and_pods_are_limited() -> None:
    assert node().raised == {
        "fs.inotify.max_user_instances": "8192",
        "fs.inotify.max_user_watches": "524288",
        "kernel.pid_max": "4194304",
    }
    path = "/etc/gpunodes/kubelet.conf.d/10-pod-pids-limit.conf"
    made = desired(given())
    assert isinstance(made, Desired)
    files = {file.path: file.content for file in made.wanted["kubernetes"].files}
    assert json.loads(files[path])["podPidsLimit"] == 16384
    assert (
        "--config-dir=/etc/gpunodes/kubelet.conf.d" in files["/etc/systemd/system/kubelet.service.d/20-gpunodes.conf"]
    )
    without = desired(given(gpunodes_pod_pids_limit=-1))
    assert isinstance(without, Desired)
    assert path in without.wanted["kubernetes"].absent
    assert path not in {file.path for file in without.wanted["kubernetes"].files}


# The data disk


def test_the_folders_of_the_runtime_are_moved() -> None:
    assert node().data_directory == ""
    moved = node(gpunodes_data_directory="/data")
    assert (moved.data_directory, moved.moved) == (
        "/data",
        {"containerd": "/var/lib/containerd", "kubelet": "/var/lib/kubelet"},
    )
    assert "docker" in node(gpunodes_data_directory="/data", gpunodes_runtime="docker").moved


def test_preflight_reports_what_the_machine_says_of_its_directory() -> None:
    problem = {"found": "/data is not there", "wanted": "a directory", "remedy": "make it"}
    reported = facts(data_directory={"path": "/data", "problem": problem})
    # Without Docker a GPU host has no data there.
    assert findings("data_directory", reported, role=Role.GPU_HOST) == []
    docker = RequestedSoftware("", runtime="docker")
    assert len(findings("data_directory", reported, role=Role.GPU_HOST, requested=docker)) == 1
    (finding,) = findings("data_directory", reported)
    assert (finding.severity, str(finding.problem)) == (
        Severity.ERROR,
        "/data is not there; wanted: a directory; make it",
    )


# Free space


def disks(root: int, **others: int) -> list[dict[str, Any]]:
    """Free MiB of the root file system, and of others by the name of their folder, ``var_lib``."""
    names = ["/usr", "/var/lib", "/var/cache", "/boot", "/tmp", "/data"]
    names += [f"/var/lib/{each}" for each in ("containerd", "docker", "kubelet") if "var_lib" not in others]
    own = {f"/{name.replace('_', '/')}": free for name, free in others.items()}
    return [
        {"path": name, "device": list(own).index(name) + 2, "mount": name, "free_mib": own[name]}
        if name in own
        else {"path": name, "device": 1, "mount": "/", "free_mib": root}
        for name in names
    ]


def space(found: dict[str, Any], requested: RequestedSoftware | None = None, **more: Any) -> list[str]:
    requested = requested or RequestedSoftware("")
    return [str(each.problem) for each in findings("disk", found, requested=requested, **more)]


def test_a_worker_needs_4_gib_on_one_disk_and_a_control_plane_more() -> None:
    assert space(facts(disks=disks(4096))) == []
    (short,) = space(facts(disks=disks(4095)))
    assert short == (
        "4095 MiB are free on /; wanted: at least 4096 MiB: 384 for Kubernetes' packages, 128 for containerd, 256 for"
        " downloaded packages, 768 for the node's images, 2048 for pods, 512 for volumes of pods; free some space"
        " there, or enlarge it; or set gpunodes_data_directory to a directory on a larger disk"
    )
    assert len(space(facts(disks=disks(4096)), role=Role.CONTROL_PLANE)) == 1
    assert space(facts(disks=disks(4864)), role=Role.CONTROL_PLANE) == []


def test_each_file_system_needs_its_own_part() -> None:
    assert space(facts(disks=disks(1000, var_lib=3328))) == []
    (short,) = space(facts(disks=disks(1000, var_lib=3327)))
    assert short.startswith("3327 MiB are free on /var/lib; wanted: at least 3328 MiB: 768 for the node's images")
    both = space(facts(disks=disks(10, var_lib=10)))
    assert [each.partition(";")[0] for each in both] == ["10 MiB are free on /", "10 MiB are free on /var/lib"]


def test_with_a_data_directory_images_need_their_space_there() -> None:
    directory = {"path": "/data", "problem": None}
    assert space(facts(disks=disks(1000, data=3328), data_directory=directory)) == []
    (short,) = space(facts(disks=disks(1000, data=100), data_directory=directory))
    assert short.startswith("100 MiB are free on /data")
    assert "gpunodes_data_directory" not in short


def test_a_disk_that_is_mounted_on_a_folder_of_the_runtime_counts_for_its_images() -> None:
    assert space(facts(disks=disks(2048, var_lib_containerd=500_000))) == []
    (short,) = space(facts(disks=disks(500_000, var_lib_containerd=100)))
    assert short.startswith("100 MiB are free on /var/lib/containerd; wanted: at least 2816 MiB: 768 for the node's")
    assert "gpunodes_data_directory" not in short
    (short,) = space(facts(disks=disks(500_000, var_lib_kubelet=511)))
    assert short.startswith("511 MiB are free on /var/lib/kubelet; wanted: at least 512 MiB: 512 for volumes of pods")
    docker = RequestedSoftware("", runtime="docker")
    assert space(facts(disks=disks(2048, var_lib_docker=500_000)), docker) == []
    (short,) = space(facts(disks=disks(2048, var_lib_containerd=500_000)), docker)
    assert short.startswith("2048 MiB are free on /")
    directory = {"path": "/data", "problem": None}
    assert space(facts(disks=disks(1000, data=3328, var_lib_containerd=1), data_directory=directory)) == []


def test_what_is_installed_does_not_count_twice() -> None:
    installed = {"kubelet": "1.36.1-1", "kubeadm": "1.36.1-1", "containerd.io": "2.1"}
    assert space(facts(disks=disks(2560), packages=installed)) == []
    assert len(space(facts(disks=disks(2559), packages=installed))) == 1
    joined = {"role": "worker", "ca_hash": "sha256:aa", "server": "https://10.0.0.1:6443"}
    assert space(facts(disks=disks(0), packages=installed, kubernetes=joined)) == []


def needed(found: dict[str, Any], requested: RequestedSoftware) -> set[str]:
    """The titles of what needs space on a machine without any."""
    (short,) = space({**found, "disks": disks(0)}, requested)
    parts = short.partition("MiB: ")[2].partition(";")[0].split(", ")
    return {part.partition(" for ")[2] for part in parts}


def test_a_driver_and_cuda_need_their_space_until_they_are_installed() -> None:
    requested = RequestedSoftware("", driver="580", cuda=("13.0",), cudnn="9")
    machine = gpu_machine(GPU)
    driver = {
        "the GPU driver",
        "the downloaded driver",
        "building the driver's modules",
        "the compiler's temporary files",
        "a new initramfs",
    }
    cuda = {"CUDA", "downloaded CUDA packages", "cuDNN", "downloaded cuDNN packages"}
    assert driver | cuda | {"the container toolkit", "the device plugin's image"} <= needed(machine, requested)
    gpu = machine["gpu"]
    there = {"module": "580.82.07", "loaded": True, "origin": "nvidia-repository", "packages": {"nvidia-open": "580-1"}}
    with_driver = {**machine, "gpu": {**gpu, "driver": {**there, "flavour": "open"}}}
    assert needed(with_driver, requested).isdisjoint(driver)
    assert cuda <= needed(with_driver, requested)
    more = {"cuda": {"13.0": "nvidia-repository"}, "cudnn": {"libcudnn9-cuda-13": "9.1"}, "toolkit": {"a": "1"}}
    complete = {**machine, "gpu": {**with_driver["gpu"], **more}}
    assert needed(complete, requested).isdisjoint(driver | cuda | {"the container toolkit"})
    headers = {**machine, "gpu": {**gpu, "headers": {"running": False, "package": "linux-headers-6.12"}}}
    assert "kernel headers and compiler" in needed(headers, requested)
    assert "kernel headers and compiler" not in needed(machine, requested)


def test_each_cuda_version_needs_its_space() -> None:
    two = RequestedSoftware("", cuda=("13.0", "13.1"))
    (short,) = space({**gpu_machine(GPU), "disks": disks(0)}, two)
    assert "16384 for CUDA" in short


def test_a_machine_without_gpus_needs_no_space_for_them() -> None:
    assert needed(facts(), RequestedSoftware("", cuda=("13.0",))) == {
        "Kubernetes' packages",
        "containerd",
        "downloaded packages",
        "the node's images",
        "pods",
        "volumes of pods",
    }


def test_a_plan_with_conflicts_still_needs_the_rest() -> None:
    assert "pods" in needed(gpu_machine(GPU), RequestedSoftware("", driver="1"))


def test_docker_needs_space() -> None:
    docker = RequestedSoftware("", runtime="docker")
    assert "Docker" in needed(facts(), docker)
    assert "Docker" not in needed(facts(packages={"docker-ce": "29.0"}), docker)


def test_every_size_has_its_basis() -> None:
    for row in tables.read("space")["space"]:
        assert row["basis"]
        assert row["mib"] > 0
        assert row["where"] in {"usr", "cache", "lib", "boot", "tmp", "images", "kubelet"}


def test_a_gpu_host_needs_no_space_for_kubernetes() -> None:
    (short,) = space(facts(disks=disks(0)), RequestedSoftware("", runtime="docker"), role=Role.GPU_HOST)
    assert "Docker" in short
    assert "Kubernetes" not in short
    assert space(facts(disks=disks(0)), role=Role.GPU_HOST) == []
