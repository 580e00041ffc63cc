"""Settings of kubelets in `status`, `preflight` and `upgrade plan`; the plays are stand-ins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.cli import main
from gpunodes.engine import control_planes, runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import ExitCode
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations import preflight, status
from gpunodes.operations.rolling import commands, works
from gpunodes.operations.rolling.work import Target
from gpunodes.planner.drift import DriftDifference, MachineDrift
from gpunodes.planner.kubelet_drift import compare
from gpunodes.planner.kubelet_layers import FIELDS, Kubelet
from gpunodes.rollout.record import Disruption, RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.settings import resolve
from gpunodes.views import drift as view

from tests.hostile import ATTACKS, cluster_report, machine_report
from tests.stand_ins import Silent
from tests.unit.operations.test_drift import call

NODES = {"control-1": 1, "worker-1": 2, "worker-2": 3, "foreign": 9}
INVENTORY = """
all: {vars: {gpunodes_feature_gates: {AllBeta: true}}}
control_plane:
  hosts:
    control-1:
      ansible_host: 10.0.0.1
      gpunodes_kubeadm_patches: {kubeletconfiguration+merge: {maxPods: 250}}
workers:
  hosts:
    worker-1: {ansible_host: 10.0.0.2}
    worker-2: {ansible_host: 10.0.0.3, gpunodes_feature_gates: {ContainerCheckpoint: false}}
"""
NONE: dict[str, Any] = {"problem": "", "cluster": {}, "nodes": {}, "silent": {}}


class Playing:
    """Plays in which the control plane reports this of the kubelets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: object) -> None:
        self.report = report
        self.asked: list[tuple[str, Any]] = []
        self.fields: list[Any] = []
        self.more: list[tuple[str, str, Mapping[str, Any]]] = []
        monkeypatch.setattr(runner, "run", self.run)

    def run(self, play: runner.Play, folder: Path, on_event: Callable[[Event], None], *_: Any) -> runner.PlayResult:
        reads = play.playbook == "status.yml" or (play.variables or {}).get("facts_kubelets")
        self.asked.append((play.playbook, reads))
        self.fields.append((play.variables or {}).get("kubelet_fields"))
        own: list[tuple[str, str, Mapping[str, Any]]] = [
            (
                "control-1",
                "status" if play.playbook == "status.yml" else "cluster",
                {"cluster": cluster_report(NODES)},
            ),
            *self.more,
        ]
        if play.playbook == "facts.yml":
            own += [
                (name, "settings", {"host_facts": machine_report(name, NODES[name])})
                for name in play.variables["facts_wanted"]  # type: ignore[index]  # preflight gives it
            ]
        if reads and self.report is not None:
            own += [("control-1", "cluster", {"kubelet_settings": self.report})]
            # Nobody but the control plane that was chosen reports it.
            own += [("worker-1", "cluster", {"kubelet_settings": {**NONE, "problem": "evil"}})]
        for machine, role, result in own:
            on_event(TaskEnded(machine, role, "Read", Outcome.UNCHANGED, 1.0, result))
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    return Inventory(tmp_path / "hosts.yml")


SET = {"AllBeta": True}
LIMIT = resolve({})["gpunodes_pod_pids_limit"]


def shown(gates: dict[str, bool], limit: int = LIMIT) -> dict[str, str]:
    """As the module reports a kubelet; a control plane is to have the maximum of pods of a patch."""
    return {"featureGates": json.dumps(gates), "podPidsLimit": str(limit), "maxPods": "110"}


DIFFERENT = {
    **NONE,
    "nodes": {
        "control-1": shown(SET),
        "worker-1": shown({"AllBeta": False}, 7),
        "worker-2": shown(SET),
        "foreign": shown({"AllAlpha": True}),
    },
}
TEXTS = {
    "control-1": ["kubelet maxPods is 110, the settings say 250; the next `gpunodes upgrade` applies it"],
    "worker-1": [
        "kubelet feature gate AllBeta is false, the settings say true",
        f"kubelet podPidsLimit is 7, the settings say {LIMIT}",
    ],
    "worker-2": [
        "kubelet feature gate AllBeta is true, neither the settings nor the cluster set it",
        "kubelet feature gate ContainerCheckpoint is not set, the settings say false",
    ],
}
"""The differences by machine; the foreign node is no machine of the inventory."""


def test_status_lists_kubelets_that_differ(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing(monkeypatch, DIFFERENT)
    found = status.run(inventory, Silent())
    assert playing.fields == [sorted({*FIELDS, "maxPods"})]
    assert {each.machine: [one.text for one in each.differences] for each in found.drift} == TEXTS
    assert not any(each.pending for each in found.drift)
    assert [warning for warning in found.warnings if "settings" in warning] == []


def test_what_status_prints(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Playing(monkeypatch, {**DIFFERENT, "silent": {"worker-2": "no complete answer within 4 s"}})
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["gpunodes", "status", "-i", str(inventory.path), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr().out
        assert ended.value.code in {None, 0}
        if more:
            document = json.loads(out)
            kinds = [one["kind"] for each in document["drift"] for one in each["differences"]]
            assert kinds == ["upgrade", "kubelet", "kubelet", "kubelet", "kubelet"]
        else:
            assert "drift: worker-1: kubelet feature gate AllBeta is false, the settings say true\n" in out
            assert "`gpunodes rollout apply --kubelets` applies the kubelets' settings" in out
            assert "`gpunodes rollout apply` applies" not in out
            assert "warning: the settings of 1 kubelet were not read: worker-2 (worker-2: no complete" in out


@pytest.mark.parametrize(
    "report", [None, [], {**NONE, "problem": "the API is away"}, {**NONE, "nodes": {"a": {"b": 1}}}]
)
def test_a_report_that_cannot_be_used_is_a_warning(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, report: object
) -> None:
    Playing(monkeypatch, report)
    found = status.run(inventory, Silent())
    assert found.drift == []
    [warning] = [each for each in found.warnings if "settings" in each]
    assert warning.startswith("the settings of the kubelets are unknown: ")
    assert "evil" not in warning


def test_preflight_warns_of_the_machines_that_were_named(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing(monkeypatch, DIFFERENT)
    machines = [machine for machine in inventory.machines() if machine.name != "worker-2"]
    found = [each for each in preflight.run(inventory, machines, Silent()).findings if each.check == "drift"]
    text = "settings of the kubelet differ from the running one"
    remedy = "`gpunodes status` lists all"
    assert [(each.machine, str(each.problem)) for each in found] == [
        ("control-1", f"{text}: {TEXTS['control-1'][0]}; {remedy}"),
        ("worker-1", f"{text}: {'; '.join(TEXTS['worker-1'])}; `gpunodes up` applies them, {remedy}"),
    ]
    assert all(reads for _, reads in playing.asked)


def test_runs_that_apply_it_do_not_read_it(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` and `join` apply what they would warn of."""
    playing = Playing(monkeypatch, DIFFERENT)
    seen = preflight.inspect(inventory, inventory.machines(), Path(), Silent(), {}, sources=False, compares=True)
    assert playing.asked == [("facts.yml", False)]
    assert preflight.drift_findings(seen) == []


def test_status_warns_of_certificates_and_shows_who_has_the_virtual_address(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A certificate of any control plane is warned of in the last 30 days."""
    text = inventory.path.read_text().replace("{gpunodes_f", "{gpunodes_control_plane_vip: 10.0.0.9, gpunodes_f")
    inventory.path.write_text(
        text.replace("    control-1:\n", "    control-2: {ansible_host: 10.0.0.4}\n    control-1:\n")
    )
    both = Inventory(inventory.path)
    [chosen] = both.select(["control-1"])
    monkeypatch.setattr(control_planes, "choose", lambda *_, **__: control_planes.Choice(chosen))
    playing = Playing(monkeypatch, NONE)
    ends = {"apiserver": 29, "front-proxy-client": 31}
    reported = [
        {
            "name": name,
            "path": f"/etc/kubernetes/pki/{name}.crt",
            "subject": name,
            "not_after": int(time.time()) + days * 86400 + 60,
            "problem": "",
            "renewal": "renew",
        }
        for name, days in ends.items()
    ]
    playing.more = [
        ("control-1", "status", {"has_virtual_address": True}),
        ("control-1", "certificate_ends", {"certificates": reported[1:]}),
        ("control-2", "certificate_ends", {"certificates": reported}),
    ]
    monkeypatch.setattr("sys.argv", ["gpunodes", "status", "-i", str(inventory.path)])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "virtual address 10.0.0.9: control-1\n" in out
    assert "certificates of control-1: front-proxy-client ends first, on " in out
    assert "certificates of control-2: apiserver ends first, on " in out
    assert " UTC (29 days)\n" in out
    assert "warning: control-2: the certificate apiserver ends" in out
    assert "gpunodes certs renew" in out
    assert "warning: control-1" not in out


def test_many_equal_kubelets_are_one_line() -> None:
    settings = resolve({"gpunodes_feature_gates": SET})
    upgraded = MachineDrift(
        "cp-2", [DriftDifference("kubelet", "maxPods", "1", "2", "upgrade", "kubelet maxPods is 1")]
    )
    assert view.lines([upgraded]) == "drift: cp-2: kubelet maxPods is 1", "it says itself what applies it"
    kubelets = [Kubelet(f"w-{number}", f"w-{number}", "v1.36.3", False, settings) for number in range(500)]
    found = compare({**NONE, "nodes": {each.node: shown({}) for each in kubelets}}, kubelets)
    assert view.lines([*found.machines, MachineDrift("cp-1", unverified=True)]).splitlines() == [
        "drift: cp-1: an earlier change of its settings is not verified yet",
        "drift: w-0, w-1, w-2 and 497 more: kubelet feature gate AllBeta is not set, the settings say true",
        "`gpunodes rollout apply` applies the control planes' settings",
        "`gpunodes rollout apply --kubelets` applies the kubelets' settings, one node after another",
    ]
    assert len(json.loads(view.document_of(found.machines))["machines"]) == 500


@pytest.mark.parametrize("attack", [*ATTACKS, "y" * 5000, "\x1b[2J\nwarning: fake"])
def test_why_a_kubelet_did_not_respond_is_short_and_printable(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], attack: str
) -> None:
    Playing(monkeypatch, {**NONE, "silent": {"worker-1": attack}})
    monkeypatch.setattr("sys.argv", ["gpunodes", "status", "-i", str(inventory.path)])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    [warning] = [line for line in lines if "not read" in line]
    assert len(warning) < 500


class Rolled(Playing):
    """The same, and the roll-outs that follow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: object) -> None:
        super().__init__(monkeypatch, report)
        self.rollouts: list[tuple[str, list[str], int]] = []
        monkeypatch.setattr(commands, "roll_out", self.roll_out)

    def roll_out(self, _: Any, machines: Any, work: Any, options: Any, *__: Any) -> RolloutResult:
        self.rollouts.append((work.name, [machine.name for machine in machines], options.canary))
        return RolloutResult("id", work.name, [MachineRollout(each.name, RolloutOutcome.DONE) for each in machines])


def test_settings_of_kubelets_are_rolled_out_to_those_that_differ(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not to control-1: what a patch of kubeadm says is applied by the next upgrade."""
    rolled = Rolled(monkeypatch, {**DIFFERENT, "silent": {"control-1": "late"}})
    code, out, err = call(inventory, monkeypatch, capsys, "--kubelets", "--yes", "--canary", "1", "--json")
    assert code == ExitCode.PARTLY
    assert rolled.rollouts == [("kubelet-settings", ["worker-1", "worker-2"], 1)]
    outcomes = {each["name"]: each["outcome"] for each in json.loads(out)["machines"]}
    assert outcomes == {"worker-1": "done", "worker-2": "done", "control-1": "skipped"}
    err = " ".join(err.split())
    assert TEXTS["worker-1"][0] in err
    assert "drift: control-1: its settings cannot be compared: late" in err
    rolled.rollouts.clear()
    code, out, _ = call(inventory, monkeypatch, capsys, "--kubelets", "--dry-run", "worker-2")
    assert (code, rolled.rollouts) == (ExitCode.DONE, [])
    assert TEXTS["worker-2"][1] in out
    assert "worker-1" not in out


def test_kubelets_that_cannot_be_compared_are_no_success(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory.path.write_text(
        inventory.path.read_text().replace("worker-2: {ansible_host: 10.0.0.3", "worker-9: {ansible_host: 10.0.0.77")
    )
    ready = cluster_report(NODES)
    for node in ready["nodes"]:
        node["ready"] = node["name"] != "worker-1"
    rolled = Rolled(monkeypatch, NONE)
    rolled.more = [("control-1", "status", {"cluster": ready})]
    code, out, _ = call(inventory, monkeypatch, capsys, "--kubelets", "--dry-run")
    assert code == ExitCode.FAILED
    assert out.splitlines() == [
        "drift: worker-1: its settings cannot be compared: its node is not Ready",
        "drift: worker-9: its settings cannot be compared: it is not a node of the cluster",
    ]
    code, out, _ = call(inventory, monkeypatch, capsys, "--kubelets", "--yes", "--json")
    assert (code, rolled.rollouts) == (ExitCode.PARTLY, [])
    outcomes = {each["name"]: each["outcome"] for each in json.loads(out)["machines"]}
    assert outcomes == {"control-1": "unchanged", "worker-1": "skipped", "worker-9": "skipped"}


def test_kubelets_without_drift_and_options_without_effect(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rolled = Rolled(monkeypatch, NONE)
    code, out, err = call(inventory, monkeypatch, capsys, "--kubelets", "--yes")
    assert (code, rolled.rollouts) == (ExitCode.DONE, [])
    assert "3 unchanged" in out
    assert "have their settings" in err
    for words in (["--canary", "1"], ["--max-unavailable", "2"], ["--kubelets", "--wait-for-jobs", "1h"]):
        assert call(inventory, monkeypatch, capsys, "--yes", *words)[0] == ExitCode.WRONG_INPUT


def test_the_work_of_kubelets_is_made_again_from_its_record(inventory: Inventory) -> None:
    work = works.make(InventoryFleet(inventory), "kubelet-settings", {"target": "{{ attack }}"})
    assert (work.disrupts, work.undoes, work.parameters) == (Disruption.NOTHING, False, {})
    assert all(work.needed(Target(machine)) for machine in inventory.machines())
