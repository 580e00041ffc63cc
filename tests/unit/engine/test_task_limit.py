"""A machine that holds its connection, but never finishes a task, is given up; the others go on."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
import yaml
from gpunodes.engine import events, runner
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded

ROOT = Path(__file__).parents[3]
_PLAY = """
- hosts: workers
  gather_facts: false
  tasks:
    - name: Work
      ansible.builtin.command: sleep {{ seconds }}
      changed_when: false
    - name: Work on
      ansible.builtin.command: "true"
      changed_when: false
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ANSIBLE_TASK_TIMEOUT", raising=False)
    local = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    hosts = {"w1": {**local, "seconds": 60}, "w2": {**local, "seconds": 0, "gpunodes_kubeadm_limit": 1200}}
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump({"workers": {"hosts": hosts}}))
    return Inventory(path)


def test_a_machine_that_never_ends_a_task_fails_alone(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_TASK_TIMEOUT", "15")
    playbook = tmp_path / "work.yml"
    playbook.write_text(_PLAY)
    folder, seen = tmp_path / "run", list[Event]()
    folder.mkdir()
    assert not runner.run(runner.Play(str(playbook), inventory, ["w1", "w2"]), folder, seen.append).ok
    ended = [event for event in seen if isinstance(event, TaskEnded)]
    failed = {event.machine: event for event in ended if event.outcome is Outcome.FAILED}
    assert {name: events.cause(event) for name, event in failed.items()}.keys() == {"w1"}
    assert events.cause(failed["w1"]).startswith("the task did not end within 15 s: the machine is connected")
    assert [event.outcome for event in ended if event.machine == "w2"] == [Outcome.UNCHANGED] * 2


def test_the_limit_is_above_those_that_the_settings_set(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.task_limit(inventory, ["w1", "w2"], {}) == "7200"
    assert runner.task_limit(inventory, ["w1", "w2"], {"gpunodes_ready_timeout": 3600}) == "21600"
    assert runner.task_limit(inventory, ["w1"], {"gpunodes_drain_timeout": 10**12}) == str(30 * 86400)
    monkeypatch.setenv("ANSIBLE_TASK_TIMEOUT", "0")
    assert runner.task_limit(inventory, ["w1"], {}) == "0", "the user's own choice"
    assert runner.environment(Path("/nowhere"))["ANSIBLE_TASK_TIMEOUT"] == "0"


def test_the_checkout_has_the_same_limit() -> None:
    config = configparser.RawConfigParser()
    config.read(ROOT / "ansible.cfg")
    assert config["defaults"]["task_timeout"] == str(runner.TASK_LIMIT_S)
    assert f"task_timeout = {runner.TASK_LIMIT_S}\n" in (ROOT / "docs" / "ansible.md").read_text()
