"""Programs that the modules run on a machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest
from gpunodes.ansible.module_utils import process

_WAITING_MODULE = """
import sys, time
from gpunodes.ansible.module_utils import process
print("started", flush=True)
started = time.monotonic()
done = process.run_while_connected(["sleep", "60"], 60)
print(done.code, time.monotonic() - started < 30, file=sys.stderr)
"""


def test_result_has_output_and_exit_code() -> None:
    done = process.run(["sh", "-c", "cat; echo bad >&2; exit 3"], stdin="given")
    assert (done.out, done.err, done.code) == ("given", "bad\n", 3)


def test_missing_program_is_a_result() -> None:
    assert process.run(["/no/such"]).code == 127


@pytest.mark.parametrize("run", [process.run, process.run_while_connected])
def test_slow_program_is_a_result_with_its_output(
    run: Callable[[Sequence[str], float], process.CommandResult],
) -> None:
    started = time.monotonic()
    done = run(["sh", "-c", "echo so far; exec sleep 60"], 1.5)
    assert (done.code, done.out) == (124, "so far\n")
    assert time.monotonic() - started < 30


def test_program_is_killed_when_the_controller_disconnects() -> None:
    argv = [sys.executable, "-c", _WAITING_MODULE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as module:
        assert module.stdout
        assert module.stderr
        assert module.stdout.readline() == "started\n"
        module.stdout.close()
        assert module.stderr.read() == "124 True\n"
