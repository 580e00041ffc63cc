"""Signals of `gpunodes playbook`, and the program that it starts in the place of Ansible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import runner

_STARTS = "import os, sys; from gpunodes.engine import runner; sys.exit(runner._ended(sys.argv[1:], dict(os.environ)))"
_IGNORED = "import signal; print([n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN])"
_COUNTS = """
import os, signal, sys, time
os.setpgid(0, 0)  # the terminal's own signal does not come here: two at once count as one
def count(*_):
    with open(sys.argv[1], "a") as file:
        file.write("x")
signal.signal(signal.SIGINT, count)
open(sys.argv[1], "w").close()
time.sleep(60)
"""
_SESSION = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_IN_BACKGROUND = """
import subprocess, sys
job = subprocess.Popen(sys.argv[2:], process_group=0)
open(sys.argv[1], "w").write(str(job.pid))
job.wait()
"""


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """What these tests start does not ignore Ctrl-C, as it would where they run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_program_ignores_what_was_ignored() -> None:
    """`nohup gpunodes playbook up &` died when its user logged out."""
    argv = [
        "sh",
        "-c",
        'trap "" HUP INT; exec "$@"',
        "sh",
        sys.executable,
        "-c",
        _STARTS,
        sys.executable,
        "-c",
        _IGNORED,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "SIGHUP" in done.stdout
    assert "SIGINT" in done.stdout
    assert "SIGTERM" not in done.stdout


def waited_for(path: Path, text: str = "") -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text().startswith(text):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return path.read_text()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The ends of a terminal: the keys, and the processes."""
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


def in_session(terminal: tuple[int, int], argv: list[str], stdin: int) -> subprocess.Popen[bytes]:
    """Start a program as the first one of a session at this terminal, in its foreground."""
    return subprocess.Popen(
        [sys.executable, "-c", _SESSION, *argv],
        stdin=stdin,
        stdout=terminal[1],
        stderr=terminal[1],
    )


def test_ctrl_c_is_not_passed_on(terminal: tuple[int, int], tmp_path: Path) -> None:
    """With standard input from elsewhere it came twice, and interrupted Ansible's cleanup."""
    seen = tmp_path / "seen"
    argv = [sys.executable, "-c", _STARTS, sys.executable, "-c", _COUNTS, str(seen)]
    with in_session(terminal, argv, subprocess.DEVNULL) as process:
        waited_for(seen)
        os.write(terminal[0], b"\x03")
        time.sleep(1)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert seen.read_text() == ""


def test_kill_reaches_the_program_in_the_background(terminal: tuple[int, int], tmp_path: Path) -> None:
    """`kill -INT` was lost if standard input was a terminal."""
    seen, pid = tmp_path / "seen", tmp_path / "pid"
    starts = [sys.executable, "-c", _STARTS, sys.executable, "-c", _COUNTS, str(seen)]
    with in_session(terminal, [sys.executable, "-c", _IN_BACKGROUND, str(pid), *starts], terminal[1]):
        waited_for(seen)
        job = int(waited_for(pid))
        try:
            os.kill(job, signal.SIGINT)
            waited_for(seen, "x")
        finally:
            os.kill(job, signal.SIGTERM)


def test_a_signal_while_the_program_starts_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **named: Any) -> None:
            super().__init__(*words, **named)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("gpunodes.engine.runner.subprocess.Popen", Slow)
    assert runner._ended(["sleep", "5"], dict(os.environ)) == 128 + signal.SIGTERM
