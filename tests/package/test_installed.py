"""The installed command: the wheel, installed in a clean environment outside of the checkout.

`make test-package` builds and installs it, and sets $GPUNODES to the command.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

GPUNODES = os.environ.get("GPUNODES", "")
pytestmark = pytest.mark.skipif(not GPUNODES, reason="needs $GPUNODES; run `make test-package`")


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with an environment without the checkout's tools."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), "LC_ALL": "C.UTF-8"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_help(tmp_path: Path) -> None:
    done = run(GPUNODES, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "init-master" in done.stdout
    assert "join" in done.stdout


def test_version_is_the_package_version(tmp_path: Path) -> None:
    python = str(Path(GPUNODES).with_name("python"))
    version = run(python, "-c", "from importlib.metadata import version; print(version('gpunodes'))", cwd=tmp_path)
    assert run(GPUNODES, "--version", cwd=tmp_path).stdout.split()[-1] == version.stdout.strip()


def test_the_manual_pages_are_installed() -> None:
    """Where pipx looks for them: below the prefix of the environment."""
    pages = Path(GPUNODES).parents[1] / "share" / "man" / "man1"
    assert {"gpunodes.1", "gpunodes-join.1", "gpunodes-gpu-plan.1"} <= {page.name for page in pages.iterdir()}
    assert (pages / "gpunodes.1").read_text().startswith(".TH GPUNODES 1")


def test_the_pages_that_messages_name_are_installed(tmp_path: Path) -> None:
    done = run(GPUNODES, "help", "--page", "settings", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gpunodes_runtime" in done.stdout


def test_the_installed_package_is_used_instead_of_the_checkout(tmp_path: Path) -> None:
    python = str(Path(GPUNODES).with_name("python"))
    done = run(python, "-c", "import gpunodes; print(gpunodes.__file__)", cwd=tmp_path)
    assert "site-packages" in done.stdout


@pytest.mark.parametrize(
    "command", ["init-master", "join", "up", "status", "kubeconfig", "remove", "reset", "preflight"]
)
def test_every_command_has_help(tmp_path: Path, command: str) -> None:
    done = run(GPUNODES, command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: gpunodes")


def test_a_missing_inventory_is_reported_with_a_remedy(tmp_path: Path) -> None:
    done = run(GPUNODES, "join", "worker-*", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "inventory" in done.stderr
    assert "a bug in gpunodes" not in done.stderr
