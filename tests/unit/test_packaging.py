"""The wheel carries all that a run needs, and nothing that belongs to the checkout only."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel built from this tree."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        check=True,
    )
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def tracked(folder: str) -> list[Path]:
    """The files of a folder of the checkout, caches aside."""
    return [
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", ".ruff_cache"} & set(path.parts)
    ]


@pytest.mark.parametrize("folder", ["playbooks", "roles"])
def test_playbooks_and_roles_are_inside(wheel: set[str], folder: str) -> None:
    wanted = {f"gpunodes/content/{path.relative_to(ROOT)}" for path in tracked(folder)}
    assert wanted
    assert not wanted - wheel


def test_the_whole_package_is_inside(wheel: set[str]) -> None:
    """Modules for the machines, tables and pinned lists are not Python sources of the package, and needed like them."""
    wanted = {str(path.relative_to(ROOT / "bootstrap")) for path in tracked("bootstrap/gpunodes")}
    assert not wanted - wheel
    assert any(name.startswith("gpunodes/ansible/modules/") for name in wheel)
    assert any(name.startswith("gpunodes/planner/tables/") for name in wheel)


def test_nothing_of_the_checkout_is_inside(wheel: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"gpunodes"}
    assert not [name for name in wheel if "__pycache__" in name or name.endswith(".pyc")]


def test_the_licence_travels_along(wheel: set[str]) -> None:
    assert [name for name in wheel if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_lock_names_no_host() -> None:
    """Everybody installs from the index that their own pip is configured with, and gets what the hashes say."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert not [line for line in lines if "://" in line or "index" in line or "find-links" in line]
    assert all("==" in line and line.endswith("\\") for line in pins)
    assert sum("--hash=sha256:" in line for line in lines) >= len(pins)


def test_scripts_can_be_executed() -> None:
    for script in (ROOT / ".ci" / "run", ROOT / "bootstrap" / "system-packages.sh"):
        assert os.access(script, os.X_OK), script
