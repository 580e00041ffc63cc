"""Burn-in: its results in the history, and the taint of a node that joins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from gpunodes.ansible.module_utils.burn_in_taint import TAINT
from gpunodes.engine import history
from gpunodes.model import Outcome, Severity, TaskEnded
from gpunodes.operations import burn_in, burn_in_history, join, phases, up
from gpunodes.operations.tracker import _ANSWERS, NCCL_TASK, Tracker
from gpunodes.views import text

ROOT = Path(__file__).parents[3]
REPORT = {
    "tool": "DCGM 4.2.3 diagnostics, level 3",
    "summary": "12 tests passed",
    "results": [],
    "failed": "",
    "refused": "",
    "seconds": 900.5,
}
NCCL = {"gbs": 181.5, "summary": "NCCL all_reduce between 2 nodes: 181.5 GB/s", "failed": "", "skipped": ""}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def noted(report: Any, nccl: Any = None, **failures: TaskEnded) -> list[tuple[str, str, str]]:
    answers: dict[str, dict[str, Any]] = {"burn_in": {"gpu-1": report}, **({"nccl": {"gpu-1": nccl}} if nccl else {})}
    burn_in_history.note("10.0.0.1", ["gpu-1", "gpu-2"], answers, failures)
    return [(each.what, each.outcome, each.detail) for each in history.read("gpu-1")]


def test_a_result_is_in_the_history() -> None:
    assert noted(REPORT) == [(REPORT["tool"], "passed", REPORT["summary"])]
    (entry,) = history.read()
    assert (entry.kind, entry.seconds, entry.cluster) == (history.EntryKind.BURN_IN, 900.5, "10.0.0.1")


def test_a_history_that_cannot_be_written_is_a_warning_for_each_machine(tmp_path: Path) -> None:
    (tmp_path / "gpunodes").write_text("no folder")
    found = burn_in_history.note("10.0.0.1", ["gpu-1"], {"burn_in": {"gpu-1": REPORT}}, {})
    assert [(each.machine, each.severity) for each in found] == [("gpu-1", Severity.WARNING)]
    assert "cannot be made" in found[0].problem.found


def test_a_failure_names_test_and_gpu() -> None:
    failed = "DCGM 4.2.3 diagnostics, level 3: memory on GPU 3 (0000:5e:00.0): a DBE"
    assert noted({**REPORT, "failed": failed}, NCCL) == [(REPORT["tool"], "failed", failed)]


def test_nccl_counts_for_machines_that_passed_the_rest() -> None:
    slow = {**NCCL, "failed": "NCCL all_reduce between gpu-1, gpu-2: 2 GB/s"}
    assert noted(REPORT, NCCL)[0][1:] == ("passed", f"{REPORT['summary']}; {NCCL['summary']}")
    assert noted(REPORT, slow)[1][1:] == ("failed", slow["failed"])


def test_a_broken_nccl_test_is_no_pass() -> None:
    task = NCCL_TASK
    assert f"- name: {task}\n" in (ROOT / "roles/burn_in/tasks/main.yml").read_text()
    broken = TaskEnded("other", "burn_in", task, Outcome.FAILED, 1.0, {"msg": "no SSH server"})
    assert noted(REPORT, other=broken)[0][1:] == ("failed", "no SSH server")


@pytest.mark.parametrize(
    "report",
    [{}, {**REPORT, "refused": "python uses GPU 0"}, {**REPORT, "failed": 5}, {"failed": ""}, [1], "text", None],
)
def test_a_refusal_or_another_shape_is_no_result(report: Any) -> None:
    assert noted(report) == []


def test_control_characters_of_a_machine_do_not_reach_the_history() -> None:
    [(_, _, detail)] = noted({**REPORT, "failed": "a\x1b[2Jb\nc" + "x" * 5000})
    assert detail.isprintable()
    assert len(detail) <= 1000


def test_the_tracker_reads_the_results() -> None:
    ended = TaskEnded("gpu-1", phases.BURN_IN.name, "Burn in the GPUs", Outcome.UNCHANGED, 1.0, {"burn_in": REPORT})
    assert {"burn_in", "nccl"} == set(_ANSWERS[ended.phase])
    # A machine answers for itself, not what was measured between all of them.
    tracker = Tracker((), (), text.progress())
    tracker.on_event(replace(ended, result={"burn_in": REPORT, "nccl": {**NCCL, "failed": "wrong values"}}))
    assert tracker.answers == {"burn_in": {"gpu-1": REPORT}}
    tracker.on_event(replace(ended, task=NCCL_TASK, result={"nccl": NCCL}))
    assert tracker.answers["nccl"] == {"gpu-1": NCCL}


@pytest.mark.parametrize(
    ("report", "nccl", "tainted", "removed"),
    [
        (REPORT, {}, True, True),
        (REPORT, {"failed": ""}, False, True),
        (REPORT, {"failed": "2 GB/s"}, False, False),
        ({**REPORT, "failed": "memory on GPU 1: a DBE"}, {}, False, False),
        ({**REPORT, "refused": "python uses GPU 0"}, {}, True, True),
        ({**REPORT, "refused": "python uses GPU 0"}, {}, False, False),
        (None, {}, False, False),
    ],
    ids=["passed", "NCCL, too", "not NCCL", "failed", "refused", "refused, with a taint before", "not tested"],
)
def test_when_the_taint_goes(report: Any, nccl: dict[str, str], *, tainted: bool, removed: bool) -> None:
    """A condition with another result than true or false fails its task: the cause of a failed burn-in was lost.

    ``tainted``: this run added the taint.
    """
    tasks = DataLoader().load_from_file(str(ROOT / "roles/burn_in/tasks/main.yml"), trusted_as_template=True)
    [task] = [each for each in tasks if each["name"].startswith("Remove the taint from a node")]
    variables = {
        "burn_in_held": {"due": True, "changed": tainted},
        "burn_in_result": {"burn_in": report} if report else {"skipped": True},
        "burn_in_nccl": {"nccl": nccl} if nccl else {"skipped": True},
        "burn_in_passed": bool(report and not report["failed"] and not report["refused"]),
    }
    assert Templar(DataLoader(), variables=variables).evaluate_conditional(task["when"]) is removed


def test_a_join_ends_with_the_burn_in() -> None:
    for operation in (join.OPERATION, up.OPERATION):
        assert operation.phases[-2:] == (phases.BURN_IN, phases.STARTED), "pods come after it"
    assert [phase.name for phase in burn_in.OPERATION.phases] == [phases.BURN_IN.name]


def load(path: str) -> dict[str, Any]:
    found: dict[str, Any] = DataLoader().load_from_file(str(ROOT / path), trusted_as_template=True)
    return found


@pytest.mark.parametrize(
    ("setting", "gpus", "scales", "tainted"),
    [(True, 8, False, True), (True, 0, False, False), (False, 8, False, False), (True, 8, True, False)],
)
def test_a_new_gpu_node_registers_with_the_taint(setting: bool, gpus: int, scales: bool, tainted: bool) -> None:
    wired = load("playbooks/group_vars/all.yml")["worker_taints"]
    variables = {
        **load("roles/worker/defaults/main.yml"),
        **load("roles/worker/vars/main.yml"),
        "worker_taints": Templar(
            DataLoader(),
            variables={"gpunodes_burn_in": setting, "wiring_gpu": {"gpus": gpus}, "desired_state": {"scales": scales}},
        ).template(wired),
    }
    registration = Templar(DataLoader(), variables=variables).template(variables["_worker_settings"])[
        "nodeRegistration"
    ]
    assert registration["criSocket"] == "unix:///run/containerd/containerd.sock"
    assert registration.get("taints") == ([TAINT] if tainted else None)
