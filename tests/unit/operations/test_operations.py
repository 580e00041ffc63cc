"""Phases, the tracker's verdicts, exit codes and versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import ExitCode, WrongInput, exit_code_for
from gpunodes.identity.model import MachineIdentity
from gpunodes.model import (
    Machine,
    MachineResult,
    Only,
    Outcome,
    PreflightFinding,
    Role,
    RunResult,
    Severity,
    TaskEnded,
    TaskStarted,
)
from gpunodes.operations import gpu_install, phases, status
from gpunodes.operations.tracker import Tracker
from gpunodes.planner import versions

from tests.stand_ins import Silent

TWO = [Machine("a", "10.0.0.1", Role.WORKER), Machine("b", "10.0.0.2", Role.WORKER)]
WORK = (phases.NODE, phases.WORKER)


def ended(machine: str, phase: str, outcome: Outcome = Outcome.UNCHANGED, msg: str = "") -> TaskEnded:
    return TaskEnded(machine, phase, f"Do {phase}", outcome, 1.0, {"msg": msg})


def test_the_tracker_reports_phases_and_changes() -> None:
    view = Silent()
    tracker = Tracker(TWO, WORK, view)
    for event in (
        TaskStarted("a", "node", "x"),
        ended("a", "node", Outcome.CHANGED),
        ended("b", "node"),
        ended("a", "worker"),
        ended("b", "worker"),
    ):
        tracker.on_event(event)
    a, b = tracker.results(ok=True)
    assert (a.outcome, a.changes) == (Outcome.CHANGED, ("Do node",))
    assert b.outcome is Outcome.UNCHANGED
    assert view.seen == [("a", "node"), ("b", "node"), ("a", "worker"), ("b", "worker")]
    assert view.positions == [(1, 2), (1, 2), (2, 2), (2, 2)]
    assert view.tasks == ["a: x", "a: ", "b: ", "a: ", "b: "]


def test_a_task_that_may_take_minutes_tells_what_the_machine_does() -> None:
    view = Silent()
    tracker = Tracker(TWO, WORK, view)
    tracker.on_event(TaskStarted("a", "node", "Start the control plane"))
    assert view.tasks == ["a: waiting for the API server"]
    roles = Path(__file__).parents[3].glob("roles/*/tasks/*.yml")
    names = set(re.findall(r"- name: (.*)", "".join(path.read_text() for path in roles)))
    assert set(phases.LONG_TASKS) <= names


def test_notes_of_a_module_are_kept_if_they_are_a_list() -> None:
    """Notes for the user are in the machine's result; notes of another type are ignored."""
    tracker = Tracker(TWO, WORK, Silent())
    tracker.on_event(TaskEnded("a", "node", "x", Outcome.CHANGED, 1.0, {"notes": ["pods deleted by force: x/y", 1]}))
    tracker.on_event(TaskEnded("b", "node", "x", Outcome.CHANGED, 1.0, {"notes": "no list"}))
    a, b = tracker.results(ok=True)
    assert (a.notes, b.notes) == (("pods deleted by force: x/y", "1"), ())


def test_the_first_cause_is_kept() -> None:
    tracker = Tracker(TWO, WORK, Silent())
    for event in (
        ended("a", "node", Outcome.FAILED, "first"),
        ended("a", "worker", Outcome.FAILED, "last"),
        ended("b", "node"),
        ended("b", "worker"),
    ):
        tracker.on_event(event)
    a, b = tracker.results(ok=False)
    assert (a.cause, a.phase) == ("first", "node")
    assert b.outcome is Outcome.UNCHANGED


def test_a_machine_that_a_plugin_no_longer_lists_has_failed() -> None:
    """Ansible skips it with a warning: it was unchanged."""
    tracker = Tracker(TWO, WORK, Silent())
    tracker.on_event(ended("a", "node"))
    a, b = tracker.results(ok=True)
    assert (a.outcome, b.outcome) == (Outcome.UNCHANGED, Outcome.FAILED)
    assert b.cause == "Ansible did not find it in the inventory again; run the command again"


def test_a_failure_elsewhere_that_ends_the_run_is_named() -> None:
    tracker = Tracker(TWO, WORK, Silent())
    tracker.on_event(ended("a", "node"))
    tracker.on_event(ended("control-1", "node", Outcome.UNREACHABLE, "Connection refused"))
    assert [result.outcome for result in tracker.results(ok=False)] == [Outcome.FAILED, Outcome.FAILED]
    assert "control-1 failed" in tracker.results(ok=False)[0].cause


def test_a_failure_in_a_phase_that_others_do_not_have_is_not_theirs() -> None:
    """A control plane without GPUs has finished when a GPU node fails in its burn-in, the last phase of the run."""
    tracker = Tracker(TWO, (*WORK, phases.BURN_IN), Silent(), {"burn_in": {"b"}})
    for event in (ended("a", "worker"), ended("b", "worker"), ended("b", "burn_in", Outcome.SKIPPED)):
        tracker.on_event(event)
    tracker.on_event(ended("a", "burn_in", Outcome.FAILED, "a DBE was found"))
    a, b = tracker.results(ok=False)
    assert (a.outcome, a.cause) == (Outcome.FAILED, "a DBE was found")
    assert (b.outcome, b.cause) == (Outcome.UNCHANGED, "")
    # One that has not reached its own last phase has not finished.
    behind = Tracker(TWO, (*WORK, phases.BURN_IN), Silent(), {"burn_in": {"b"}})
    behind.on_event(ended("b", "node"))
    behind.on_event(ended("a", "burn_in", Outcome.FAILED, "a DBE was found"))
    assert behind.results(ok=False)[1].cause == "stopped because a failed: a DBE was found"


def test_a_handled_failure_does_not_count() -> None:
    tracker = Tracker(TWO, WORK, Silent())
    tracker.on_event(ended("a", "node", Outcome.FAILED, "handled"))
    assert tracker.results(ok=True)[0].outcome is Outcome.UNCHANGED


@pytest.mark.parametrize(
    ("skip", "start", "skipped"),
    [
        ([], None, []),
        (["node"], None, ["node"]),
        (
            [],
            "kubernetes",
            ["preflight", "node", "nfs_client", "containerd", "docker", "registry_trust", "cri_dockerd"],
        ),
        (
            ["ready"],
            "docker_images",
            [
                "preflight",
                "node",
                "nfs_client",
                "containerd",
                "docker",
                "registry_trust",
                "cri_dockerd",
                "kubernetes",
                "ready",
            ],
        ),
    ],
)
def test_phases_are_skipped(skip: list[str], start: str | None, skipped: list[str]) -> None:
    every = (phases.PREFLIGHT, *phases.PREPARE, phases.WORKER, phases.READY)
    assert phases.skipped(every, skip, start) == skipped


def test_phases_that_do_not_apply_to_machines() -> None:
    machines = {"cpu", "gpu"}
    applicable = {Only.GPUS: {"gpu"}, Only.CUDA: set(), Only.NODES: {"cpu"}, Only.WITH_DOCKER: {"gpu"}}
    work = [phase for phase in gpu_install.OPERATION.phases if phase != phases.PREFLIGHT]
    assert phases.not_applicable(work, machines, applicable) == {
        "docker": {"cpu"},
        "docker_images": {"cpu"},
        "gpu_driver": {"cpu"},
        "container_toolkit": {"cpu"},
        "cuda": machines,
        "gpu_mig": {"cpu"},
        "gpu_machine": {"cpu"},
        "gpu_idle": {"gpu"},
        "pool": {"gpu"},
        "device_plugin": machines,
        "gpu_node": machines,
    }


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(WrongInput, match="unknown phase 'x'"):
        phases.skipped((phases.NODE,), ["x"], None)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Outcome.CHANGED, Outcome.UNCHANGED], ExitCode.DONE),
        ([Outcome.FAILED, Outcome.UNCHANGED], ExitCode.PARTLY),
        ([Outcome.FAILED, Outcome.UNREACHABLE], ExitCode.FAILED),
        ([], ExitCode.DONE),
    ],
)
def test_exit_codes(outcomes: list[Outcome], code: ExitCode) -> None:
    assert RunResult("join", [MachineResult(str(n), outcome) for n, outcome in enumerate(outcomes)]).exit_code is code


def test_findings_fail_a_run_and_warnings_do_not() -> None:
    def result(severity: Severity) -> RunResult:
        return RunResult("join", [], [PreflightFinding("a", "swap", Problem(""), severity)])

    assert result(Severity.ERROR).exit_code is ExitCode.FAILED
    assert result(Severity.WARNING).exit_code is ExitCode.DONE


@pytest.mark.parametrize(
    ("outcomes", "found_on", "code"),
    [
        # preflight: some machines pass.
        ({"a": Outcome.UNCHANGED, "b": Outcome.UNREACHABLE}, ["b"], ExitCode.PARTLY),
        ({"a": Outcome.UNCHANGED, "b": Outcome.UNCHANGED}, ["b"], ExitCode.PARTLY),
        ({"a": Outcome.UNCHANGED, "b": Outcome.UNREACHABLE}, ["a", "b"], ExitCode.FAILED),
        # join: preflight stopped it, so that no machine was changed.
        ({"a": Outcome.SKIPPED, "b": Outcome.SKIPPED}, ["b"], ExitCode.FAILED),
        ({"a": Outcome.SKIPPED}, ["control-1"], ExitCode.FAILED),
    ],
)
def test_a_machine_with_a_finding_has_failed(outcomes: dict[str, Outcome], found_on: list[str], code: ExitCode) -> None:
    findings = [PreflightFinding(name, "swap", Problem("")) for name in found_on]
    results = [MachineResult(name, outcome) for name, outcome in outcomes.items()]
    assert RunResult("preflight", results, findings).exit_code is code


@pytest.mark.parametrize(("failed", "machines", "code"), [(0, 0, 0), (0, 2, 0), (1, 2, 3), (2, 2, 1), (1, 1, 1)])
def test_the_exit_code_for_some_and_for_all_machines(failed: int, machines: int, code: int) -> None:
    assert exit_code_for(failed, machines) == code


@pytest.mark.parametrize("version", ["1.36", "1.36.3", "v1.35.4"])
def test_known_versions(version: str) -> None:
    assert versions.check(version) == version.removeprefix("v")


@pytest.mark.parametrize("version", ["1.20", "1.99.1", "latest", "1", "", "1.36.x"])
def test_unknown_versions_are_refused(version: str) -> None:
    with pytest.raises(WrongInput):
        versions.check(version)


def test_status_matches_nodes_with_machines() -> None:
    node = {"role": "worker", "ready": True, "reason": "", "schedulable": True, "version": "v1.36.3", "maintenance": ""}
    cluster = {
        "endpoint": "10.0.0.1:6443",
        "version": "v1.36.3",
        "nodes": [
            {**node, "name": "a", "address": "10.0.0.1"},
            {**node, "name": "other", "address": "10.0.0.9", "ready": False, "reason": "NetworkPluginNotReady"},
        ],
    }
    found = status.assemble([MachineIdentity(each.name, (each.address,)) for each in TWO], cluster)
    assert [(entry.name, entry.machine) for entry in found.nodes] == [("a", "a"), ("other", "")]
    assert found.missing == ["b"]
    assert [entry.ready for entry in found.nodes] == [True, False]
    assert found.warnings == []


def test_nodes_with_older_kubelets_are_named() -> None:
    """Such as one that was off during an upgrade."""
    kubelets = {"b": "v1.36.9", "a": "v1.35.4", "c": "v1.37.0", "d": "v1.37.1"}
    assert versions.behind("v1.37.0", kubelets) == (
        "kubelets are older than the API server (1.37.0): a, b; `gpunodes upgrade 1.37.0` upgrades them"
    )
    assert versions.behind("v1.35.4", kubelets) == ""
    assert "n4 and 2 more" in versions.behind("v1.37.0", {f"n{number}": "v1.36.10" for number in range(7)})
