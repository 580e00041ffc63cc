"""Programs that the modules run on a machine."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import lock, process
from gpunodes.ansible.module_utils.problem import MachineProblem

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


@pytest.mark.parametrize("run", [process.run, process.run_while_connected, process.run_alone])
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


def survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs survive their kill, as in uninterruptible sleep."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    monkeypatch.setattr(os, "killpg", lambda *_: None)


@pytest.mark.parametrize("run", [process.run, process.run_to_end, process.run_while_connected, process.run_alone])
def test_a_program_that_survives_its_kill_is_left_behind(
    run: Callable[[Sequence[str], float], process.CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`umount` of a silent NFS server, or `rmmod` at a hung driver: the module must end, and say so."""
    survive(monkeypatch)
    monkeypatch.setattr(process, "LEFT_BEHIND", [])
    began = time.monotonic()
    done = run(["sleep", "20"], 0.5)
    assert time.monotonic() - began < 10
    assert done.code == 124
    found = re.search(r"did not end within 0 s; killed, it did not end within 2 s and .* /proc/(\d+)/stack", done.err)
    assert found
    os.kill(int(found[1]), signal.SIGKILL)


def test_an_interrupted_module_does_not_wait_for_a_program_that_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    survive(monkeypatch)
    monkeypatch.setattr(process, "LEFT_BEHIND", [])

    def interrupt(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(1)
    began = time.monotonic()
    try:
        with pytest.raises(SystemExit):
            process.run(["sleep", "20"], 20)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 10


def test_the_next_run_learns_which_program_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survive(monkeypatch)
    monkeypatch.setattr(process, "LEFT_BEHIND", [])
    monkeypatch.setattr(process, "is_disconnected", lambda: False)
    path = str(tmp_path / "lock")
    with lock.held(0, path):
        done = process.run(["sleep", "20"], 0.2)
    pid = done.err.partition("/proc/")[2].partition("/")[0]
    message = rf"process {pid}, sleep, was killed and did not end"
    with pytest.raises(MachineProblem, match=message), lock.held(0, path):
        pass
    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("run", [process.run, process.run_alone])
def test_what_a_program_leaves_in_the_background_is_not_waited_for(
    run: Callable[[Sequence[str], float], process.CommandResult],
) -> None:
    """A daemon that a package starts may keep its output open."""
    began = time.monotonic()
    done = run(["sh", "-c", "sleep 20 & echo done; exit 3"], 60)
    assert (done.code, done.out) == (3, "done\n")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("timeout_s", [120, 0.1])
def test_the_output_is_whole_although_this_process_gets_no_time(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """As on a virtual machine that is paused: Python looks at its time limit before it reads."""
    real = selectors.PollSelector.select
    monkeypatch.setattr(process, "_CHECK_S", 0.1)

    def late(self: selectors.PollSelector, timeout: float | None = None) -> object:
        time.sleep(0.3)
        return real(self, timeout)

    monkeypatch.setattr(selectors.PollSelector, "select", late)
    done = process.run(["sh", "-c", "echo out; echo err >&2"], timeout_s)
    assert (done.code, done.out, done.err) == (0, "out\n", "err\n")


def test_much_input_is_sent_to_a_slow_program() -> None:
    given = "x" * 1_000_000
    assert process.run(["sh", "-c", "sleep 1.5; wc -c"], stdin=given).out.split() == ["1000000"]


def test_a_program_without_the_lock_is_killed_with_what_it_started(tmp_path: Path) -> None:
    process.run_alone(["sh", "-c", f"sleep 20 & echo $! > {tmp_path}/pid; wait"], 0.5)
    stat = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    assert not stat.exists() or ") Z " in stat.read_text()
