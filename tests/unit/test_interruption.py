"""Ctrl-C on a terminal: the command ends with one clean line and exit code 130, and leaves no half-drawn progress."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.cli import repair_options
from gpunodes.repair.result import RepairResult

pytestmark = pytest.mark.long

LAST = "interrupted; run the same command again"
# Stands in for Ansible: one task that runs until it is interrupted.
JOIN = """
from gpunodes.engine import runner
from gpunodes.model import TaskStarted
import time

def run(play, folder, on_event, should_stop=lambda: False):
    with runner._Stop(folder / "pid") as stop:
        on_event(TaskStarted("gpu-1", "preflight", "a task"))
        while not stop.requested:
            time.sleep(0.1)
    return runner.PlayResult(ok=False, interrupted=True, log=folder / "log")

runner.run = run
"""
LAB = """
import time
from gpunodes.lab import lab

def up(layout, request, report):
    report("a step that is done")
    report("a step that runs")
    time.sleep(60)

lab.up = up
"""
CASES = {
    "join gpu-1": (JOIN, "gpu-1    1 s  Preflight: a task"),
    "health gpu-1": ("", "· waiting 1  1 s"),
    "repair gpu-1 --yes": ("", ""),
    "lab up": (LAB, "a step that runs  1 s"),
}


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[socket.socket]:
    """An inventory of machines that accept connections and send nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"{{ansible_host: 127.0.0.1, ansible_port: {server.getsockname()[1]}, ansible_user: nobody}}"
        groups = f"control_plane: {{hosts: {{c1: {host}}}}}\nworkers: {{hosts: {{gpu-1: {host}}}}}\n"
        (tmp_path / "inventory").mkdir()
        (tmp_path / "inventory" / "hosts.yml").write_text(groups)
        yield server


def screen(written: str) -> list[str]:
    """What a terminal of endless height shows after these characters (ECMA-48: CUU, ED)."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|[^\x1b]", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            if part[-1] == "A":
                row -= int(part[2:-1])
            elif part[-1] == "J":
                lines = [*lines[:row], lines[row][:column]]
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
@pytest.mark.parametrize("command", CASES)
def test_an_interrupted_command_leaves_a_clean_screen(
    tmp_path: Path, silent: socket.socket, command: str, terminal: str
) -> None:
    patches, running = CASES[command]
    connection: socket.socket | None = None
    master, slave = os.openpty()
    process = subprocess.Popen(
        [
            *("env", "--default-signal=INT", sys.executable, "-c", f"{patches}\nfrom gpunodes.cli import main; main()"),
            *command.split(),
        ],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": terminal, "NO_COLOR": "1"},
        preexec_fn=lambda: os.login_tty(slave),  # noqa: PLW1509 - this process has no other thread
    )
    os.close(slave)
    if command.startswith("repair"):
        silent.settimeout(60)
        connection, _ = silent.accept()
    elif terminal == "dumb":
        running = "gpu-1"
        if command == "lab up":
            running = "a step that runs"
    written, sent, deadline = "", False, time.monotonic() + 90
    while time.monotonic() < deadline:
        if not sent and running in written.replace("\r\n", "\n"):
            time.sleep(0.2)
            os.write(master, b"\x03")
            sent = True
        if select.select([master], [], [], 0.2)[0]:
            try:
                written += os.read(master, 65536).decode()
            except OSError:
                break
    assert process.wait(timeout=60) == 130, written
    os.close(master)
    if connection:
        connection.close()
    shown = [line for line in screen(written) if line]
    assert shown[-1] == LAST
    assert "Traceback" not in written
    # The terminal's own echo of Ctrl-C stands alone, or was overwritten.
    assert not [line for line in shown if "^C" in line and line != "^C"]
    if terminal == "xterm":
        assert not [line for line in shown if re.search(r"(Preflight|runs)  ?\d", line)]
        assert shown.count(LAST) == 1


def test_an_interrupted_repair_ends_with_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert repair_options.show(RepairResult("repair", [], interrupted=True), as_json=True) == 130
    out, err = capsys.readouterr()
    assert err == f"{LAST}\n"
    assert LAST not in out
