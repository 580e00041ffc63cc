"""Machines that print without an end, or without a line break: the controller keeps some KiB of that."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import locks
from gpunodes.engine.cluster.connection import NO_SESSION, Transport
from gpunodes.engine.locks import NoLock
from gpunodes.engine.remote import answers, shell
from gpunodes.engine.remote.messages import Messages
from gpunodes.engine.remote.stream import Stream

_LIMIT_S = 15.0
_START = f"import os, sys, time\nsys.stdout.write({answers._MARK_LINE!r}); sys.stdout.flush()\n"
FLOODS = {
    "no line break": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "endless lines": "import sys\nwhile True: sys.stdout.write('x\\n' * 32768)",
}
ERRORS = "while True: os.write(2, b'why\\n' * 16384)"


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Much faster than the time limits, which are the last resort."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < _LIMIT_S


def printing(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Every machine runs this program in place of what it is sent."""
    monkeypatch.setattr(locks, "ANSWER", _LIMIT_S)
    monkeypatch.setattr(shell, "command", lambda *_: [sys.executable, "-c", program])


@pytest.mark.parametrize("flood", FLOODS)
def test_a_machine_that_prints_a_banner_without_an_end_gives_no_lock(
    monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    printing(monkeypatch, FLOODS[flood])
    with quickly(), pytest.raises(NoLock, match="printed more than 65536 bytes"):
        locks._connect("10.0.0.1", {}, {}, "gpu-1")


def test_a_machine_that_prints_errors_without_an_end_gives_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch, f"{_START}os.close(1)\n{ERRORS}")
    with quickly(), pytest.raises(NoLock, match="why"):
        locks._connect("10.0.0.1", {}, {}, "gpu-1")


def test_a_machine_that_closes_its_output_and_hangs_gives_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch, f"{_START}os.close(1)\ntime.sleep(60)")
    monkeypatch.setattr(locks, "ANSWER", 1.0)
    with quickly(), pytest.raises(NoLock, match="no response in 1 s"):
        locks._connect("10.0.0.1", {}, {}, "gpu-1")


@pytest.mark.parametrize("flood", FLOODS)
def test_a_control_plane_that_prints_a_banner_without_an_end_has_no_session(flood: str) -> None:
    connection = Transport([sys.executable, "-c", FLOODS[flood]]).connect()
    with quickly():
        found = connection.request({"method": "GET"}, _LIMIT_S)
    connection.close()
    assert found.status == NO_SESSION
    assert "printed more than 65536 bytes" in found.error


@pytest.mark.parametrize("kept", [answers.MAX_BANNER_BYTES, answers.MAX_BANNER_BYTES - 3])
def test_a_banner_of_the_largest_size_is_skipped(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "output"
    for banner in ("x" * (kept - 1) + "\n", "x\n" * (kept // 2)):
        path.write_text(f"{banner}{answers._MARK_LINE}output\n", encoding="utf-8")
        with path.open(encoding="utf-8") as out:
            answers.skip_banner(out)
            assert out.readline() == "output\n"


def test_a_stream_whose_machine_prints_errors_without_an_end_goes_on_and_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    answer = "sys.stdout.write('{\"done\": true}\\n'); sys.stdout.flush()"
    program = f"print()\n{_START}os.write(2, b'why\\n' * 1000000)\n{answer}\ntime.sleep(60)"
    with quickly(), Stream("gpu-1", [sys.executable, "-c", program], b"") as stream:
        assert stream.line() == {"done": True}
        assert "gpu-1: why" in str(stream.lost("no reason"))
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                assert not file.readlink().name.startswith("#") or file.stat().st_size < answers.MAX_BANNER_BYTES


def test_the_beginning_of_messages_is_kept() -> None:
    program = "import os\nos.write(2, b'first ' + b'x' * 1000000)"
    argv: list[Any] = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        assert process.stderr
        messages = Messages(process.stderr)
        process.wait()
        text = messages.text()
    assert text.startswith("first x")
    assert len(text) == 4096


def test_a_message_that_is_still_on_its_way_is_waited_for() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb", buffering=0) as program:
        messages = Messages(os.fdopen(read, "rb"))
        later = threading.Timer(0.3, program.write, [b"prohibited\n"])
        later.start()
        assert messages.text() == "prohibited\n"
        later.join()
