"""Daemons are identified by process id and start time; no other process is ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from gpunodes.lab import processes
from gpunodes.lab.processes import Process

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def start(folder: Path, name: str, command: list[str]) -> Process:
    return processes.start(folder, name, command, folder / "log", ENVIRONMENT)


def test_a_daemon_is_found_again_and_ended(tmp_path: Path) -> None:
    started = start(tmp_path, "sleeper", ["sleep", "60"])
    assert processes.find(tmp_path, "sleeper") == started
    assert processes.recorded(tmp_path) == {"sleeper": started}
    processes.end([started])
    assert not started.alive
    assert processes.find(tmp_path, "sleeper") is None


def test_a_daemon_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = start(tmp_path, "stubborn", ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
    while "ready" not in (tmp_path / "log").read_text():
        time.sleep(0.02)
    processes.end([stubborn], grace=0.3)
    assert not stubborn.alive


def test_another_process_with_the_same_id_is_not_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        stale = Process(other.pid, (processes.start_time(other.pid) or 0) - 1)
        (tmp_path / "daemon.json").write_text(json.dumps({"pid": stale.pid, "start": stale.start, "command": []}))
        assert processes.find(tmp_path, "daemon") is None
        processes.end([stale])
        assert other.poll() is None
        other.kill()


def test_a_broken_record_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text("{")
    assert processes.find(tmp_path, "daemon") is None
    assert processes.find(tmp_path, "unknown") is None


def test_processes_of_the_current_namespace_are_not_found(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60; :", str(tmp_path)]) as other:
        assert processes.in_other_namespaces([str(tmp_path)]) == []
        other.kill()


def test_start_time_of_a_missing_process_is_none() -> None:
    assert processes.start_time(os.getpid())
    assert processes.start_time(2**22 + 1) is None
