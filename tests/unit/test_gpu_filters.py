"""Filters of the GPU roles: the sources that are checked, and verifications as text and as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from gpunodes.ansible.filter import gpu as filters
from gpunodes.model import GpuLevel, GpuVerification, Machine, Phase, Role, TaskStarted
from gpunodes.operations import gpu_verify, phases
from gpunodes.operations.tracker import Tracker
from gpunodes.views import gpu_verification

from tests.stand_ins import facts as preflight_facts

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
NONE: dict[str, str] = {"url": "", "key": "", "fingerprint": ""}


def machine(*functions: dict[str, Any]) -> dict[str, Any]:
    system = {"id": "debian", "version": "13", "codename": "trixie", "name": "Debian GNU/Linux 13"}
    gpu = {"functions": list(functions), "nvswitches": 0, "nouveau": "available", "headers": {"running": True}}
    return preflight_facts(os=system, kernel="6.12.1", time=0, gpu=gpu, packages={}, hostname="gpu-1")


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


LEVELS = [
    {"level": "host", "state": "ok", "fact": "driver 580.65.06, 1 x H100", "wanted": "", "remedy": ""},
    {"level": "container", "state": "failed", "fact": "none", "wanted": "all", "remedy": "write it anew"},
]


def test_the_first_failed_level_is_said() -> None:
    assert filters.failed_level(LEVELS) == "container: none; wanted: all; write it anew"
    assert filters.failed_level(LEVELS[:1]) == ""


def test_proofs_are_put_together_from_machine_and_cluster() -> None:
    served = [{"level": "kubelet", "state": "ok", "fact": "1", "wanted": "", "remedy": ""}]
    proof = gpu_verify.assemble("gpu-1", machine(GPU), LEVELS[:1], served, "", "the run failed")
    assert [level.level for level in proof.levels] == ["host", "kubelet"]
    assert (proof.gpus, proof.healthy) == (1, True)
    assert gpu_verify.assemble("cpu-1", machine(), [], [], "").healthy
    assert gpu_verify.assemble("gone", None, [], [], "no route").cause == "no route"
    assert not gpu_verify.assemble("gpu-1", machine(GPU), LEVELS, [], "container: ...").healthy


def test_a_machine_that_failed_after_its_last_good_level_is_not_healthy() -> None:
    proof = gpu_verify.assemble("gpu-1", machine(GPU), LEVELS[:1], [], "the API does not respond")
    assert (proof.healthy, proof.cause) == (False, "the API does not respond")


def test_nothing_reported_and_a_run_that_failed_is_not_healthy() -> None:
    assert gpu_verify.assemble("gpu-1", machine(GPU), [], [], "", "the run failed").cause == "the run failed"


def test_the_table_has_a_column_for_each_level() -> None:
    proofs = [
        GpuVerification("gpu-1", 1, tuple(GpuLevel(**level) for level in LEVELS)),
        GpuVerification("cpu-1", 0, ()),
    ]
    lines = gpu_verification.table(proofs).splitlines()
    assert lines[0].split() == ["machine", "GPUs", "host", "container", "kubelet", "pod"]
    assert lines[1].split() == ["gpu-1", "1", "ok", "failed", "-", "-"]
    assert lines[3] == "gpu-1: container: none; wanted: all; write it anew"
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
