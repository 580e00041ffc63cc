"""The wheel contains all files that a run needs, and no files of the checkout only."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from gpunodes import __version__

pytestmark = pytest.mark.long

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
    """The files of a folder of the checkout, except caches."""
    return [
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", ".ruff_cache"} & set(path.parts)
    ]


@pytest.mark.parametrize("folder", ["playbooks", "roles"])
def test_the_wheel_has_playbooks_and_roles(wheel: set[str], folder: str) -> None:
    expected = {
        f"gpunodes/content/ansible_collections/gpunodes/bootstrap/{path.relative_to(ROOT)}" for path in tracked(folder)
    }
    assert expected
    assert not expected - wheel


def test_the_wheel_has_the_whole_package(wheel: set[str]) -> None:
    """Ansible modules, tables and pinned versions are not Python sources of the package, but needed as well."""
    expected = {str(path.relative_to(ROOT / "bootstrap")) for path in tracked("bootstrap/gpunodes")}
    assert not expected - wheel
    assert any(name.startswith("gpunodes/ansible/modules/") for name in wheel)
    assert any(name.startswith("gpunodes/planner/tables/") for name in wheel)


def test_the_wheel_has_no_other_files_of_the_checkout(wheel: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"gpunodes"}
    assert not [name for name in wheel if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_has_the_licence(wheel: set[str]) -> None:
    assert [name for name in wheel if name.endswith(".dist-info/licenses/LICENSE")]


def hook(root: Path, target: str) -> dict[str, dict[str, str]]:
    """What the build hook adds to that kind of archive of a tree."""
    data: dict[str, dict[str, str]] = {"shared_data": {}, "force_include": {}}
    runpy.run_path(str(ROOT / "hatch_build.py"))["Pages"](str(root), {}, None, None, "", target).initialize("", data)
    return data


def test_the_wheel_gets_the_manual_pages_that_are_built(tmp_path: Path) -> None:
    assert hook(tmp_path, "wheel")["shared_data"] == {}
    pages = tmp_path / "build" / "man"
    pages.mkdir(parents=True)
    assert hook(tmp_path, "wheel")["shared_data"] == {str(pages): "share/man/man1"}
    assert hook(tmp_path, "sdist") == {"shared_data": {}, "force_include": {str(pages): "build/man"}}
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert "custom" in targets["wheel"]["hooks"]
    assert "custom" in targets["sdist"]["hooks"]


def test_the_source_archive_has_all_that_the_wheel_is_built_from() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    included = targets["sdist"]["only-include"]
    for path in (*targets["wheel"]["packages"], *targets["wheel"]["force-include"], "hatch_build.py", "docs"):
        assert any(f"{path}/".startswith(f"{each}/") for each in included), path


def test_the_collection_gets_the_version_of_the_package() -> None:
    metadata = (ROOT / "bootstrap/ansible_collections/gpunodes/bootstrap/galaxy.yml").read_text()
    written = runpy.run_path(str(ROOT / "bootstrap" / "collection.py"))["with_version"](metadata)
    assert yaml.safe_load(written)["version"] == __version__
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert tomllib.loads(pyproject)["project"]["dynamic"] == ["version"]
    assert __version__ not in metadata + pyproject, "bootstrap/gpunodes/__init__.py is the only source of the version"


def test_the_lock_names_no_host() -> None:
    """Users install from the index of their own pip configuration; the hashes verify the packages."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert not [line for line in lines if "://" in line or "index" in line or "find-links" in line]
    assert all("==" in line and line.endswith("\\") for line in pins)
    assert sum("--hash=sha256:" in line for line in lines) >= len(pins)


def test_scripts_are_executable() -> None:
    for script in (ROOT / ".ci" / "run", ROOT / "bootstrap" / "system-packages.sh"):
        assert os.access(script, os.X_OK), script
