"""The options that all roll-outs share, and the commands around a roll-out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from gpunodes import settings
from gpunodes.cli import rollout_options, terminal
from gpunodes.cli.gpu.upgrade import start as gpu_upgrade
from gpunodes.cli.rollout_options import RolloutFlags
from gpunodes.cli.upgrade import start as kubernetes_upgrade
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import waking
from gpunodes.operations.rolling import commands
from gpunodes.repair.policy import Budget
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.rollout.times import Window
from gpunodes.views import rollout as views


def flags(*argv: str) -> RolloutFlags:
    found: list[RolloutFlags] = []

    @click.command()
    @rollout_options.rollout_options
    def command(rollout_flags: RolloutFlags) -> None:
        found.append(rollout_flags)

    result = CliRunner().invoke(command, argv, standalone_mode=False)
    if result.exception:
        raise result.exception
    return found[0]


@pytest.mark.parametrize(
    ("argv", "off", "woken"), [((), ["w1"], []), (("--wake",), ["w1"], ["w1"]), (("--wake",), [], [])]
)
def test_only_wake_switches_machines_on(
    argv: tuple[str, ...], off: list[str], woken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [Machine(name, name, Role.WORKER) for name in ("w0", "w1")]
    asked, seen = list[str](), list[str]()
    monkeypatch.setattr(terminal, "confirm", lambda what, **_: asked.append(what))
    monkeypatch.setattr(waking, "asleep", lambda _, given: [each for each in given if each.name in off])
    monkeypatch.setattr(commands, "check_free", lambda *_: seen.clear())
    monkeypatch.setattr(waking, "wake", lambda _, given, __: seen.extend(each.name for each in given))
    given = flags(*argv)
    rollout_options.wake(None, machines, given, lambda *_: None)  # type: ignore[arg-type]  # no fleet is needed
    assert (seen, asked) == (woken, ["1 machines are switched on: w1"] if woken else [])
    assert given.changes is bool(argv)


@pytest.mark.parametrize("refuses", ["roll-out", "check"])
def test_no_machine_is_switched_on_for_a_roll_out_that_is_refused(
    refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise WrongInput("refused")

    seen: list[Any] = []
    monkeypatch.setattr(waking, "asleep", lambda _, given: given)
    monkeypatch.setattr(waking, "wake", lambda *_: seen.append("woken"))
    monkeypatch.setattr(terminal, "confirm", lambda *_, **__: seen.append("asked"))
    monkeypatch.setattr(commands, "check_free", refused if refuses == "roll-out" else lambda *_: None)
    machines = [Machine("w0", "w0", Role.WORKER)]
    with pytest.raises(WrongInput, match="refused"):
        rollout_options.wake(None, machines, flags("--wake"), lambda *_: None, refused)  # type: ignore[arg-type]  # as above
    assert seen == []


@pytest.mark.parametrize("upgrade", [["1.37"], ["w0", "--driver", "590"], ["w0", "--driver", "no-driver"]])
def test_a_plan_that_is_not_possible_is_refused_before_machines_are_switched_on(
    upgrade: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise WrongInput("no driver or upgrade")

    woken: list[Any] = []
    command = gpu_upgrade if "--driver" in upgrade else kubernetes_upgrade
    monkeypatch.setattr(command, "_plan", refused)
    monkeypatch.setattr(waking, "asleep", lambda _, given: given[-1:])
    monkeypatch.setattr(waking, "wake", lambda *_: woken.append(1))
    monkeypatch.setattr(commands, "check_free", lambda *_: None)
    path = tmp_path / "hosts.yml"
    hosts = (
        "control_plane: {hosts: {c0: {ansible_host: 127.0.0.1}}}\nworkers: {hosts: {w0: {ansible_host: 127.0.0.2}}}\n"
    )
    path.write_text(hosts)
    argv = [*upgrade, "--wake", "--yes", "-i", str(path)]
    result = CliRunner().invoke(command.command, argv, standalone_mode=False)
    assert isinstance(result.exception, WrongInput)
    assert "driver" in str(result.exception)
    assert woken == []


def test_options_over_settings_over_defaults() -> None:
    given = dict(settings.defaults())
    default = rollout_options.request(flags(), given)
    assert (default.max_unavailable, default.canary, default.soak_s, default.windows) == (Budget(1), 0, 0.0, ())
    given |= {"gpunodes_rollout_max_unavailable": "10%", "gpunodes_rollout_windows": ["22:00-05:00"]}
    by_settings = rollout_options.request(flags("--canary", "2", "--wait-for-jobs", "2h"), given)
    assert by_settings.max_unavailable == Budget(10, percent=True)
    assert (by_settings.canary, by_settings.soak_s, by_settings.wait_for_jobs_s) == (2, 600.0, 7200.0)
    assert by_settings.windows == (Window(22 * 60, 5 * 60),)
    named = rollout_options.request(flags("--max-unavailable", "3", "--canary", "1", "--soak", "30s"), given)
    assert (named.max_unavailable, named.soak_s) == (Budget(3), 30.0)


def test_a_soak_needs_a_canary() -> None:
    with pytest.raises(WrongInput, match="no canary"):
        flags("--soak", "10m")


@pytest.mark.parametrize(
    "argv", [("--max-unavailable", "0"), ("--canary", "1", "--soak", "soon"), ("--wait-for-jobs", "1 h")]
)
def test_wrong_values_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(WrongInput):
        rollout_options.request(flags(*argv), settings.defaults())


def test_only_narrows_the_selection(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "control_plane: {hosts: {c0: }}\nworkers: {hosts: {w0: , w1: , w2: }}\nrack: {hosts: {w1: , w2: }}\n"
    )
    inventory = Inventory(path)

    def names(patterns: tuple[str, ...], *argv: str) -> list[str]:
        return [machine.name for machine in rollout_options.select(inventory, patterns, flags(*argv))]

    assert names(()) == ["c0", "w0", "w1", "w2"]
    assert names((), "--only", "rack") == ["w1", "w2"]
    assert names(("w0", "w1"), "--only", "rack", "--only", "control_plane") == ["w1"]
    with pytest.raises(WrongInput, match="--only leaves no machine"):
        names(("w0",), "--only", "rack")
    with pytest.raises(WrongInput):
        names((), "--only", "no-such-group")


def test_a_result_for_people_and_programs() -> None:
    result = RolloutResult(
        "id",
        "os",
        [
            MachineRollout("w0", RolloutOutcome.DONE, "", 61.04),
            MachineRollout("w1", RolloutOutcome.NOT_DRAINED, "these pods\x1b[2J cannot be evicted: a/b"),
            MachineRollout("w2", None),
        ],
        finished=False,
        stopped="w1: why",
    )
    shown = views.summary(result)
    assert "\x1b" not in shown
    assert shown.splitlines()[-1].startswith("unfinished: `gpunodes rollout resume`")
    assert "os: 1 done, 1 not ended, 1 not-drained" in shown
    document: Any = views.document(result)
    assert (document["schema"], document["exit_code"], document["finished"]) == ("gpunodes.rollout/1", 3, False)
    assert document["machines"][0] == {"name": "w0", "outcome": "done", "why": "", "seconds": 61.0}
    assert document["machines"][2]["outcome"] is None
