"""A work that is a playbook, run by Ansible on this machine: a tag for each stage, sealed variables, failures, stop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gpunodes.engine import runner
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations.rolling.playbook import PlaybookWork
from gpunodes.operations.rolling.work import Stopped, Target
from gpunodes.rollout.record import Disruption

pytestmark = pytest.mark.long

PLAYBOOK = """---
- name: Work
  hosts: workers
  gather_facts: false
  tasks:
    - name: Note the stage that always runs
      ansible.builtin.copy:
        content: "{{ {'value': work_value} | to_json }}"
        dest: "FOLDER/always-{{ inventory_hostname }}"
        mode: "0600"
      tags: always
    - name: Prepare
      ansible.builtin.file: {path: "FOLDER/prepare", state: touch, mode: "0600"}
      tags: prepare
    - name: Apply
      ansible.builtin.file: {path: "FOLDER/apply", state: touch, mode: "0600"}
      tags: apply
    - name: Wait
      ansible.builtin.command: sleep 60
      when: work_value == "slow"
      tags: apply
    - name: Verify
      ansible.builtin.fail: {msg: "the version is {{ work_value }}"}
      tags: verify
    - name: Undo
      ansible.builtin.fail: {msg: "no way back"}
      tags: undo
"""


class Work(PlaybookWork):
    def needed(self, _: Target) -> str:
        return "something"


def work(folder: Path, value: str) -> tuple[Work, Inventory]:
    (folder / "work.yml").write_text(PLAYBOOK.replace("FOLDER", str(folder)))
    path = folder / "hosts.yml"
    path.write_text(
        "control_plane: {hosts: {c0: {ansible_connection: local}}}\n"
        "workers: {hosts: {w0: {ansible_connection: local}, w1: {ansible_connection: local}}}\n"
    )
    inventory = Inventory(path)
    made = Work(
        inventory,
        "test",
        str(folder / "work.yml"),
        Disruption.NODE,
        parameters={},
        variables={"work_value": value},
        undoes=True,
    )
    return made, inventory


def test_each_stage_runs_its_own_tag_on_one_machine_with_data_that_is_never_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    value = "{{ 40 + 2 }}"
    made, inventory = work(tmp_path, value)
    target = Target(inventory.machines()[-1])
    made.prepare(target)
    assert (tmp_path / "prepare").exists()
    assert not (tmp_path / "apply").exists()
    made.apply(target)
    assert (tmp_path / "apply").exists()
    assert json.loads((tmp_path / "always-w1").read_text()) == {"value": value}
    assert not (tmp_path / "always-w0").exists()
    assert f"the version is {value}" in made.verify(target)
    with pytest.raises(GpunodesError, match="no way back"):
        made.undo(target)


def test_what_a_module_notes_is_shown_once_for_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a kernel that is held: the user reads the roll-out, not Ansible's log."""
    made, inventory = work(tmp_path, "x")
    shown: list[str] = []

    def run(_: runner.Play, __: Path, on_event: Callable[[Event], None], ___: object) -> runner.PlayResult:
        for machine, notes in (("w1", ["held", "held", 5]), ("w0", ["of another machine"]), ("w1", "no list")):
            on_event(TaskEnded(machine, "work", "Apply", Outcome.CHANGED, 1.0, {"notes": notes}))
        return runner.PlayResult(ok=True, interrupted=False, log=Path("log"))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(runner, "run", run)
    made.apply(Target(inventory.machines()[-1], report=shown.append))
    assert shown == ["held", "5"]


def test_a_run_ends_when_the_command_must_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made, inventory = work(tmp_path, "slow")
    stop = threading.Event()
    target = Target(inventory.machines()[-1], should_stop=lambda: (tmp_path / "apply").exists() or stop.is_set())
    with pytest.raises(Stopped, match="interrupted"):
        made.apply(target)
