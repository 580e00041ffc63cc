"""Clusters without a GPU: every command that concerns GPUs says so and succeeds. Reports of machines are stand-ins."""

from __future__ import annotations

import json

from gpunodes.model import GpuVerification, Role
from gpunodes.operations import gpu_verify
from gpunodes.planner import gpu
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.preflight import judge
from gpunodes.views import gpu as plans
from gpunodes.views import gpu_verification

from tests.hostile import machine_report

NO_GPU = {"functions": [], "nvswitches": 0, "nouveau": "absent", "runtimes": {}}


def reports(count: int = 2) -> dict[str, dict[str, object]]:
    return {f"m-{number}": machine_report(f"m-{number}", number, gpu=NO_GPU, swap=[]) for number in range(1, count + 1)}


def test_gpu_plan_says_that_there_is_nothing_to_install() -> None:
    found = gpu.Plans(
        "1.36", [gpu.planned(name, facts, gpu.RequestedSoftware("1.36")) for name, facts in reports().items()]
    )
    assert found.exit_code == 0
    text = plans.plans(found)
    assert text.count("no NVIDIA GPU: joins as a CPU node") == 2
    for word in ("driver", "nouveau", "reboot", "warning"):
        assert word not in text
    assert json.loads(plans.plans_document(found))["machines"][0]["plan"]["gpus"] == []


def test_gpu_plan_warns_of_software_that_is_requested_for_nothing() -> None:
    (facts,) = reports(1).values()
    found = gpu.plan("m-1", facts, gpu.RequestedSoftware("1.36", driver="580", cuda=("13.0",)))
    assert isinstance(found, gpu.Plan)
    assert [warning.partition(": ")[2] for warning in found.warnings] == [
        "the requested driver 580 has no effect",
        "the requested CUDA 13.0 has no effect",
    ]


def test_gpu_verify_says_that_there_was_nothing_to_verify() -> None:
    found = [gpu_verify.assemble(name, facts, [], [], "") for name, facts in reports().items()]
    assert all(each.healthy and each.gpus == 0 for each in found)
    assert "there was nothing to verify" in gpu_verification.table(found)
    assert json.loads(gpu_verification.verification_document(found, 0))["exit_code"] == 0


def test_gpu_verify_is_silent_about_that_if_a_machine_has_gpus_or_did_not_report() -> None:
    cpu = GpuVerification("cpu-1", 0, ())
    for other in (GpuVerification("gpu-1", 8, ()), GpuVerification("dead-1", 0, (), "it is unreachable")):
        assert "nothing to verify" not in gpu_verification.table([cpu, other])
    assert "nothing to verify" not in gpu_verification.table([])


def test_preflight_of_a_cluster_without_gpus_has_no_finding_about_gpus() -> None:
    roles = {"m-1": Role.CONTROL_PLANE, "m-2": Role.WORKER}
    candidates = [MachineFacts(name, roles[name], facts, read_at=None) for name, facts in reports().items()]
    found = judge(candidates, ClusterRequirements("1.36"))
    assert [str(finding) for finding in found if "gpu" in finding.check] == []
