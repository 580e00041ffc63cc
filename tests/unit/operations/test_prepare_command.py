"""`gpunodes prepare` with stand-ins for Ansible: it contacts no cluster, and refuses nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpunodes import cli
from gpunodes.engine import runner
from gpunodes.engine.cluster.errors import NoSession
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations import claims

from tests.stand_ins import facts

pytestmark = pytest.mark.long

ALONE = "workers: {hosts: {image-1: {ansible_host: 10.0.0.9}, image-2: {ansible_host: 10.0.0.8}}}\n"
CLUSTER = ALONE + "control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}\n"


class Ansible:
    """Records the plays, and reports machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plays: list[runner.Play] = []
        self.reported: dict[str, dict[str, Any]] = {}
        monkeypatch.setattr(runner, "run", self.run)

    def run(self, play: runner.Play, folder: Path, on_event: Callable[[Event], None], *_: Any) -> runner.PlayResult:
        self.plays.append(play)
        for name in play.machines:
            own = facts(
                **{"gpu": {"functions": []}, "hostname": name, "time": time.time(), **self.reported.get(name, {})}
            )
            if play.playbook in {"prepare_facts.yml", "facts.yml"}:
                result = {"host_facts": own}
                on_event(TaskEnded(name, "settings", "Read the machine", Outcome.UNCHANGED, 1.0, result))
            else:
                on_event(TaskEnded(name, "prepared", "Complete", Outcome.CHANGED, 1.0, {}))
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    @property
    def playbooks(self) -> list[str]:
        return [play.playbook for play in self.plays]


@pytest.fixture
def ansible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ansible:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Ansible(monkeypatch)


Prepare = Callable[..., int]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Prepare:
    def run(*words: str, inventory: str = ALONE) -> int:
        (tmp_path / "hosts.yml").write_text(inventory)
        monkeypatch.setattr("sys.argv", ["gpunodes", "prepare", *words, "-i", str(tmp_path / "hosts.yml")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return run


def no_session(*_: Any) -> Any:
    raise NoSession("control-1 does not respond")


def test_machines_are_prepared_without_a_control_plane(
    ansible: Ansible, prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("image-1", "--json") == 0
    assert ansible.playbooks == ["prepare_facts.yml", "prepare.yml"]
    assert [list(play.machines) for play in ansible.plays] == [["image-1"], ["image-1"]]
    assert ansible.plays[1].cluster == {}
    assert ansible.plays[1].facts is not None
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["command"], document["machines"][0]["outcome"]) == ("prepare", "changed")
    assert "/etc/machine-id" in captured.err


def test_a_dry_run_is_ansible_s_check_mode_and_says_nothing_of_images(
    ansible: Ansible, prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("image-1", "--dry-run") == 0
    assert ansible.plays[1].check
    assert "machine-id" not in capsys.readouterr().err


def test_a_node_is_refused_before_anything_is_changed(
    ansible: Ansible, prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    ansible.reported["image-1"] = {"kubernetes": {"role": "worker", "ca_hash": None, "server": "10.0.0.1:6443"}}
    assert prepare("image-1", "image-2") == 1
    assert ansible.playbooks == ["prepare_facts.yml"]
    out, err = capsys.readouterr()
    assert "it is already a worker (10.0.0.1:6443); wanted: a machine of no cluster" in err
    assert "machine-id" not in out + err


def test_the_option_for_expected_gpus_is_a_setting_of_the_run(ansible: Ansible, prepare: Prepare) -> None:
    assert prepare("image-1", "--gpu-device", "2330", "--gpu-device", "20b0") == 0
    assert [(play.variables or {})["gpunodes_prepare_gpus"] for play in ansible.plays] == [["2330", "20b0"]] * 2


@pytest.mark.parametrize("wrong", ["H100", "", "{{x}}", "123", "2330,20b0;"])
def test_something_else_than_a_device_id_is_refused(
    ansible: Ansible, prepare: Prepare, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert prepare("image-1", "--gpu-device", wrong) == 2
    assert ansible.plays == []
    assert "four hexadecimal digits" in capsys.readouterr().err


def test_a_control_plane_that_does_not_respond_only_costs_the_lock(
    ansible: Ansible, prepare: Prepare, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claims, "claimed", no_session)
    assert prepare("image-1", inventory=CLUSTER) == 0
    assert ansible.playbooks == ["prepare_facts.yml", "prepare.yml"]
    assert all("control-1" not in play.machines for play in ansible.plays)
    assert "no lock can be taken: control-1 does not respond" in capsys.readouterr().err


def test_other_commands_still_need_that_lock(ansible: Ansible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "claimed", no_session)
    (tmp_path / "hosts.yml").write_text(CLUSTER)
    monkeypatch.setattr("sys.argv", ["gpunodes", "up", "--skip-phase", "preflight", "-i", str(tmp_path / "hosts.yml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert ansible.plays == []


MINT = {"id": "linuxmint", "version": "22", "codename": "wilma", "name": "Linux Mint 22", "like": "ubuntu debian"}


@pytest.mark.parametrize("command", ["prepare", "preflight", "gpu plan"])
def test_a_system_that_is_not_supported_is_treated_as_the_nearest_one_by_an_option(
    ansible: Ansible, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    machine = "10.0.0.9"
    ansible.reported[machine] = {"os": {**MINT, "base": "noble"}}
    if command == "gpu plan":
        functions = [{"address": "0000:3b:00.0", "vendor": "10de", "device": "1eb8", "class": "030200"}]
        ansible.reported[machine]["gpu"] = {"functions": functions, "headers": {"running": True, "package": None}}
    (tmp_path / "hosts.yml").write_text(f"workers: {{hosts: {{{machine}: }}}}\n")
    # The others need a control plane in an inventory, and take addresses.
    where = ("-i", str(tmp_path / "hosts.yml")) if command == "prepare" else ("--user", "root")

    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["gpunodes", *command.split(), machine, *where, *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    code, shown = run()
    assert code == 1, shown
    code, shown = run("--unsupported-os")
    assert code == 0, shown
    given = [(play.variables or {}).get("gpunodes_unsupported_os") for play in ansible.plays]
    assert given == [None, True] + [True] * (command == "prepare")


VERSIONS = """
workers:
  hosts:
    image-1: {ansible_host: 10.0.0.9, gpunodes_kubernetes_version: "1.35"}
    image-2: {ansible_host: 10.0.0.8}
"""


def test_the_machines_settings_decide_the_version(
    ansible: Ansible, prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    ansible.reported["image-1"] = {"packages": {"kubelet": "1.35.1-1.1"}}
    assert prepare("image-1", inventory=VERSIONS) == 0
    assert prepare("image-1", "image-2", inventory=VERSIONS) == 2
    assert "gpunodes_kubernetes_version is 1.35 and 1.36, depending on the machine" in capsys.readouterr().err
    assert prepare("image-2", "--kubernetes-version", "1.2", inventory=VERSIONS) == 2


def test_known_facts_reach_the_play_if_preflight_is_skipped(ansible: Ansible, prepare: Prepare) -> None:
    """The playbook itself refuses nodes then (tests/trust)."""
    assert prepare("image-1", "--skip-phase", "preflight") == 0
    assert ansible.playbooks == ["prepare.yml"]
