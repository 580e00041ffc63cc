"""Plans of upgrades: wrong input, what the upgrades show of them first, the filters of their playbooks; no machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from click.testing import CliRunner
from gpunodes.ansible.filter import general, gpu
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.cli import root, terminal
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import PreflightFinding, Severity
from gpunodes.operations import gpu_upgrade_plan, os_plan, runtime_plan, switched_off, upgrade_plan
from gpunodes.operations.rolling import commands
from gpunodes.planner import gpu_upgrade, os_upgrade, runtime_upgrade
from gpunodes.planner.gpu_upgrade import PlannedUpgrade
from gpunodes.planner.upgrade_model import Part, Step, UpgradePlan
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.settings import defaults
from gpunodes.views import document

from tests.hostile import ATTACKS, hostile, is_plain
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


TEXT = "".join(ATTACKS)
UNREAD = Problem(TEXT, TEXT, TEXT)
# What each command reads first, and a line of it that it shows: each machine's free text is an attack.
PLANS: dict[str, tuple[Any, Any, str]] = {
    "os upgrade w-1 w-2": (
        os_plan,
        os_upgrade.OsPlans(
            False,
            [
                os_upgrade.planned("w-1", None, None, security=False, why=TEXT),
                os_upgrade.PlannedOs("w-2", reboot=(TEXT,), kept_back=(TEXT,)),
            ],
        ),
        "w-2: nothing to upgrade",
    ),
    "runtime upgrade w-1 w-2": (
        runtime_plan,
        runtime_upgrade.RuntimePlans(
            [
                runtime_upgrade.planned("w-1", None, TEXT),
                runtime_upgrade.planned("w-2", {"packages": [], "changes": [TEXT]}),
            ]
        ),
        "w-2: upgrade",
    ),
    "gpu upgrade start w-1 w-2 --driver 590": (
        gpu_upgrade_plan,
        gpu_upgrade.Upgrades(
            "590", [PlannedUpgrade("w-1", unreachable=TEXT), PlannedUpgrade("w-2", conflicts=(UNREAD,))]
        ),
        "w-2: NOT POSSIBLE",
    ),
    "upgrade start 1.37": (
        upgrade_plan,
        SimpleNamespace(
            plan=UpgradePlan(
                "1.37",
                "1.37.0",
                "1.36.3",
                [Step("w-2", Part.NODE, "1.36.3", "1.37.0", drained=True)],
                (),
                [PreflightFinding("w-1", "reachable", UNREAD, each) for each in (Severity.ERROR, Severity.WARNING)],
                (),
            )
        ),
        "1  w-2      kubelet  1.36.3  1.37.0  drained",
    ),
}


@pytest.mark.parametrize("command", PLANS)
@pytest.mark.parametrize("form", ["", "--json"])
def test_an_upgrade_shows_its_plan_first_line_by_line(
    command: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `plan` shows it, and without control characters; then its result, which also has what machines said."""
    operation, plan, line = PLANS[command]
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {cp-1: }}\nworkers: {hosts: {w-1: , w-2: }}\n")
    failed = RolloutResult("id", "os", [MachineRollout("w-1", RolloutOutcome.FAILED, TEXT)], stopped=TEXT)
    monkeypatch.setattr(operation, "run", lambda *_, **__: plan)
    monkeypatch.setattr(commands, "roll_out", lambda *_, **__: failed)
    monkeypatch.setattr(switched_off, "split", lambda _, machines, **__: (list(machines), {}))
    done = CliRunner().invoke(root, [*command.split(), "--yes", *form.split(), "-i", str(path)], standalone_mode=False)
    shown = done.stdout + done.stderr
    if isinstance(done.exception, GpunodesError):
        terminal.error(done.exception)
        shown += capsys.readouterr().err + document.error(done.exception)
        assert "see the plan above" in " ".join(shown.split())
    elif form:
        assert json.loads(done.stdout)["machines"][0]["why"] == TEXT
    assert is_plain(shown)
    assert line in [each.strip() for each in done.stderr.splitlines()]


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
