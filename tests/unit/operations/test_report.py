"""What a report gathers: every source may fail, and nothing is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gpunodes import cli
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import ExitCode, GpunodesError, Interrupted, WrongInput
from gpunodes.health.model import Action, State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import MachineCertificates, PreflightFinding, Role, Severity
from gpunodes.operations import preflight, report, switched_off
from gpunodes.operations.autoscale.commands import AutoscaleStatus, NoAutoscaler, ScaledMachineStatus
from gpunodes.operations.rolling.status import RolloutStatus
from gpunodes.operations.status import ClusterStatus, NodeStatus
from gpunodes.planner.candidates import MachineFacts
from gpunodes.repair.switched_off import Switched
from gpunodes.views import report as view
from gpunodes.views import report_page

from tests.stand_ins import Silent, gpu_machine

INVENTORY = """
control_plane: {hosts: {cp-1: {ansible_host: 10.0.0.1}}}
workers:
  hosts: {gpu-1: {ansible_host: 10.0.0.2}, gpu-2: {ansible_host: 10.0.0.3}}
  vars: {gpunodes_pool: train}
"""
HOSTS = "gpu_hosts: {hosts: {gpu-1: {ansible_host: 10.0.0.2}}}\n"
H100 = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": "nvidia"}
NODES = [
    NodeStatus("cp-1", "cp-1", "control_plane", True, "", "v1.36.3", "10.0.0.1"),
    NodeStatus("gpu-1", "gpu-1", "worker", True, "", "v1.36.3", "10.0.0.2"),
]
CLUSTER = ClusterStatus("10.0.0.1:6443", "v1.36.3", NODES, ["gpu-2"])
SOURCES = ("inspected", "verdicts", "status", "ends", "history", "rolling", "maintenance", "autoscale")


class Place:
    """An inventory whose sources are stand-ins; each may be replaced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        self.path = folder / "hosts.yml"
        self.path.write_text(INVENTORY)
        self.asked: list[str] = []
        self.given: dict[str, Any] = {}
        gpu = {
            "functions": [H100, H100],
            "driver": {"module": "580.95.05", "packages": {}},
            "nvswitches": 0,
            "cuda": {"13.0": "nvidia-repository", "12.8": "runfile"},
            "cudnn": dict.fromkeys(("libcudnn9-cuda-13", "libcudnn9-dev-cuda-13"), "9.14.0.64-1"),
        }
        facts = gpu_machine(gpu=gpu, packages={"containerd.io": "2.1.4-1"})
        self.answers: dict[str, Any] = {
            "inspected": (
                [MachineFacts("gpu-1", Role.WORKER, facts), MachineFacts("gpu-2", Role.WORKER, None, "no route")],
                [],
            ),
            "verdicts": [Verdict("gpu-1", "live", State.HEALTHY, Action.NONE)],
            "status": CLUSTER,
            "ends": [],
            "history": [],
            "rolling": RolloutStatus(),
            "maintenance": [],
            "autoscale": NoAutoscaler("this cluster has no autoscaler"),
        }
        for name, target in {
            "inspected": "_inspected",
            "verdicts": "_verdicts",
            "status": "status.run",
            "ends": "ends.run",
            "history": "history.read",
            "rolling": "rolling.read",
            "maintenance": "maintenance.listed",
            "autoscale": "autoscale.status",
        }.items():
            monkeypatch.setattr(f"gpunodes.operations.report.{target}", self._source(name))
        monkeypatch.setattr(switched_off, "read", lambda _: self.off)
        self.off: dict[str, Switched] = {}

    def _source(self, name: str) -> Callable[..., Any]:
        def read(*words: Any, **_: Any) -> Any:
            self.asked.append(name)
            self.given[name] = words
            answer = self.answers[name]
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return read

    def gather(self, **options: Any) -> report.ClusterReport:
        return report.gather(Inventory(self.path), PROGRESS, **options)


class _Scan:
    def begin(self, names: Any) -> None: ...
    def scanned(self, verdict: Verdict) -> None: ...


PROGRESS = report.Progress(
    run=lambda: contextlib.nullcontext(Silent()), scan=lambda: contextlib.nullcontext(_Scan()), message=lambda _: None
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_a_machine_with_what_every_source_knows_of_it(place: Place) -> None:
    found = place.gather()
    assert sorted(place.asked) == sorted(SOURCES)
    control, first, second = found.machines
    assert (first.name, first.pool, first.node, first.node_state, first.health) == (
        "gpu-1", "train", "gpu-1", "ready", "healthy",
    )  # fmt: skip
    assert first.gpus == {"H100 SXM5 80GB": 2}
    assert (first.driver, first.kernel, first.runtime) == ("580.95.05", "6.12.1", "containerd.io 2.1.4-1")
    assert (first.cuda, first.cudnn) == ("12.8, 13.0", "9.14.0.64-1")
    assert (second.cuda, second.cudnn) == ("", "")
    assert (second.node_state, second.not_read, second.gpus) == ("no node", "no route", {})
    assert (control.role, control.node_state, control.kubernetes) == ("control_plane", "ready", "v1.36.3")
    assert found.exit_code is ExitCode.DONE
    assert found.autoscale == report.Section(why="this cluster has no autoscaler")


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("error", [GpunodesError("it broke", "it", "correct it"), KeyError("x"), OSError(28, "full")])
def test_a_source_that_fails_has_the_reason_in_its_section(place: Place, name: str, error: Exception) -> None:
    place.answers[name] = error
    found = place.gather()
    section = {"inspected": "findings", "verdicts": "health", "status": "cluster", "ends": "certificates"}
    section |= {"rolling": "rollout"}
    broken = getattr(found, section.get(name, name))
    assert (broken.value, broken.failed, "\n" in broken.why) == (None, True, False)
    assert broken.why
    assert found.exit_code is ExitCode.PARTLY
    assert len(found.machines) == 3
    assert "Not read:" in report_page.page(view.document_of(found))


def test_without_a_cluster_its_api_is_not_waited_for_again(place: Place) -> None:
    place.answers["status"] = GpunodesError("cp-1: no response")
    found = place.gather()
    assert not {"rolling", "maintenance", "autoscale"} & set(place.asked)
    assert found.rollout.why == "the cluster could not be read: cp-1: no response"
    assert [machine.node_state for machine in found.machines] == ["", "", ""]


def test_an_interruption_ends_the_report(place: Place) -> None:
    place.answers["status"] = Interrupted()
    with pytest.raises(Interrupted):
        place.gather()


def test_gpu_hosts_have_no_cluster(place: Place) -> None:
    place.path.write_text(HOSTS)
    place.answers["inspected"] = ([], [])
    found = place.gather()
    assert set(place.asked) == {"inspected", "verdicts", "history"}
    assert found.cluster.why == found.autoscale.why == "the inventory has no control plane"
    assert found.exit_code is ExitCode.DONE


def test_no_scan(place: Place) -> None:
    found = place.gather(scanned=False)
    assert "verdicts" not in place.asked
    assert (found.health.why, found.exit_code) == ("left out by --no-scan", ExitCode.DONE)


def test_machines_that_are_off_on_purpose_are_asked_for_nothing(place: Place) -> None:
    place.off = {"gpu-2": Switched("off", 0.0, "no pod needs it")}
    place.gather()
    assert [each.name for each in place.given["inspected"][1]] == ["cp-1", "gpu-1"]
    assert [each.name for each in place.given["ends"][1]] == ["cp-1", "gpu-1"]


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("verdicts", [Verdict("gpu-1", "live", State.DEGRADED, Action.NONE)]),
        ("inspected", ([], [PreflightFinding("gpu-1", "disk", Problem("full"))])),
        ("ends", [MachineCertificates("cp-1", (), ["apiserver ends in 3 days"], "")]),
        ("status", ClusterStatus("", "v1.36.3", [dataclasses.replace(NODES[0], ready=False)], ())),
        ("autoscale", AutoscaleStatus(False, {})),
        ("autoscale", AutoscaleStatus(True, {}, [ScaledMachineStatus("gpu-1", "train", "failed", failed=True)])),
    ],
)
def test_what_is_wrong_in_a_section_is_in_the_exit_code(place: Place, source: str, answer: Any) -> None:
    place.answers[source] = answer
    assert place.gather().exit_code is ExitCode.PARTLY


def test_warnings_and_machines_that_are_off_are_not_in_the_exit_code(place: Place) -> None:
    place.answers["verdicts"] = [Verdict("gpu-1", "live", State.OFF, Action.NONE)]
    place.answers["inspected"] = ([], [PreflightFinding("gpu-1", "swap", Problem("on"), Severity.WARNING)])
    assert place.gather().exit_code is ExitCode.DONE


def test_the_findings_of_preflight_without_those_of_another_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "hosts.yml").write_text(HOSTS)
    inventory = Inventory(tmp_path / "hosts.yml")
    seen = preflight.Inspection(
        [MachineFacts("gpu-1", Role.GPU_HOST, None, "no route")], "", None, None, "", False, tmp_path
    )
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: seen)
    found = [PreflightFinding("cp-1", check, Problem("x")) for check in ("certificates", "gpu")]
    monkeypatch.setattr(preflight, "judge", lambda *_: found)
    facts, findings = report._inspected(inventory, inventory.select(()), PROGRESS)
    assert [each.check for each in findings] == ["gpu"]
    assert [each.name for each in facts] == ["gpu-1"]
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: dataclasses.replace(seen, interrupted=True))
    with pytest.raises(Interrupted):
        report._inspected(inventory, inventory.select(()), PROGRESS)


def test_the_conflicts_have_the_warnings_about_storage(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `preflight` has them."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(place.path.parent))
    shares = "all: {vars: {gpunodes_storage: [{name: data, path: /srv/data, size: 1Ti}]}}\n"
    place.path.write_text(INVENTORY + shares + "storage: {hosts: {gpu-1: }}\n")
    inventory = Inventory(place.path)
    facts = gpu_machine(H100)
    seen = preflight.Inspection(
        [MachineFacts("gpu-1", Role.WORKER, facts)], "cp-1", None, None, "", False, place.path.parent
    )
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: seen)
    _, findings = report._inspected(inventory, inventory.select(()), PROGRESS)
    assert [each.machine for each in findings if each.check == "storage"] == ["gpu-1"]


# The command


def command(place: Place, *words: str) -> tuple[int, str]:
    """The exit code and standard output of `gpunodes report`; the arguments are those of the process, too."""
    done = CliRunner().invoke(cli.root, ["report", *words, "-i", str(place.path)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return int(done.return_value), done.stdout


def test_the_file_is_whole_and_private(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    path.write_text("old")
    path.chmod(0o644)
    code, output = command(place, "-o", str(path))
    assert (code, output) == (0, f"{path}: 3 machines\n")
    assert path.read_text().startswith("<!doctype html>\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".out.html*"))


def test_the_page_on_standard_output(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, output = command(place, "-o", "-")
    assert output.startswith("<!doctype html>\n")
    assert output.endswith("</html>\n")
    assert not (tmp_path / "-").exists()


def test_json_has_the_same_data_and_writes_a_page_only_if_one_is_named(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, output = command(place, "--json")
    document = json.loads(output)
    assert (document["schema"], document["exit_code"]) == ("gpunodes.report/1", 0)
    assert [each["name"] for each in document["machines"]] == ["cp-1", "gpu-1", "gpu-2"]
    assert document["missing"] == [{"section": "autoscale", "why": "this cluster has no autoscaler", "failed": False}]
    assert not (tmp_path / "report.html").exists()
    command(place, "--json", "-o", "page.html")
    assert (tmp_path / "page.html").exists()
    with pytest.raises(WrongInput, match="both print on standard output"):
        command(place, "--json", "-o", "-")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(place: Place, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for wrong, found in (("nowhere/x.html", "there is no folder"), ("folder", "is a folder")):
        with pytest.raises(WrongInput, match=found):
            command(place, "-o", str(tmp_path / wrong))
    with pytest.raises(WrongInput, match="is no regular file"):
        command(place, "-o", "/dev/null")
    assert place.asked == []


def test_its_output_is_a_file_and_no_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpunodes", "report", "-o", "json"])
    assert cli._format(sys.argv[1:]) == ""
    assert cli._format(["report", "--json"]) == "json"
