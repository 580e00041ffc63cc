"""The benchmark measures only commands with the expected exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench import health_files


def test_a_command_with_the_expected_exit_code_is_measured() -> None:
    done = health_files.run([sys.executable, "-c", "print(1); raise SystemExit(3)"], 3)
    assert done.output == b"1\n"
    assert done.seconds > 0
    assert done.memory > 0


@pytest.mark.parametrize("program", ["raise SystemExit(2)", "import os; os.kill(os.getpid(), 9)", ""])
def test_a_command_with_another_exit_code_is_an_error(program: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        health_files.run([sys.executable, "-c", program], 3)
