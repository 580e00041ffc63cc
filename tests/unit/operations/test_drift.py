"""Drift on the controller: its sentences, warnings of preflight, `status`, and the roll-out of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.cli import main
from gpunodes.engine import control_planes, runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Outcome, Role, Severity, TaskEnded
from gpunodes.operations import drift as operation
from gpunodes.operations import preflight, status
from gpunodes.operations.rolling import commands, control_plane_settings, works
from gpunodes.operations.rolling.work import Target
from gpunodes.operations.tracker import Tracker
from gpunodes.planner import drift
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import Disruption, RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.views import drift as view

from tests import repair_fleet
from tests.hostile import ATTACKS
from tests.stand_ins import Silent

INVENTORY = """
control_plane:
  hosts: {cp-1: {ansible_host: 10.0.0.1}, cp-2: {ansible_host: 10.0.0.2}, cp-3: {ansible_host: 10.0.0.3}}
workers: {hosts: {w-1: {ansible_host: 10.0.0.4}}}
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    return Inventory(tmp_path / "hosts.yml")


STAYS = "that is decided when a cluster is created, and stays"


def one(name: str, running: str | None, wanted: str | None, kind: str = "settings", **more: str) -> dict[str, Any]:
    return {"component": "kube-apiserver", "name": name, "running": running, "wanted": wanted, "kind": kind, **more}


def report(*differences: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "managed": True,
        "problem": "",
        "unverified": False,
        "left_out": 0,
        "differences": list(differences),
        **more,
    }


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (one("--v", "2", "4"), "kube-apiserver --v is 2, the settings say 4"),
        (one("--v", None, "4"), "kube-apiserver --v is not set, the settings say 4"),
        (one("--v", "2", None), "kube-apiserver --v is 2, the settings do not set it"),
        (one("--x", "2", None, "foreign"), "kube-apiserver --x is 2, neither the settings nor kubeadm set it"),
        (
            one("--encryption-provider-config", "/x", None, "fixed"),
            "Secrets are encrypted, gpunodes_encrypt_secrets says otherwise; " + STAYS,
        ),
        (
            one("--encryption-provider-config", None, "/x", "fixed"),
            "Secrets are not encrypted, gpunodes_encrypt_secrets says otherwise; " + STAYS,
        ),
        (
            one("podSubnet", "10.0.0.0/16", "10.1.0.0/16", "fixed", component="cluster"),
            "the network of pods is 10.0.0.0/16, gpunodes_pod_subnet says 10.1.0.0/16; " + STAYS,
        ),
    ],
)
def test_a_difference_is_a_sentence(difference: dict[str, Any], text: str) -> None:
    found = drift.of_report("cp-1", report(difference))
    assert [each.text for each in found.differences] == [text]
    assert found.pending == (difference["kind"] != "fixed")


def test_preflight_warns_once_a_control_plane_with_the_first_differences() -> None:
    many = [one(f"--a{number}", "1", "2") for number in range(5)]
    machines = [
        drift.of_report("cp-1", report(*many, left_out=3)),
        drift.of_report("cp-2", report(one("--advertise-address", "a", "b", "fixed"))),
        drift.of_report("cp-3", report()),
        drift.of_report("cp-4", report(problem="the API does not respond")),
    ]
    found = drift.findings(machines)
    assert [(each.machine, each.severity) for each in found] == [
        (name, Severity.WARNING) for name in ("cp-1", "cp-2", "cp-4")
    ]
    first, second, last = (str(each.problem) for each in found)
    assert first.startswith(
        "settings of the control plane differ from the running one: kube-apiserver --a0 is 1, the settings say 2; "
    )
    assert "--a3" not in first
    assert "and 5 more; `gpunodes rollout apply` applies them" in first
    assert "rollout apply" not in second
    assert last == "its settings cannot be compared: the API does not respond; see `gpunodes status`"


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"managed": True},
        report(one("--v", "2", "4", "anything")),
        report(one("--v", "2", "4") | {"running": 7}),
        report(*[one("--v", "2", "4")] * 201),
        report(left_out="many"),
    ],
)
def test_a_report_of_another_shape_is_a_problem_and_no_drift(wrong: object) -> None:
    found = drift.of_report("cp-1", wrong)
    assert found.problem
    assert not found.pending
    assert not found.differences


@pytest.mark.parametrize("attack", [*ATTACKS, "y" * 5000, "\x1b[2J\nwarning: fake"])
def test_hostile_texts_are_short_and_printable(attack: str) -> None:
    hostile = one(attack, attack, attack, component=attack)
    found = [drift.of_report("cp-1", report(hostile)), drift.of_report("cp-2", report(problem=attack))]
    for line in view.lines(found).splitlines():
        assert line.isprintable()
        assert len(line) < 700
        assert line.startswith(("drift: cp-", "`gpunodes rollout apply`"))
    assert json.loads(view.document_of(found))["pending"] == ["cp-1"]


def test_lines_and_document() -> None:
    found = [drift.of_report("cp-1", report(one("--v", "2", "4"), unverified=True)), drift.of_report("cp-2", report())]
    assert view.lines(found).splitlines() == [
        "drift: cp-1: kube-apiserver --v is 2, the settings say 4",
        "drift: cp-1: an earlier change of its settings is not verified yet",
        "`gpunodes rollout apply` applies the control planes' settings",
    ]
    assert view.lines(found[1:]) == ""
    document = json.loads(view.document_of(found))
    assert document["schema"] == "gpunodes.drift/1"
    assert document["machines"][0]["differences"][0] == {
        **one("--v", "2", "4"),
        "text": "kube-apiserver --v is 2, the settings say 4",
    }


class Playing:
    """Plays whose machines report this drift, and the roll-outs that follow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reports: Mapping[str, object]) -> None:
        self.reports = reports
        self.plays: list[runner.Play] = []
        self.rollouts: list[list[str]] = []
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(commands, "roll_out", self.roll_out)

    def run(self, play: runner.Play, folder: Path, on_event: Any, *_: Any) -> runner.PlayResult:
        self.plays.append(play)
        for name in play.machines:
            found = self.reports.get(name)
            if found is None:
                unreachable = {"msg": "Connection timed out"}
                on_event(TaskEnded(name, "control_plane", "Read", Outcome.UNREACHABLE, 1.0, unreachable))
            else:
                result = {"control_plane_drift": found}
                on_event(TaskEnded(name, "control_plane", "Read", Outcome.UNCHANGED, 1.0, result))
        return runner.PlayResult(
            ok=all(self.reports.get(name) for name in play.machines), interrupted=False, log=folder / "stdout"
        )

    def roll_out(self, _: Any, machines: Any, work: Any, *__: Any) -> RolloutResult:
        self.rollouts.append([machine.name for machine in machines])
        done = [MachineRollout(machine.name, RolloutOutcome.DONE) for machine in machines]
        return RolloutResult("id", work.name, done)


def call(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["gpunodes", "rollout", "apply", "-i", str(inventory.path), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    found = capsys.readouterr()
    return int(str(ended.value.code or 0)), found.out, found.err


def test_a_dry_run_shows_what_differs_and_rolls_nothing_out(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"cp-1": report(one("--v", "2", "4")), "cp-2": report(one("--x", "1", None, "foreign")), "cp-3": report()}
    playing = Playing(monkeypatch, given)
    code, out, _ = call(inventory, monkeypatch, capsys, "--dry-run")
    assert code == ExitCode.DONE
    assert "drift: cp-1: kube-apiserver --v is 2, the settings say 4" in out
    assert "drift: cp-2: kube-apiserver --x is 1, neither the settings nor kubeadm set it" in out
    code, out, _ = call(inventory, monkeypatch, capsys, "--dry-run", "--json", "cp-1")
    assert json.loads(out)["pending"] == ["cp-1"]
    assert playing.rollouts == []
    assert {play.playbook for play in playing.plays} == {"drift.yml"}


def test_only_control_planes_that_differ_are_rolled_out(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"cp-1": report(), "cp-2": report(one("--v", "2", "4")), "cp-3": report(one("--x", "1", "2", "fixed"))}
    playing = Playing(monkeypatch, given)
    code, out, err = call(inventory, monkeypatch, capsys, "--yes", "--json")
    assert code == ExitCode.DONE
    assert playing.rollouts == [["cp-2"]]
    outcomes = {each["name"]: each["outcome"] for each in json.loads(out)["machines"]}
    assert outcomes == {"cp-1": "unchanged", "cp-2": "done", "cp-3": "unchanged"}
    assert "the settings say 4" in " ".join(err.split()), "what is overwritten is shown before"


def test_a_second_apply_has_nothing_to_do(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    playing = Playing(monkeypatch, {name: report() for name in ("cp-1", "cp-2", "cp-3")})
    code, out, err = call(inventory, monkeypatch, capsys, "--yes")
    assert code == ExitCode.DONE
    assert playing.rollouts == []
    assert "the control planes have their settings" in err
    assert "3 unchanged" in out


def test_a_change_that_was_not_verified_is_rolled_out_again(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing = Playing(monkeypatch, {"cp-1": report(unverified=True)})
    [machine] = inventory.select(["cp-1"], Role.CONTROL_PLANE)
    found = operation.read(inventory, [machine], Silent())
    operation.roll_out(InventoryFleet(inventory), [machine], found, options(), lambda *_: None)
    assert playing.rollouts == [["cp-1"]]


def options() -> Any:
    return RolloutOptions()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "SSH does not respond"),
        (report(problem="no API"), "no API"),
        (report(managed=False), "gpunodes did not make it a control plane"),
        ({"managed": 1}, "its answer is invalid"),
    ],
)
def test_one_that_cannot_be_compared_stops_all(
    inventory: Inventory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other: object,
    message: str,
) -> None:
    playing = Playing(monkeypatch, {"cp-1": report(one("--v", "2", "4")), "cp-2": other, "cp-3": report()})
    code, _, err = call(inventory, monkeypatch, capsys, "--yes")
    assert code == ExitCode.FAILED
    assert message in " ".join(err.split())
    assert playing.rollouts == []
    code, *_ = call(inventory, monkeypatch, capsys, "--dry-run")
    assert code == ExitCode.FAILED


def test_wrong_input(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    playing = Playing(monkeypatch, {})
    for words in (["w-1", "--yes"], ["typo", "--yes"], []):
        assert call(inventory, monkeypatch, capsys, *words)[0] == ExitCode.WRONG_INPUT
    own = "{cp-2: {ansible_host: 10.0.0.2, gpunodes_component_arguments: {scheduler: {v: '4'}}}, cp-1: }"
    (tmp_path / "hosts.yml").write_text(f"control_plane: {{hosts: {own}}}\n")
    code, _, err = call(inventory, monkeypatch, capsys, "--yes")
    assert code == ExitCode.WRONG_INPUT
    assert "gpunodes_component_arguments of cp-1 is not that of cp-2" in " ".join(err.split())
    assert playing.plays == []


def test_the_work_is_made_again_from_its_record(inventory: Inventory) -> None:
    work = works.make(InventoryFleet(inventory), control_plane_settings.NAME, {"target": "{{ attack }}"})
    assert (work.name, work.disrupts, work.undoes) == ("control-plane-settings", Disruption.NOTHING, True)
    assert work.parameters == {}
    needed = {machine.name: work.needed(Target(machine)) for machine in inventory.machines()}
    assert needed["cp-1"]
    assert needed["w-1"] == "", "a hostile record that names a worker changes nothing"
    with pytest.raises(WrongInput, match="machines of an inventory"):
        works.make(repair_fleet.fleet(1), control_plane_settings.NAME, {})


@pytest.mark.parametrize("stage", ["prepare", "apply", "verify", "undo"])
def test_each_stage_is_a_play_of_one_machine(inventory: Inventory, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    playing = Playing(monkeypatch, {"cp-2": report()})
    work = control_plane_settings.ControlPlaneSettings(inventory)
    getattr(work, stage)(Target(inventory.control_planes()[1]))
    [play] = playing.plays
    assert (play.playbook, play.machines, play.tags) == ("control_plane_settings.yml", ["cp-2"], [stage])
    playing.reports = {}
    if stage == "verify":
        assert "SSH does not respond" in work.verify(Target(inventory.control_planes()[1]))
    else:
        with pytest.raises(GpunodesError, match="SSH does not respond"):
            getattr(work, stage)(Target(inventory.control_planes()[1]))


def test_preflight_requests_it_where_machines_join(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = preflight.Inspection(
        [],
        "cp-1",
        None,
        None,
        "",
        interrupted=False,
        log=Path(),
        differing=[drift.of_report("cp-1", report(one("--v", "2", "4")))],
    )
    found = [each for each in preflight.judge(seen, "1.36") if each.check == "drift"]
    assert [each.machine for each in found] == ["cp-1"]
    variables = []

    def run(play: runner.Play, folder: Path, *_: Any) -> runner.PlayResult:
        variables.append((play.variables or {})["facts_drift"])
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    workers, choice = inventory.machines(Role.WORKER), control_planes.Choice(inventory.control_planes()[0])
    for compares in (False, True):
        preflight.inspect(inventory, workers, Path(), Silent(), {}, sources=False, compares=compares, choice=choice)
    assert variables == [False, True]


def test_status_lists_control_planes_that_differ(inventory: Inventory) -> None:
    tracker = Tracker(inventory.control_planes(), status.PHASES, Silent())
    given = {"cp-1": report(one("--v", "2", "4")), "cp-2": report(), "cp-3": report(managed=False)}
    for name, found in given.items():
        result = {"control_plane_drift": found}
        tracker.on_event(TaskEnded(name, "control_plane", "Read", Outcome.UNCHANGED, 1.0, result))
    assert [each.machine for each in status.differing(tracker)] == ["cp-1"]
