"""The desired state of machines: versions, runtimes, sources, files, GPU software, labels and taints."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from gpunodes.ansible.module_utils import facts, packages
from gpunodes.ansible.module_utils.host import spec
from gpunodes.errors import WrongInput
from gpunodes.planner import node_software, package_sources, versions
from gpunodes.planner.desired import Desired, desired
from gpunodes.planner.gpu_model import Group, Package, Source

from tests.stand_ins import NONE, SOURCES, filtered, given, gpu_machine

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
DEBIAN_12 = {"id": "debian", "version": "12", "codename": "bookworm", "name": "Debian GNU/Linux 12"}
ROCKY = {"id": "rocky", "version": "9.4", "codename": None, "name": "Rocky Linux 9.4"}


def state(found: dict[str, Any] | None = None, **more: Any) -> Desired:
    made = desired(given(found, **more))
    assert isinstance(made, Desired), made
    return made


def names(part: spec.Spec) -> list[str]:
    return [package.name for package in part.packages]


# The cluster decides


def test_a_node_keeps_its_version_and_a_new_one_gets_the_clusters() -> None:
    assert state().kubernetes_version == "1.36"
    assert state(cluster_version="v1.35.4").kubernetes_version == "1.35.4"
    assert state(cluster_version="v1.36.3", node={"version": "v1.35.2"}).kubernetes_version == "1.35.2"


def test_a_node_keeps_the_runtime_that_it_joined_with() -> None:
    assert state(gpunodes_runtime="docker").socket == "unix:///run/cri-dockerd.sock"
    kept = state(gpunodes_runtime="docker", node={"runtime": "containerd"})
    assert (kept.runtime, kept.socket) == ("containerd", "unix:///run/containerd/containerd.sock")
    assert "docker" not in kept.wanted


# The software of the node


@pytest.mark.parametrize(
    ("changes", "settings", "package", "url"),
    [
        ({}, {}, "containerd", None),
        ({"os": DEBIAN_12}, {}, "containerd.io", "https://download.docker.com/linux/debian"),
        ({"os": DEBIAN_12}, {"gpunodes_containerd_source": "distribution"}, "containerd", None),
        ({"os": ROCKY}, {}, "containerd.io", "https://download.docker.com/linux/rhel/9/$basearch/stable"),
    ],
)
def test_containerd_comes_from_the_source_that_works(
    changes: dict[str, Any], settings: dict[str, Any], package: str, url: str | None
) -> None:
    part = state(gpu_machine(**changes), **settings).wanted["containerd"]
    assert names(part) == [package]
    assert [repository.url for repository in part.repositories] == ([url] if url else [])
    assert {file.package for file in part.files} == {package}


def test_the_fingerprint_of_a_public_key_is_known_and_that_of_another_is_not() -> None:
    public, own = SOURCES["docker"], {**SOURCES["docker"], "key": "https://mirror/gpg"}
    assert package_sources.docker({"docker": public}, DEBIAN_12).fingerprint.startswith("9DC8")
    assert package_sources.docker({"docker": public}, ROCKY).fingerprint.startswith("060A")
    assert package_sources.docker({"docker": own}, DEBIAN_12).fingerprint == ""
    assert package_sources.docker({"docker": {**own, "fingerprint": "AB"}}, DEBIAN_12).fingerprint == "AB"
    assert package_sources.kubernetes(SOURCES, "1.36", "rpm") == spec.Repository(
        name="kubernetes",
        url="https://pkgs.k8s.io/core:/stable:/v1.36/rpm/",
        key="https://pkgs.k8s.io/core:/stable:/v1.36/deb/Release.key",
        fingerprint="DE15 B144 86CD 377B 9E87  6E1A 2346 54DA 9A29 6436",
    )


def test_every_minor_has_its_sandbox_image() -> None:
    assert all(row["pause"] for row in versions.minors().values())
    assert node_software.sandbox("1.34") == "registry.k8s.io/pause:3.10.1"
    assert node_software.sandbox("1.99") == node_software.sandbox(list(versions.minors())[-1])


def test_mirrors_keep_the_names_of_images() -> None:
    part = state(gpunodes_image_mirrors={"docker.io": "https://m/"}).wanted["containerd"]
    assert part.files[1].path == "/etc/containerd/certs.d/docker.io/hosts.toml"
    assert 'server = "https://registry-1.docker.io"\n\n[host."https://m"]\n' in part.files[1].content


def test_docker_brings_cri_dockerd_and_pulls_images_itself() -> None:
    made = state(gpunodes_runtime="docker")
    assert list(made.wanted) == ["node", "containerd", "kubernetes", "registration", "docker", "cri_dockerd"]
    assert names(made.wanted["docker"]) == ["docker.io", "docker-cli"]
    assert names(state(gpu_machine(os=DEBIAN_12), gpunodes_runtime="docker").wanted["docker"]) == [
        "docker-ce",
        "docker-ce-cli",
    ]
    assert made.wanted["containerd"].images == made.wanted["kubernetes"].images == []
    unit = made.wanted["cri_dockerd"].files[0].content
    assert unit.endswith(f"--pod-infra-container-image={node_software.sandbox('1.36')}\n")


def test_kube_proxys_image_is_pulled_once_its_version_is_known() -> None:
    minor, exact = state(), state(gpunodes_kubernetes_version="1.36.3")
    assert minor.wanted["kubernetes"].images == ["registry.k8s.io/kube-proxy:v{kubelet}"]
    assert exact.wanted["kubernetes"].images == []
    assert minor.images == minor.wanted["containerd"].images
    assert exact.wanted["containerd"].images == ["registry.k8s.io/kube-proxy:v1.36.3", *minor.images]


def test_packages_of_kubernetes_have_one_version() -> None:
    worker, control = (
        state(gpu_machine(os=ROCKY, package_manager="dnf"), groups=(group,), gpunodes_kubernetes_version=version)
        for group, version in (("workers", "1.36"), ("control_plane", "1.36.3"))
    )
    assert {package.version for package in worker.wanted["kubernetes"].packages if package.hold} == {"1.36.*"}
    assert {package.version for package in control.wanted["kubernetes"].packages if package.hold} == {"1.36.3-*"}
    assert set(names(control.wanted["kubernetes"])) - set(names(worker.wanted["kubernetes"])) == {"kubectl"}
    assert "conntrack-tools" in names(worker.wanted["kubernetes"])


def test_the_kubelet_gets_its_gates_and_loses_them_again() -> None:
    without = state(gpunodes_pod_pids_limit=-1)
    some = state(gpunodes_feature_gates={"DRAConsumableCapacity": True}, gpunodes_pod_pids_limit=-1)
    paths = list(without.wanted["kubernetes"].absent)
    written = [file.path for file in some.wanted["kubernetes"].files][2:]
    assert sorted([*written, *some.wanted["kubernetes"].absent]) == sorted(paths)
    assert list(state().wanted["kubernetes"].absent) == [written[0]], "the limit of processes alone keeps the drop-in"
    config = json.loads(some.wanted["kubernetes"].files[2].content)
    assert config["featureGates"] == {"DRAConsumableCapacity": True}


# GPU software


def test_a_machine_without_gpus_gets_none() -> None:
    gpu = state(gpunodes_gpu_taint=True).gpu
    assert (gpu.gpus, gpu.services, gpu.labels, gpu.wanted) == (0, (), {}, {})
    assert state(gpunodes_gpu_taint=True).taints == []


def test_what_pins_comes_first_and_the_toolkit_has_one_version() -> None:
    made = state(gpu_machine(GPU), gpunodes_driver_branch="580").gpu
    driver, toolkit = made.wanted["gpu_driver"], made.wanted["container_toolkit"]
    assert [package.name for package in driver.packages if package.first] == ["nvidia-driver-pinning-580"]
    without = gpu_machine(GPU)
    without["gpu"]["headers"] = {"running": False, "package": "linux-headers-6.12.1"}
    headers = next(package for package in state(without).gpu.wanted["gpu_driver"].packages if package.first)
    assert headers == packages.RequestedPackage("linux-headers-6.12.1", first=True)
    assert [repository.name for repository in driver.repositories] == ["nvidia"]
    assert driver.driver == spec.Driver(("nvidia", "nvidia-uvm"), "nouveau")
    assert len(toolkit.packages) == 4
    assert {package.same_as for package in toolkit.packages} == {"", toolkit.packages[0].name}
    assert [repository.name for repository in toolkit.repositories] == ["nvidia_toolkit"]
    assert {part.section for part in made.wanted.values()} == {"gpu"}


def test_a_driver_of_others_is_no_role_of_gpunodes() -> None:
    found = gpu_machine({**GPU, "driver": "nvidia"})
    driver = {"module": "580.65.06", "loaded": True, "origin": "runfile", "packages": {}, "flavour": "open"}
    found["gpu"]["driver"] = driver
    gpu = state(found, gpunodes_driver_source="existing").gpu
    assert (gpu.gpus, gpu.services, list(gpu.wanted)) == (1, (), ["container_toolkit", "gpu_mig"])
    assert gpu.wanted["container_toolkit"].devices


@pytest.mark.parametrize(("runtimes", "configured"), [(None, ["containerd"]), (["docker"], ["docker"]), ([], [])])
def test_the_toolkit_configures_the_runtimes(runtimes: list[str] | None, configured: list[str]) -> None:
    part = state(gpu_machine(GPU), runtimes=runtimes).gpu.wanted["container_toolkit"]
    assert [service.name for service in part.services] == configured
    first, *others = part.generated
    assert [path.rpartition("/")[2] for path in (file.path for file in others)] == {
        (): [],
        ("containerd",): ["99-nvidia.toml"],
        ("docker",): ["gpunodes-docker.toml", "daemon.json"],
    }[tuple(configured)]
    # No variable gives an unprivileged container a GPU.
    assert first.path == "/etc/nvidia-container-runtime/config.toml"
    assert "--set=accept-nvidia-visible-devices-envvar-when-unprivileged=false" in first.command


def test_gpus_of_a_node_with_another_runtime_are_refused() -> None:
    with pytest.raises(WrongInput, match="the container runtime is cri-o"):
        state(gpu_machine(GPU), node={"runtime": "cri-o"})
    assert state(node={"runtime": "cri-o"}).gpu.wanted == {}


def test_cuda_versions_are_installed_side_by_side_and_checked() -> None:
    made = state(gpu_machine(GPU), gpunodes_cuda_versions=["13.0", "13.1"], gpunodes_cudnn_version="9")
    checks = made.gpu.wanted["cuda"].checks
    assert checks[0] == spec.OutputCheck(("/usr/local/cuda-13.0/bin/nvcc", "--version"), "release 13.0")
    assert checks[1].command[0] == "/usr/local/cuda-13.1/bin/nvcc"
    assert [check.command[2] for check in checks[2:]] == [
        "import ctypes; ctypes.CDLL('libcudart.so.13')",
        "import ctypes; ctypes.CDLL('libcudart.so.13')",
        "import ctypes; ctypes.CDLL('libcudnn.so.9')",
    ]
    assert "cuda" not in state(gpu_machine(GPU)).gpu.wanted


def source_of(source: Source, found: dict[str, Any], settings: dict[str, dict[str, str]]) -> spec.Repository:
    [repository] = package_sources.of_packages([Package(Group.DRIVER, "x", "", "", source, "")], found, settings)
    return repository


@pytest.mark.parametrize(
    ("system", "version", "arch", "url", "key"),
    [
        ("debian", "13", "x86_64", "debian13/x86_64/", "8793F200.pub"),
        ("ubuntu", "24.04", "aarch64", "ubuntu2404/sbsa/", "3bf863cc.pub"),
        ("rocky", "9.4", "x86_64", "rhel9/x86_64/", "D42D0685.pub"),
    ],
)
def test_nvidias_source_and_its_key(system: str, version: str, arch: str, url: str, key: str) -> None:
    found = {"os": {"id": system, "version": version, "codename": "x", "name": system}, "arch": arch}
    source = source_of(Source.NVIDIA, found, {"nvidia": NONE})
    assert source.url == f"https://developer.download.nvidia.com/compute/cuda/repos/{url}"
    assert source.key == source.url + key
    assert len(source.fingerprint.replace(" ", "")) == 40


def test_a_mirror_and_the_distribution() -> None:
    mirror = {"url": "http://m/{system}{release}/", "key": "-----BEGIN {system}", "fingerprint": "F"}
    nvidia = source_of(Source.NVIDIA, gpu_machine(), {"nvidia": mirror})
    assert nvidia == spec.Repository("nvidia", "http://m/debian13/", "-----BEGIN {system}", "F")
    debian = source_of(Source.DISTRIBUTION, gpu_machine(), {"debian": NONE})
    assert debian.components == "main contrib non-free non-free-firmware"
    assert debian.key.startswith("/usr/share/keyrings/")
    assert facts.placeholders({"id": "ubuntu", "version": "22.04", "codename": None}, "x86_64")["{release}"] == "2204"


# Labels and taints


@pytest.mark.parametrize(
    ("groups", "given", "expected"),
    [
        (("workers", "dc1", "h100"), {}, {}),
        (("workers", "dc1", "h100"), {"gpunodes_pools": {"h100": {}, "v100": {}}}, {"gpunodes.dev/pool": "h100"}),
        (("workers", "dc1"), {"gpunodes_pools": {"h100": {}}}, {}),
        (("workers", "h100"), {"gpunodes_pools": None}, {}),
        (("workers", "a"), {"gpunodes_pool": "mine"}, {"gpunodes.dev/pool": "mine"}),
        (
            ("workers", "a", "b"),
            {"gpunodes_pool": "mine", "gpunodes_pools": {"a": {}, "b": {}}},
            {"gpunodes.dev/pool": "mine"},
        ),
    ],
)
def test_a_pool_is_a_group_that_was_meant_as_one(
    groups: tuple[str, ...], given: dict[str, Any], expected: dict[str, str]
) -> None:
    assert state(groups=groups, **given).labels == expected
    own = state(groups=groups, **given, gpunodes_node_labels={"gpunodes.dev/pool": "own", "team": "x"})
    assert own.labels == {"gpunodes.dev/pool": "own", "team": "x"}


def test_a_machine_in_two_pools_is_refused() -> None:
    with pytest.raises(WrongInput, match=r"names dc1 and h100.*one pool; set its gpunodes_pool"):
        state(groups=("workers", "h100", "dc1"), gpunodes_pools={"h100": {}, "dc1": {}})


def test_nodes_with_gpus_get_the_taint_if_it_is_set() -> None:
    own = [{"key": "k", "value": "v", "effect": "NoSchedule"}]
    assert state(gpu_machine(GPU), gpunodes_node_taints=own).taints == own
    tainted = state(gpu_machine(GPU), gpunodes_node_taints=own, gpunodes_gpu_taint=True)
    assert tainted.taints == [*own, {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]


# The filter


def test_the_filter_gives_plain_data_from_which_the_module_reads_the_same() -> None:
    request = given(gpu_machine(GPU), gpunodes_runtime="docker", gpunodes_cuda_versions=["13.0"])
    document, made = filtered(request), desired(request)
    assert isinstance(made, Desired)
    for plain, parts in ((document["wanted"], made.wanted), (document["gpu"]["wanted"], made.gpu.wanted)):
        for role, part in parts.items():
            again = dataclasses.asdict(spec.spec_from(plain[role]))
            assert json.dumps(again) == json.dumps(dataclasses.asdict(part))


def test_the_filter_reports_all_conflicts_at_once() -> None:
    request = given(gpu_machine(GPU), gpunodes_driver_branch="1", gpunodes_cuda_versions=["99.9"])
    with pytest.raises(AnsibleFilterError, match="gpu-1: the driver branch '1' is unknown") as caught:
        filtered(request)
    assert "CUDA 99.9 is unknown" in str(caught.value)


def test_an_upgrade_of_a_node_that_others_made_replaces_packages_of_kubernetes_only() -> None:
    """Its runtime may get GPUs by its configuration, and its kubelet settings by files of its unit."""
    facts = gpu_machine()
    own = {**facts, "kubernetes": {**facts["kubernetes"], "role": "worker", "configured": False}}
    wanted = state(own, target="1.36.3").wanted
    assert {role for role, each in wanted.items() if each != spec.Spec()} == {"kubernetes"}
    kubernetes = wanted["kubernetes"]
    assert (kubernetes.files, kubernetes.directories, kubernetes.absent) == ((), (), ())
    assert [(each.name, each.replace) for each in kubernetes.packages] == [("kubelet", True), ("kubeadm", True)]
    assert [each.name for each in kubernetes.services] == ["kubelet"]
    # `gpunodes up` converges it, and an upgrade of a node of gpunodes brings its configuration, too.
    assert state(own).wanted["containerd"].files
    assert state(facts, target="1.36.3").wanted["containerd"].files
