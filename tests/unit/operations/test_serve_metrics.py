"""Scans again and again: the last values stay while scans fail, and SIGTERM ends the command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.command import run

INVENTORY = "workers: {hosts: {gpu-1: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n"
# The command has a lower limit for the interval.
PROGRAM = """
from pathlib import Path
from gpunodes.operations import serve_metrics
from gpunodes.views import metrics
options = serve_metrics.ServeOptions(Path("hosts.yml"), (), "127.0.0.1:0", 0.3, 120, 4)
form = serve_metrics.MetricsFormat(metrics.CONTENT_TYPE, metrics.served)
serve_metrics.run(options, form, lambda text: print(text, flush=True))
"""


def start(folder: Path, *argv: str, inventory: str = INVENTORY) -> subprocess.Popen[str]:
    (folder / "hosts.yml").write_text(inventory)
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def address(server: subprocess.Popen[str]) -> str:
    assert server.stdout
    found = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics)\n", server.stdout.readline())
    assert found
    return found[1]


def scrape(url: str, wanted: str) -> str:
    """The metrics, as soon as they match."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with opener.open(url, timeout=10) as response:
            text: str = response.read().decode()
        if re.search(wanted, text):
            return text
        time.sleep(0.1)
    pytest.fail(f"no {wanted} in {text}")


@pytest.mark.long
def test_the_last_values_stay_while_scans_fail(tmp_path: Path) -> None:
    server = start(tmp_path, "-c", PROGRAM)
    try:
        url = address(server)
        unreachable = 'gpunodes_machine_health_state{machine="gpu-1",state="unreachable"} 1\n'
        assert unreachable in scrape(url, "gpunodes_scan_age_seconds")
        (tmp_path / "hosts.yml").write_text("workers: [\n")
        failing = scrape(url, r"scan_failures_total [1-9]")
        assert unreachable in failing
        (tmp_path / "hosts.yml").write_text(INVENTORY.replace("gpu-1", "gpu-2"))
        scrape(url, 'machine="gpu-2"')
    finally:
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "the scan failed: hosts.yml" in output
    assert output.endswith("ended by SIGTERM\n")


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    argv = [
        "-c",
        "from gpunodes.cli import main; main()",
        "serve-metrics",
        "-i",
        "hosts.yml",
        "--listen",
        "127.0.0.1:0",
    ]
    server = start(tmp_path, *argv)
    try:
        scrape(address(server), r"gpunodes_scan_age_seconds \d")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=20)
    assert server.returncode == 0


@pytest.mark.long
def test_sigterm_ends_a_scan(tmp_path: Path) -> None:
    """A machine accepts the connection, and sends no SSH banner."""
    with socket.create_server(("127.0.0.1", 0)) as machine:
        machine.settimeout(60)
        inventory = INVENTORY.replace("ansible_port: 1", f"ansible_port: {machine.getsockname()[1]}")
        server = start(tmp_path, "-c", PROGRAM, inventory=inventory)
        address(server)
        with machine.accept()[0]:
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert server.returncode == 0
    assert time.monotonic() < began + 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "x"], "'x' is not an address and a port"),
        (["-i", "none.yml"], "there is no inventory"),
        (["gpu-9"], "matches no machine"),
        (["--interval", "1"], "--interval"),
    ],
)
def test_wrong_input_ends_with_2(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    done = run(tmp_path, "serve-metrics", "-i", "hosts.yml", *words)
    assert done.returncode == 2
    assert message in done.stderr
