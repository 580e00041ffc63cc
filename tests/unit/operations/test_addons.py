"""The update of add-ons: its plan, its lock, and its command. The cluster is a stand-in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.cli import main
from gpunodes.engine import control_planes, runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.leases.errors import Lost
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Outcome, TaskEnded
from gpunodes.operations import addons
from gpunodes.operations.rolling import commands, context
from gpunodes.planner.addons import PlannedAddon, chosen
from gpunodes.views import addons as views

from tests.hostile import ATTACKS, hostile, is_plain

OLD: dict[str, Any] = {
    "name": "kube-flannel-ds",
    "wanted": ["flannel:v2"],
    "running": {"flannel:v1": 3},
    "changes": ["DaemonSet kube-flannel-ds"],
    "behind": [],
}
NEW = {**OLD, "running": {"flannel:v2": 3}, "changes": []}


class Cluster:
    """A control plane that reports these add-ons; ``failure`` is why the update fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *reports: Any, failure: str = "", unfinished: str = "") -> None:
        self.tags: list[str] = []
        self.locks = 0
        self.plays: list[runner.Play] = []
        self._reports = list(reports)
        self._failure = failure
        self._unfinished = unfinished
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(control_planes, "choose", lambda i: control_planes.Choice(i.control_planes()[0]))
        self.lost: GpunodesError | None = None
        opened = SimpleNamespace(leases=SimpleNamespace(lost=lambda: self.lost), report=lambda *_: None)
        monkeypatch.setattr(context, "opened", lambda *_: contextlib.nullcontext(opened))
        monkeypatch.setattr(commands, "locked", self.locked)

    @contextlib.contextmanager
    def locked(self, _: Any) -> Iterator[str]:
        self.locks += 1
        yield self._unfinished

    def run(
        self, play: runner.Play, _: Path, on_event: Any, should_stop: Callable[[], bool] = lambda: False
    ) -> runner.PlayResult:
        assert (play.playbook, play.machines, play.control) == ("addon.yml", ["cp-1"], "cp-1")
        self.tags += play.tags
        if should_stop():
            return runner.PlayResult(ok=False, interrupted=True, log=Path("log"))
        self.plays.append(play)
        failed = self._failure if play.tags != ["pending"] else ""
        report = {} if play.tags == ["addons"] else {"addons": self._reports.pop(0)}
        if play.tags == ["optional"]:
            report = report["addons"]
        result = {"msg": failed} if failed else report
        outcome = Outcome.FAILED if failed else Outcome.UNCHANGED
        on_event(TaskEnded("cp-1", "network", "Task", outcome, 1.0, result))
        return runner.PlayResult(ok=not failed, interrupted=False, log=Path("log"))


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {cp-1: }}\nworkers: {hosts: {w-1: }}\n")
    return Inventory(path)


def call(monkeypatch: pytest.MonkeyPatch, inventory: Inventory, *argv: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpunodes", "addon", *argv, "-i", str(inventory.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_an_update_is_shown_made_and_shown_again(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, [OLD], [NEW])
    assert call(monkeypatch, inventory, "upgrade", "--yes", "--json") == ExitCode.DONE
    shown = capsys.readouterr()
    assert "  runs      flannel:v1 on 3 nodes" in shown.err.splitlines()
    assert "wanted    flannel:v2" in shown.err
    document = json.loads(shown.out)
    assert (document["schema"], document["addons"][0]["needed"]) == ("gpunodes.addon-plan/1", False)
    assert (cluster.tags, cluster.locks) == (["pending", "addons", "pending"], 1)


def test_nothing_is_done_to_add_ons_that_are_up_to_date(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [NEW])
    assert call(monkeypatch, inventory, "upgrade", "--yes") == ExitCode.DONE
    assert (cluster.tags, cluster.locks) == (["pending"], 0)


def test_a_failed_update_is_an_error_with_its_cause(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch, [OLD], failure="w-1: pod x: CrashLoopBackOff; the earlier objects were applied again")
    assert call(monkeypatch, inventory, "upgrade", "--yes") == ExitCode.FAILED
    assert "the add-ons were not updated: w-1: pod x: CrashLoopBackOff" in capsys.readouterr().err


def test_the_plan_changes_nothing(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, [OLD])
    assert call(monkeypatch, inventory, "plan", "--json") == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["addons"][0]["needed"]
    assert cluster.tags == ["pending"]


def test_an_unfinished_roll_out_comes_first(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, unfinished="{}")
    with pytest.raises(WrongInput, match="is unfinished"):
        addons.upgrade(InventoryFleet(inventory), inventory, lambda *_: None)
    assert cluster.tags == []


def test_an_update_ends_if_another_command_takes_the_lock_of_roll_outs(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.lost = Lost("the lock on the roll-out of this cluster was taken by alice")
    with pytest.raises(Lost, match="taken by alice"):
        addons.upgrade(InventoryFleet(inventory), inventory, lambda *_: None)
    assert (cluster.tags, cluster.locks) == (["addons"], 1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_report_is_refused(inventory: Inventory, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    reports: list[Any] = [[{**OLD, "wanted": [attack]}], [hostile(OLD)], [{**OLD, "running": {attack: 1}}], attack, {}]
    for bad in reports:
        Cluster(monkeypatch, bad)
        with pytest.raises(GpunodesError, match="report of the add-ons is invalid"):
            addons.plan(inventory)


def test_the_plan_for_people() -> None:
    many = [f"n{number}" for number in range(8)]
    found = [
        PlannedAddon("a", ["a:2"], {"a:1": 1}, ["DaemonSet a"], many),
        PlannedAddon("b", ["b:1"], {"b:1": 2}, [], []),
    ]
    assert views.plan(found).splitlines() == [
        "a: update",
        "  runs      a:1 on 1 node",
        "  wanted    a:2",
        "  changes   DaemonSet a",
        "  behind    n0, n1, n2, n3, n4 and 3 others",
        "b: up to date, nothing to do",
        "  runs      b:1 on 2 nodes",
    ]
    assert views.plan([]) == "no add-on of gpunodes is installed"


UP = {"objects": ["Deployment metrics-server"]}
CERTIFICATES = "all: {vars: {gpunodes_serving_certificates: true}}\n"


@pytest.fixture
def certified(inventory: Inventory) -> Inventory:
    inventory.path.write_text(inventory.path.read_text() + CERTIFICATES)
    return Inventory(inventory.path)


def test_an_optional_add_on_comes_and_goes(
    certified: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, UP, UP, UP, {})
    assert call(monkeypatch, certified, "up", "metrics-server", "--dry-run", "--json") == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["dry_run"], document["changes"]) == (
        "gpunodes.addon/1", True, ["Deployment metrics-server"],
    )  # fmt: skip
    assert (cluster.locks, cluster.plays[0].check) == (0, True)
    assert call(monkeypatch, certified, "up", "metrics-server") == ExitCode.DONE
    assert "metrics-server: it runs; 1 objects changed" in capsys.readouterr().out
    assert call(monkeypatch, certified, "down", "metrics-server", "--yes") == ExitCode.DONE
    assert call(monkeypatch, certified, "verify", "metrics-server") == ExitCode.DONE
    assert cluster.locks == 2
    assert [play.variables for play in cluster.plays[1:]] == [
        {"addon_name": "metrics-server", "addon_objects": []},
        {"addon_name": "metrics-server", "addon_state": "absent"},
        {"addon_name": "metrics-server", "addon_state": "verified"},
    ]


def test_a_daemon_set_without_a_node_is_not_said_to_run(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"objects": [], "idle": ["dcgm-exporter"]}
    Cluster(monkeypatch, found, found, found)
    assert call(monkeypatch, inventory, "verify", "dcgm-exporter") == ExitCode.DONE
    said = "dcgm-exporter: no node is there for its DaemonSet dcgm-exporter"
    assert capsys.readouterr().out == f"{said}\n"
    assert call(monkeypatch, inventory, "up", "dcgm-exporter") == ExitCode.DONE
    assert capsys.readouterr().out == f"{said}; 0 objects changed\n"
    assert call(monkeypatch, inventory, "verify", "dcgm-exporter", "--json") == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["idle"] == ["dcgm-exporter"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("up", "metrics-server"), "metrics-server needs another value of the setting gpunodes_serving_certificates"),
        (("up", "nothing"), "'nothing' is no optional add-on"),
        (("up", "kueue"), "gpunodes has no objects of kueue"),
        (("up", "local-path", "--manifest", "x.yml"), "local-path takes no --manifest"),
        (("up", "kueue", "--manifest", "missing.yml"), "missing.yml cannot be read"),
        (("down", "local-path"), "addon down is not confirmed"),
    ],
)
def test_a_wrong_request_reaches_no_machine(
    inventory: Inventory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    cluster = Cluster(monkeypatch)
    assert call(monkeypatch, inventory, *words) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
    assert not cluster.plays


def test_a_manifest_is_read_on_the_controller(tmp_path: Path) -> None:
    kueue = chosen("kueue")
    good = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
    path = tmp_path / "manifests.yaml"
    path.write_text(f"---\n{json.dumps(good)}\n---\n{json.dumps({'kind': 'List', 'items': [good]})}\n---\n")
    assert addons.objects_of(kueue, path) == [good, good]
    for bad in ("", "[]", "just text", '{"kind": "ConfigMap", "metadata": []}', "{", "!!python/object:x {}"):
        path.write_text(bad)
        with pytest.raises(WrongInput, match=r"manifests\.yaml"):
            addons.objects_of(kueue, path)


def test_a_file_of_another_add_on_reaches_no_machine(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be listed, verified and removed as kueue, with the version of the table."""
    path = inventory.path.parent / "manifests.yaml"
    path.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
    cluster = Cluster(monkeypatch)
    assert call(monkeypatch, inventory, "up", "kueue", "--manifest", str(path)) == ExitCode.WRONG_INPUT
    assert "the file has no Deployment kueue-controller-manager in kueue-system" in capsys.readouterr().err
    assert not cluster.plays


def test_the_list_of_optional_add_ons(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"installed": {"local-path": "v0.0.29", "other": "v1"}}
    Cluster(monkeypatch, found, found)
    assert call(monkeypatch, inventory, "list", "--json") == ExitCode.DONE
    rows = {each["name"]: each["installed"] for each in json.loads(capsys.readouterr().out)["addons"]}
    assert (rows["local-path"], rows["metrics-server"], rows["other"]) == ("v0.0.29", "", "v1")
    assert call(monkeypatch, inventory, "list") == ExitCode.DONE
    assert "unknown to this gpunodes" in capsys.readouterr().out


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_report_of_optional_add_ons_is_refused(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    for bad in ({"installed": {attack: "v1"}}, {"installed": {"x": attack}}, {"installed": attack}, {}):
        Cluster(monkeypatch, bad)
        with pytest.raises(GpunodesError, match="report of the add-ons is invalid"):
            addons.listed(inventory)
    for key in ("objects", "idle"):
        Cluster(monkeypatch, {key: attack})
        with pytest.raises(GpunodesError, match="report of the add-ons is invalid"):
            addons.down(InventoryFleet(inventory), inventory, chosen("local-path"), lambda *_: None)


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_what_a_control_plane_says_of_add_ons_is_shown_as_text(
    certified: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], attack: str
) -> None:
    """The names of objects and nodes are free text; a failure is one line."""
    found, pending = {"objects": [attack], "idle": [attack]}, {**OLD, "changes": [attack], "behind": [attack]}
    calls = [
        *((verb, "metrics-server", *more) for verb in ("up", "verify") for more in ((), ("--json",))),
        *(("down", "metrics-server", "--yes", *more) for more in ((), ("--dry-run",), ("--json",))),
    ]
    Cluster(monkeypatch, *[found] * len(calls))
    for words in calls:
        assert call(monkeypatch, certified, *words) == ExitCode.DONE
        assert is_plain("".join(capsys.readouterr()))
    Cluster(monkeypatch, [pending], [pending])
    assert call(monkeypatch, certified, "upgrade", "--yes") == ExitCode.DONE
    assert is_plain("".join(capsys.readouterr()))
    for words in (*calls, ("list",), ("plan",), ("upgrade", "--yes")):
        Cluster(monkeypatch, [pending], failure=attack)
        call(monkeypatch, certified, *words)
        assert is_plain("".join(capsys.readouterr()))
