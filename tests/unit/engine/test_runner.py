"""Ansible's process and its wrapper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
from gpunodes.engine import runner
from gpunodes.inventory import Inventory

_COMMAND = """
import subprocess, sys, time
from pathlib import Path
from gpunodes.engine import runner
sys.executable = sys.argv[1] + "/python"
program = runner._wrapper_folder(Path(sys.argv[2])) / "ansible-playbook"
print(subprocess.Popen([program]).pid, flush=True)
time.sleep(60)
"""


def test_ansible_dies_with_the_command_even_by_kill_9(tmp_path: Path) -> None:
    stand_in = tmp_path / "ansible-playbook"
    stand_in.write_text("#!/bin/sh\nexec sleep 60\n")
    stand_in.chmod(0o700)
    words = [sys.executable, "-c", _COMMAND, str(tmp_path), str(tmp_path / "bin")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout
        ansible = int(command.stdout.readline())
        deadline = time.monotonic() + 30
        while _comm(ansible) != "sleep":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        command.kill()
    while _runs(ansible):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


@pytest.mark.long
def test_the_environment_is_on_disk_until_the_first_event_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ansible-runner writes it before it starts Ansible, and a killed command leaves its files."""
    seen: list[bool] = []

    def record(self: ansible_runner.Runner, event: dict[str, Any]) -> None:
        seen.append((Path(self.config.artifact_dir) / "command").exists())
        self.event_handler(event)
        seen.append((Path(self.config.artifact_dir) / "command").exists())

    monkeypatch.setattr(ansible_runner.Runner, "event_callback", record)
    (tmp_path / "hosts.yml").write_text("control_plane: {hosts: {c1: }}\n")
    play = runner.Play("controller.yml", Inventory(tmp_path / "hosts.yml"), ["c1"])
    runner.run(play, tmp_path, lambda _: None)
    assert seen[:2] == [True, False]
    assert not any(seen[1:])


def test_an_interrupted_command_lets_ansible_end_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "ansible-playbook"
    stand_in.write_text("#!/bin/sh\nexec sleep 60\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    programs = runner._wrapper_folder(tmp_path / "bin")
    with subprocess.Popen([programs / "ansible-playbook"]) as ansible, runner._Stop(programs / "pid") as stop:
        deadline = time.monotonic() + 30
        while _comm(ansible.pid) != "sleep":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not stop.overdue()
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.overdue(), "it has some seconds"
        assert ansible.wait(30) == -signal.SIGTERM
        assert stop.requested


def _comm(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()


def _runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sockets_are_in_ansible_home_where_the_home_cannot_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that is mounted read-only, as in a container: Ansible's default does not follow ANSIBLE_HOME."""
    inventory, folder = tmp_path / "hosts.yml", "ANSIBLE_SSH_CONTROL_PATH_DIR"
    monkeypatch.delenv(folder, raising=False)
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert runner.environment(inventory)[folder] == str(tmp_path / "own" / "cp")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder not in runner.environment(inventory)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv(folder, "/tmp/own")
    assert folder not in runner.environment(inventory), "the user's own choice stays"
