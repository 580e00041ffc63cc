"""The programs of tests end with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
RUN = """
import subprocess, sys, time
from tests import programs
wait = "import time; print('started', flush=True); time.sleep(600)"
program = subprocess.Popen(programs.ending([sys.executable, "-c", wait]), stdout=subprocess.PIPE)
program.stdout.readline()
print(program.pid, flush=True)
time.sleep(600)
"""


def ended(pid: int) -> bool:
    """Whether a process has ended; whoever inherits it may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="a function of Linux")
def test_the_programs_of_a_run_that_is_killed_end_too() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        program = int(run.stdout.readline())
        assert not ended(program)
        run.kill()
    deadline = time.monotonic() + 30
    while not ended(program):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_program_keeps_its_process_id_and_its_words() -> None:
    own = [sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1:])", "--version", "a b"]
    with subprocess.Popen(programs.ending(own), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.read() == f"{run.pid} ['--version', 'a b']\n"
