"""Ansible's process and ours."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

_COMMAND = """
import subprocess, sys, time
from pathlib import Path
from gpunodes.engine import runner
sys.executable = sys.argv[1] + "/python"
program = runner._mortal(Path(sys.argv[2])) / "ansible-playbook"
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
        while Path(f"/proc/{ansible}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        command.kill()
    while _runs(ansible):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
