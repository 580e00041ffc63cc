"""The works of upgrades: made again from a record, which may be hostile, and started by their commands."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes import cli
from gpunodes.cli import main, terminal
from gpunodes.engine import control_planes, runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import preflight, upgrade, upgrade_plan
from gpunodes.operations.etcd import backup
from gpunodes.operations.rolling import commands, context, runtime, status, upgrades, works
from gpunodes.operations.rolling.work import Target
from gpunodes.planner.upgrade_model import Part, PassedOver, Step, UpgradePlan
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import Disruption, RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.rollout.state import ADDONS, Following, Rollout


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {cp-1: , cp-2: }}\nworkers: {hosts: {w-1: , w-2: }}\n")
    return Inventory(path)


@pytest.mark.parametrize(
    ("name", "parameters", "disrupts", "undoes"),
    [
        (upgrades.CONTROL_PLANES, {"target": "1.36.3"}, Disruption.NOTHING, False),
        (upgrades.KUBELETS, {"target": "1.36.3"}, Disruption.NODE, True),
        (upgrades.ROLLBACK, {}, Disruption.NODE, False),
        (upgrades.SYSTEM, {"security": "yes", "reboot": "no"}, Disruption.NODE, False),
        (upgrades.DRIVER, {"driver": "590", "reboot": "no"}, Disruption.GPU_PODS, True),
        (upgrades.DRIVER, {"driver": "590", "reboot": "yes"}, Disruption.NODE, True),
        (runtime.RUNTIME, {}, Disruption.NODE, True),
    ],
)
def test_a_work_is_made_again_from_its_record(
    inventory: Inventory, name: str, parameters: Mapping[str, str], disrupts: Disruption, undoes: bool
) -> None:
    work = works.make(InventoryFleet(inventory), name, parameters)
    assert (work.name, work.disrupts, work.undoes) == (name, disrupts, undoes)
    assert work.parameters == parameters


ATTACK = "{{ lookup('pipe', 'touch /tmp/x') }}"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (upgrades.CONTROL_PLANES, {}),
        (upgrades.CONTROL_PLANES, {"target": "1.36"}),
        (upgrades.KUBELETS, {"target": ATTACK}),
        (upgrades.KUBELETS, {"target": "1.36.3; reboot"}),
        (upgrades.SYSTEM, {"security": ATTACK, "reboot": "no"}),
        (upgrades.SYSTEM, {"security": "yes"}),
        (upgrades.DRIVER, {"driver": ATTACK, "reboot": "no"}),
        (upgrades.DRIVER, {"driver": "590", "reboot": "maybe"}),
        ("upgrade.yml", {"target": "1.36.3"}),
    ],
)
def test_a_hostile_record_makes_no_work(inventory: Inventory, name: str, parameters: Mapping[str, str]) -> None:
    with pytest.raises(WrongInput):
        works.make(InventoryFleet(inventory), name, parameters)


def test_the_kubelet_of_a_control_plane_is_not_taken_back(inventory: Inventory) -> None:
    work = upgrades.KubeletUpgrade(inventory, "1.36.3")
    with pytest.raises(GpunodesError, match="control plane"):
        work.undo(Target(inventory.control_planes()[0]))
    with pytest.raises(WrongInput, match="cp-1 is a control plane"):
        upgrade.check_workers(inventory.machines(Role.CONTROL_PLANE))


def _plan(*steps: tuple[str, Part], passed_over: Sequence[PassedOver] = ()) -> UpgradePlan:
    made = [Step(name, part, "1.35.4", "1.36.3", drained=part is Part.NODE) for name, part in steps]
    return UpgradePlan("1.36", "1.36.3", "1.35.4", made, (), (), (), passed_over)


class Rolled:
    """Roll-outs that end as ``bad`` says, and the plays that were run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: str = "") -> None:
        self.standing: list[Following] = []
        self.rollouts: list[tuple[str, list[str]]] = []
        self.plays: list[runner.Play] = []
        self._bad = bad
        monkeypatch.setattr(commands, "roll_out", self.roll_out)
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(control_planes, "choose", upgrade_choice)
        monkeypatch.setattr(commands, "resume", self.resume)
        opened = SimpleNamespace(leases=SimpleNamespace(lost=lambda: None), report=lambda *_: None)
        monkeypatch.setattr(context, "opened", lambda *_: contextlib.nullcontext(opened))
        monkeypatch.setattr(commands, "locked", self.locked)
        self.is_locked = False

    def roll_out(self, _: Any, machines: list[Machine], work: Any, *more: Any) -> RolloutResult:
        self.standing = list(more[3])
        return self._done(work.name, [machine.name for machine in machines])

    def resume(self, fleet: Any, _: Any, __: str, last: commands.LastParts) -> RolloutResult:
        now = self.standing.pop(0)
        if now.work not in last:
            assert works.make(fleet, now.work, now.parameters).parameters == {"target": "1.36.3"}
            return self._done(now.work, list(now.machines))
        with self.locked(None):
            last[now.work](SimpleNamespace(fleet=fleet, report=lambda *_: None, leases=SimpleNamespace(lost=None)))  # type: ignore[arg-type]  # a stand-in
        return RolloutResult("id", now.work, [])

    def _done(self, work: str, names: list[str]) -> RolloutResult:
        self.rollouts.append((work, names))
        outcome = RolloutOutcome.FAILED if work == self._bad else RolloutOutcome.DONE
        then = self.standing[0].work if self.standing and work != self._bad else ""
        return RolloutResult("id", work, [MachineRollout(name, outcome) for name in names], then=then)

    @contextlib.contextmanager
    def locked(self, _: Any) -> Iterator[str]:
        self.is_locked = True
        yield ""
        self.is_locked = False

    def run(self, play: runner.Play, *_: Any) -> runner.PlayResult:
        assert self.is_locked, "no roll-out begins while the add-ons are updated"
        self.plays.append(play)
        return runner.PlayResult(ok=True, interrupted=False, log=Path("log"))


def upgrade_choice(inventory: Inventory) -> Any:
    return control_planes.Choice(inventory.control_planes()[0])


CONTROLS = [("cp-1", Part.CONTROL_PLANE), ("cp-2", Part.CONTROL_PLANE)]
NODES = [(name, Part.NODE) for name in ("cp-1", "cp-2", "w-1", "w-2")]


def _roll(inventory: Inventory, plan: UpgradePlan, only: tuple[str, ...] = ()) -> list[RolloutResult]:
    machines = [each for each in inventory.machines() if not only or each.name in only]
    return upgrade.roll_out(InventoryFleet(inventory), plan, machines, RolloutOptions(), lambda *_: None)


def test_a_rollback_installs_the_earlier_kubelet_and_nothing_else(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played: list[tuple[str, Any, Any]] = []

    def run(play: runner.Play, *_: Any) -> runner.PlayResult:
        played.append((play.playbook, list(play.machines), list(play.tags)))
        return runner.PlayResult(ok=True, interrupted=False, log=tmp_path / "stdout")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(runner, "run", run)
    work, target = upgrades.Rollback(inventory), Target(Machine("w-1", "w-1", Role.WORKER))
    work.prepare(target)
    work.apply(target)
    plays = [("upgrade.yml", ["w-1"], [tag]) for tag in ("prepare", "undo")]
    assert (played, work.verify(target)) == (plays, "")


def test_a_rollback_leaves_out_what_did_not_respond_before_the_question(inventory: Inventory) -> None:
    work, target = upgrades.Rollback(inventory, {"w-2": "1.35.4"}), Target(Machine("w-1", "w-1", Role.WORKER))
    with pytest.raises(GpunodesError, match="w-1 did not respond"):
        work.needed(target)


def _rollback(inventory: Inventory, monkeypatch: pytest.MonkeyPatch, before: dict[str, str | None]) -> list[Any]:
    """Call `upgrade rollback` for the workers, which have 1.36.3; what it rolls out, and what was asked."""
    done: list[Any] = []
    facts = {
        name: {"kubernetes": {} if each is None else {"before": each}, "packages": {"kubelet": "1.36.3-1.1"}}
        for name, each in before.items()
    }
    seen = SimpleNamespace(interrupted=False, cluster={"version": "v1.36.3"}, facts=facts)

    def roll_out(_: Any, machines: list[Machine], work: Any, *_more: Any) -> RolloutResult:
        needs = {}
        for machine in machines:
            with contextlib.suppress(GpunodesError):
                needs[machine.name] = work.needed(Target(machine))
        done.append(needs)
        return RolloutResult("id", work.name, [])

    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: seen)
    monkeypatch.setattr(commands, "roll_out", roll_out)
    monkeypatch.setattr(terminal, "confirm", lambda what, **_: done.append(what))
    monkeypatch.setattr("sys.argv", ["gpunodes", "upgrade", "rollback", "w-*", "--yes", "-i", str(inventory.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    return [ended.value.code, *done]


@pytest.mark.parametrize("before", ["", None, "1.32.9", "1.37.2"])
def test_a_rollback_without_a_way_back_is_refused_before_a_node_is_drained(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: str | None
) -> None:
    assert _rollback(inventory, monkeypatch, {"w-1": "1.35.4", "w-2": before}) == [ExitCode.WRONG_INPUT]
    shown = capsys.readouterr().err
    assert ("w-2: its kubelet was" if before else "w-2: no earlier version") in shown
    assert "w-1:" not in shown


def test_a_rollback_says_to_which_versions(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has it already is not drained; one that does not respond is left to the roll-out, which skips it."""
    question = "1 workers are drained and get their earlier kubelet: w-1 (1.35.4)"
    needs = {"w-1": "its kubelet becomes 1.35.4", "w-2": ""}
    found = _rollback(inventory, monkeypatch, {"w-1": "1.35.4", "w-2": "1.36.3"})
    assert found == [ExitCode.DONE, question, needs]
    found = _rollback(inventory, monkeypatch, {"w-1": "1.35.4"})
    assert found == [ExitCode.DONE, question, {"w-1": "its kubelet becomes 1.35.4"}]


def test_a_rollback_of_a_control_plane_is_refused_before_anything(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["gpunodes", "upgrade", "rollback", "w-1", "cp-1", "--yes", "-i", str(inventory.path)]
    )
    monkeypatch.setattr(commands, "roll_out", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    assert "cp-1 is a control plane" in capsys.readouterr().err


def test_every_command_that_drains_nodes_for_a_roll_out_has_all_its_options() -> None:
    """`rollout apply` drains nothing, but it has them, too: some are refused there."""
    wanted = {"--wait-for-jobs", "--canary", "--soak", "--max-unavailable", "--only", "--wake", "--yes"}
    folder = Path(cli.__file__).parent
    found = {path for path in folder.rglob("*.py") if "rollout_options.request(" in path.read_text()}
    assert {str(path.relative_to(folder)) for path in found} == {
        *(
            f"{name}.py"
            for name in ("gpu/upgrade/start", "operating_system/upgrade", "rollout/apply", "runtime/upgrade")
        ),
        *(f"upgrade/{name}.py" for name in ("rollback", "start")),
    }
    for path in found:
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        command = importlib.import_module(f"gpunodes.cli.{name}").command
        assert wanted <= {option for parameter in command.params for option in parameter.opts}, name
        assert "rollout_options.wake(" in path.read_text(), name


def test_control_planes_come_before_kubelets_and_the_add_ons_last(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled = Rolled(monkeypatch)
    _roll(inventory, _plan(*CONTROLS, *NODES))
    assert rolled.rollouts == [
        (upgrades.CONTROL_PLANES, ["cp-1", "cp-2"]),
        (upgrades.KUBELETS, ["cp-1", "cp-2", "w-1", "w-2"]),
    ]
    assert [(play.playbook, play.machines, play.tags) for play in rolled.plays] == [("addon.yml", ["cp-1"], ["addons"])]


def test_nothing_follows_a_roll_out_that_failed(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = Rolled(monkeypatch, bad=upgrades.CONTROL_PLANES)
    assert [each.exit_code for each in _roll(inventory, _plan(*CONTROLS, *NODES))] == [ExitCode.PARTLY]
    assert [name for name, _ in rolled.rollouts] == [upgrades.CONTROL_PLANES]
    assert not rolled.plays


def test_what_is_left_out_keeps_the_add_ons(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = Rolled(monkeypatch)
    _roll(inventory, _plan(*NODES), only=("w-1",))
    assert rolled.rollouts == [(upgrades.KUBELETS, ["w-1"])]
    assert not rolled.plays


BROKEN = PassedOver("w-2", "1.35.4", "its node is not ready: no disk", holds_addons=True)
OFF = PassedOver("w-2", "", "off on purpose", holds_addons=False)


@pytest.mark.parametrize(("left", "plays"), [(OFF, ["addon.yml"]), (BROKEN, [])])
@pytest.mark.parametrize("steps", [(*CONTROLS, *NODES[:3]), CONTROLS, ()])
def test_a_machine_that_is_passed_over_is_a_result(
    inventory: Inventory,
    monkeypatch: pytest.MonkeyPatch,
    left: PassedOver,
    plays: list[str],
    steps: tuple[tuple[str, Part], ...],
) -> None:
    """The add-ons of the other machines follow, unless they would wait for its node."""
    rolled = Rolled(monkeypatch)
    results = _roll(inventory, _plan(*steps, passed_over=[left]))
    [kubelets] = [each for each in results if each.work == upgrades.KUBELETS]
    assert kubelets.machines[-1] == MachineRollout("w-2", RolloutOutcome.SKIPPED, left.why)
    assert kubelets.exit_code is ExitCode.PARTLY
    assert [play.playbook for play in rolled.plays] == plays
    assert _roll(inventory, _plan(passed_over=[left]), only=("w-1",)) == []


def test_the_first_record_has_all_that_follows(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a command that was killed anywhere is resumed to the end, with the machines that --only chose."""
    rolled = Rolled(monkeypatch, bad=upgrades.CONTROL_PLANES)
    _roll(inventory, _plan(*CONTROLS, *NODES))
    assert rolled.standing == [
        Following(upgrades.KUBELETS, {"target": "1.36.3"}, ["cp-1", "cp-2", "w-1", "w-2"]),
        Following(ADDONS),
    ]
    _roll(inventory, _plan(*CONTROLS, *NODES), only=("cp-1", "cp-2", "w-2"))
    assert rolled.standing == [Following(upgrades.KUBELETS, {"target": "1.36.3"}, ["cp-1", "cp-2", "w-2"])]


@pytest.mark.parametrize("only", [("w-1",), ("cp-1",), ("cp-2", "w-1", "w-2")])
def test_no_kubelet_gets_newer_than_a_control_plane_that_is_left_out(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only: tuple[str, ...]
) -> None:
    """Of two control planes one is not enough: the other one's API server would serve newer kubelets."""
    rolled = Rolled(monkeypatch)
    plan = _plan(*CONTROLS, *NODES)
    with pytest.raises(WrongInput, match="a kubelet is never newer than an API server"):
        _roll(inventory, plan, only=only)
    monkeypatch.setattr(upgrade_plan, "run", lambda *_: SimpleNamespace(plan=plan))
    monkeypatch.setattr(backup, "run", None)
    monkeypatch.setattr(terminal, "confirm", None)
    options = [option for name in only for option in ("--only", name)]
    monkeypatch.setattr("sys.argv", ["gpunodes", "upgrade", "1.36", "--yes", *options, "-i", str(inventory.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    left = "cp-1 (1.35.4)" if "cp-1" not in only else "cp-2 (1.35.4)"
    assert left in capsys.readouterr().err
    assert (rolled.rollouts, rolled.plays) == ([], [])


def test_kubelets_alone_are_upgraded_when_the_control_planes_are(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled = Rolled(monkeypatch)
    _roll(inventory, _plan(*CONTROLS[:1], *NODES), only=("cp-1", "w-1"))
    assert [name for name, _ in rolled.rollouts] == [upgrades.CONTROL_PLANES, upgrades.KUBELETS]


@pytest.mark.parametrize(
    "argv",
    [
        ("upgrade", "--yes"),
        ("upgrade", "1.37", "--resume", "--yes"),
        ("upgrade", "--resume", "--canary", "1", "--yes"),
        ("upgrade", "start", "--resume", "1.37", "--yes"),
    ],
)
def test_an_upgrade_has_a_version_or_is_resumed(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpunodes", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    assert "a version, or --resume alone" in capsys.readouterr().err


def test_an_upgrade_is_resumed_as_it_began(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Machines that --only left out are not in the record: they stay as they are."""
    rolled, resumed = Rolled(monkeypatch), RolloutResult("id", upgrades.KUBELETS, [])
    began = Rollout("id", upgrades.KUBELETS, {"target": "1.36.3"}, RolloutOptions(), 1.0, "ann", waiting=["w-1"])
    monkeypatch.setattr(status, "read", lambda *_: status.RolloutStatus(began, "", {}, (), ""))
    monkeypatch.setattr(commands, "resume", lambda *_: resumed)
    monkeypatch.setattr("sys.argv", ["gpunodes", "upgrade", "--resume", "-i", str(inventory.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.DONE
    assert not rolled.rollouts
    assert "for what this roll-out left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("only", "asked", "backups"),
    [
        ((), "4 machines are upgraded to 1.36.3", 1),
        (("--only", "w-1"), "w-1 is upgraded to 1.36.3", 1),
        (("--only", "w-2"), "", 0),
        (None, "all machines have 1.36.3", 0),
    ],
)
def test_the_question_and_the_backup_are_about_what_is_done(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, only: tuple[str, ...] | None, asked: str, backups: int
) -> None:
    questions, made = list[str](), list[int]()
    rolled = Rolled(monkeypatch)
    plan = _plan() if only is None else _plan(*CONTROLS, *NODES) if not only else _plan(NODES[0], NODES[2])
    monkeypatch.setattr(upgrade_plan, "run", lambda *_: SimpleNamespace(plan=plan))

    def back_up(*_: object) -> Any:
        made.append(1)
        return SimpleNamespace(path="b.tar")

    monkeypatch.setattr(backup, "run", back_up)
    monkeypatch.setattr(terminal, "confirm", lambda what, **_: questions.append(what))
    monkeypatch.setattr("sys.argv", ["gpunodes", "upgrade", "1.36", "--yes", *(only or ()), "-i", str(inventory.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, len(made)) == (ExitCode.DONE, backups)
    assert [asked in each for each in questions] == ([True] if asked else [])
    assert bool(rolled.plays) is (not only), "the add-ons follow when all machines have the version"


@pytest.mark.parametrize("work", [upgrades.CONTROL_PLANES, upgrades.KUBELETS, ADDONS])
def test_every_part_of_an_upgrade_is_resumed_by_it(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    began = Rollout("id", work, {}, RolloutOptions(), 1.0, "ann")
    monkeypatch.setattr(status, "read", lambda *_: status.RolloutStatus(began, "", {}, (), ""))
    upgrade.check_unfinished(InventoryFleet(inventory), lambda *_: None)


@pytest.mark.parametrize("work", ["", upgrades.SYSTEM])
def test_only_an_upgrade_of_kubernetes_is_resumed_by_it(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    began = Rollout("id", work, {}, RolloutOptions(), 1.0, "ann") if work else None
    monkeypatch.setattr(status, "read", lambda *_: status.RolloutStatus(began, "", {}, (), ""))
    with pytest.raises(WrongInput, match="roll-out is"):
        upgrade.check_unfinished(InventoryFleet(inventory), lambda *_: None)
