"""The commands `gpu upgrade plan` and `os plan` with wrong input, and the filters of their playbooks; no machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from click.testing import CliRunner
from gpunodes.ansible.filter import general, gpu
from gpunodes.cli import root
from gpunodes.errors import WrongInput
from gpunodes.settings import defaults

from tests.hostile import ATTACKS, hostile
from tests.unit.planner.test_gpu_upgrade import facts as gpu_facts
from tests.unit.planner.test_kernels import PENDING, RELEASE, facts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu", "upgrade", "plan", "gpu-1", "--driver", "111"), "the driver branch '111' is unknown"),
        (("gpu", "upgrade", "plan", "gpu-1", "--driver", "590.*"), "is not a version of the driver"),
        (("gpu", "upgrade", "plan", "gpu-1", "--driver", "590"), "there is no inventory at"),
        (("os", "plan", "gpu-1"), "there is no inventory at"),
    ],
)
def test_wrong_input_is_found_before_any_machine_is_contacted(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(root, arguments)
    assert isinstance(result.exception, WrongInput)
    assert message in str(result.exception)


def test_what_is_requested_of_an_upgrade() -> None:
    made = general.os_request(facts(), PENDING, "gpu-1", security=True)
    assert (made["security"], made["driver"], list(made["refused"])) == (True, True, [RELEASE])
    assert {"kubelet", "nvidia-*", "containerd"} <= {*made["keep"]}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_report_of_pending_packages_is_refused(attack: str) -> None:
    report: dict[str, Any] = {**PENDING, "kernels": [attack]}
    reports: list[Any] = [report, hostile(PENDING), None, [], attack]
    for bad in reports:
        with pytest.raises(AnsibleFilterError, match="gpu-1: of its pending upgrades, "):
            general.os_request(facts(), bad, "gpu-1", security=False)


def test_why_a_driver_cannot_be_upgraded() -> None:
    settings = {**defaults(), "gpunodes_driver_branch": "590"}
    assert gpu.driver_upgrade_problems(gpu_facts(), "gpu-1", settings) == []
    [problem] = gpu.driver_upgrade_problems(gpu_facts("V100"), "gpu-1", settings)
    assert problem.startswith("gpu-1: driver 590 does not support Volta")
    assert "no driver is requested" in gpu.driver_upgrade_problems(gpu_facts(), "gpu-1", defaults())[0]
    assert gpu.without_driver(gpu_facts())["gpu"]["driver"]["module"] is None


def test_packages_of_exact_requests() -> None:
    settings = {**defaults(), "gpunodes_driver_branch": "580.95.05", "gpunodes_cuda_versions": ["13.0.2"]}
    found = gpu.exact_packages(settings)
    assert [*found] == ["nvidia"]
    assert {"nvidia-open", "cuda-toolkit-13-0"} <= {*found["nvidia"]}
    assert gpu.exact_packages(defaults()) == {}
    exact = {**defaults(), "gpunodes_kubernetes_version": "1.36.3", "gpunodes_containerd_version": "2.1.4"}
    assert gpu.exact_packages(exact) == {
        "kubernetes": ["kubeadm", "kubectl", "kubelet"],
        "docker": ["containerd.io"],
        "system": ["containerd"],
    }
