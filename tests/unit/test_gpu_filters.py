"""The plan in the words of the modules, and the proof in the words of a person."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from gpunodes.ansible.filter_plugins import gpunodes_gpu as filters
from gpunodes.ansible.module_utils.gpunodes import facts
from gpunodes.model import GpuLevel, GpuVerification, Machine, Phase, Role, TaskStarted
from gpunodes.operations import gpu_verify, phases
from gpunodes.operations.tracker import Tracker
from gpunodes.views import gpu_verification
from test_preflight import facts as preflight_facts

REQUESTED: dict[str, Any] = {
    "gpunodes_driver_branch": "",
    "gpunodes_driver_source": "",
    "gpunodes_cuda_versions": [],
    "gpunodes_cudnn_version": "",
    "gpunodes_runtime": "containerd",
    "gpunodes_feature_gates": {},
}
GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
NONE: dict[str, str] = {"url": "", "key": "", "fingerprint": ""}


def machine(*functions: dict[str, Any]) -> dict[str, Any]:
    system = {"id": "debian", "version": "13", "codename": "trixie", "name": "Debian GNU/Linux 13"}
    gpu = {"functions": list(functions), "nvswitches": 0, "nouveau": "available", "headers": {"running": True}}
    return preflight_facts(os=system, kernel="6.12.1", time=0, gpu=gpu, packages={}, hostname="gpu-1")


def installed(found: dict[str, Any], **requested: Any) -> dict[str, Any]:
    return filters.gpu_install(filters.gpu_plan(found, "gpu-1", {**REQUESTED, **requested}, "1.36.3"))


def test_machines_with_gpus_are_asked_for_nvidia_s_sources() -> None:
    none = {"nvidia": NONE, "nvidia_toolkit": NONE}
    asked = filters.checked_gpu_sources(none, {}, "nvcr.io/nvidia/k8s-device-plugin:v0.19.0")
    assert all(source["gpus"] for source in asked)
    assert {source["name"] for source in asked} == {"images of nvcr.io", "nvidia", "nvidia-container-toolkit"}
    debian = next(source for source in asked if "debian 13" in source.get("systems", ()))
    assert debian["key"].endswith("{cuda_arch}/8793F200.pub")
    mine = {"nvidia": {"url": "http://m/", "key": "KEY", "fingerprint": ""}, "nvidia_toolkit": NONE}
    mirrored = filters.checked_gpu_sources(mine, {"nvcr.io": "http://m"}, "nvcr.io/x:1")
    assert (mirrored[0]["url"], mirrored[1]["url"], mirrored[1]["key"]) == ("http://m/v2/", "http://m/", "KEY")


def test_a_machine_without_gpus_gets_nothing() -> None:
    made = installed(machine())
    assert made["gpus"] == 0
    assert [made[concern]["packages"] for concern in ("driver", "cuda", "toolkit")] == [[], [], []]
    assert (made["gates"], made["services"], made["labels"]) == ({}, [], {})


def test_what_pins_comes_first_and_the_toolkit_has_one_version() -> None:
    made = installed(machine(GPU), gpunodes_driver_branch="580")
    first = [package["name"] for package in made["driver"]["packages"] if package["first"]]
    assert first == ["nvidia-driver-pinning-580"]
    without = machine(GPU)
    without["gpu"]["headers"] = {"running": False, "package": "linux-headers-6.12.1"}
    packages = installed(without)["driver"]["packages"]
    assert next(package["name"] for package in packages if package["first"]) == "linux-headers-6.12.1"
    assert made["driver"]["sources"] == ["nvidia"]
    assert made["conflicting_module"] == "nouveau"
    toolkit = made["toolkit"]["packages"]
    assert len(toolkit) == 4
    assert {package["same_as"] for package in toolkit} == {"", toolkit[0]["name"]}
    assert made["toolkit"]["sources"] == ["nvidia_toolkit"]


def test_cuda_versions_are_installed_side_by_side_and_checked() -> None:
    made = installed(machine(GPU), gpunodes_cuda_versions=["13.0", "13.1"], gpunodes_cudnn_version="9")
    assert made["cuda"]["homes"] == {"13.0": "/usr/local/cuda-13.0", "13.1": "/usr/local/cuda-13.1"}
    checks = filters.cuda_checks(made["cuda"]["homes"], made["cuda"]["libraries"])
    assert checks[0] == {"command": ["/usr/local/cuda-13.0/bin/nvcc", "--version"], "output": "release 13.0"}
    assert [check["command"][2] for check in checks[2:]] == [
        "import ctypes; ctypes.CDLL('libcudart.so.13')",
        "import ctypes; ctypes.CDLL('libcudart.so.13')",
        "import ctypes; ctypes.CDLL('libcudnn.so.9')",
    ]


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
    [source] = filters.gpu_sources(["nvidia"], found, {"nvidia": NONE})
    assert source["url"] == f"https://developer.download.nvidia.com/compute/cuda/repos/{url}"
    assert source["key"] == source["url"] + key
    assert len(source["fingerprint"].replace(" ", "")) == 40


def test_a_mirror_and_the_distribution() -> None:
    mirror = {"url": "http://m/{system}{release}/", "key": "-----BEGIN {system}", "fingerprint": "F"}
    sources = filters.gpu_sources(["nvidia", "distribution"], machine(), {"nvidia": mirror, "debian": NONE})
    assert sources[0] == {
        "name": "nvidia",
        "url": "http://m/debian13/",
        "key": "-----BEGIN {system}",
        "fingerprint": "F",
        "suite": "/",
    }
    assert sources[1]["components"] == "main contrib non-free non-free-firmware"
    assert sources[1]["key"].startswith("/usr/share/keyrings/")
    assert facts.placeholders({"id": "ubuntu", "version": "22.04", "codename": None}, "x86_64")["{release}"] == "2204"


LEVELS = [
    {"level": "host", "state": "ok", "fact": "driver 580.65.06, 1 x H100", "wanted": "", "remedy": ""},
    {"level": "container", "state": "failed", "fact": "none", "wanted": "all", "remedy": "write it anew"},
]


def test_the_first_failed_level_is_said() -> None:
    assert filters.failed_level(LEVELS) == "container: none; wanted: all; write it anew"
    assert filters.failed_level(LEVELS[:1]) == ""


def test_proofs_are_put_together_from_machine_and_cluster() -> None:
    served = {"gpu-1": [{"level": "kubelet", "state": "ok", "fact": "1", "wanted": "", "remedy": ""}]}
    proof = gpu_verify.assemble("gpu-1", machine(GPU), LEVELS[:1], served, "")
    assert [level.level for level in proof.levels] == ["host", "kubelet"]
    assert (proof.gpus, proof.healthy) == (1, True)
    assert gpu_verify.assemble("cpu-1", machine(), [], {}, "").healthy
    assert gpu_verify.assemble("gone", None, [], {}, "no route").cause == "no route"
    assert not gpu_verify.assemble("gpu-1", machine(GPU), LEVELS, {}, "container: ...").healthy


def test_the_table_has_a_column_for_each_level() -> None:
    proofs = [
        GpuVerification("gpu-1", 1, tuple(GpuLevel(**level) for level in LEVELS)),
        GpuVerification("cpu-1", 0, ()),
    ]
    lines = gpu_verification.table(proofs).splitlines()
    assert lines[0].split() == ["machine", "GPUs", "host", "container", "kubelet", "pod"]
    assert lines[1].split() == ["gpu-1", "1", "ok", "failed", "-", "-"]
    assert lines[3] == "gpu-1: container: none; wanted: all. write it anew."
    document = json.loads(gpu_verification.verification_document(proofs, 3))
    assert (document["schema"], document["machines"][0]["healthy"]) == ("gpunodes.gpu-verify/1", False)


def test_a_phase_that_does_not_concern_a_machine_is_not_shown() -> None:
    shown: list[tuple[str, str]] = []

    class Shows:
        def begin(self, title: str, machines: Any) -> None:
            pass

        def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
            shown.append((machine, f"{phase.name} {number}/{total}"))

        def task(self, machine: str, task: str) -> None:
            shown.append((machine, task))

        def findings(self, findings: Any) -> None:
            pass

        def ended(self, result: Any) -> None:
            pass

    machines = [Machine("cpu-1", "10.0.0.1", Role.WORKER), Machine("gpu-1", "10.0.0.2", Role.WORKER)]
    work = [phases.KUBERNETES, phases.GPU_DRIVER, phases.CUDA]
    tracker = Tracker(machines, work, Shows(), {"gpu_driver": {"cpu-1"}, "cuda": {"cpu-1", "gpu-1"}})
    for name in ("cpu-1", "gpu-1"):
        # Ansible starts a task before it sees that it skips it.
        tracker.on_event(TaskStarted(name, "gpu_driver", "Install the driver and load it"))
    assert shown == [("gpu-1", "gpu_driver 2/2"), ("gpu-1", "installing packages, building the kernel modules")]


@pytest.mark.parametrize(
    "found",
    [
        {"node-role.kubernetes.io/control-plane": ""},
        {"gpunodes.dev/pool": "a"},
        {"gpunodes.dev/gpu-x": "{{ x }}"},
        {"gpunodes.dev/gpu-x": ["a"]},
        {"gpunodes.dev/gpu-x\n": "a"},
    ],
    ids=str,
)
def test_a_machine_labels_its_node_with_its_gpus_only(found: dict[str, Any]) -> None:
    """A machine's report of its GPUs cannot give its node a role, a pool, or any other label."""
    with pytest.raises(AnsibleFilterError, match="gpu-1: it reports"):
        filters.labels(found, "gpu-1")
    good = {"gpunodes.dev/gpu-product": "NVIDIA-H100-80GB-HBM3", "gpunodes.dev/gpu-count": "8"}
    assert filters.labels(good, "gpu-1") == good
