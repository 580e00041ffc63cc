"""Python packages in images of the lab."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from gpunodes.lab.mirror import pins, wheels


def test_the_files_of_a_wheel_are_where_debian_s_python_looks_and_its_commands_on_the_path(tmp_path: Path) -> None:
    wheel = tmp_path / "board-1.0-py3-none-any.whl"
    commands = "[console_scripts]\nboard = board.main:run\n\n[others]\na = b:c\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("board/", "")
        archive.writestr("board/main.py", "def run(): ...")
        archive.writestr("board-1.0.dist-info/entry_points.txt", commands)
    found = {entry.path: entry for entry in wheels.tree(wheel)}
    assert found.keys() == {
        "/usr/lib/python3/dist-packages/board/main.py",
        "/usr/lib/python3/dist-packages/board-1.0.dist-info/entry_points.txt",
        "/usr/bin/board",
    }
    script = found["/usr/bin/board"]
    assert script.content == b"#!/usr/bin/python3\nfrom board.main import run\n\nrun()\n"
    assert script.mode == 0o755


@pytest.mark.parametrize("image", [each for extra in pins.load().extras.values() for each in extra if each.wheel])
def test_a_wheel_is_pinned_by_its_checksum_for_every_architecture(image: pins.ExtraImage) -> None:
    package, checksum = image.wheel.split()
    assert "==" in package
    assert checksum.startswith("--hash=sha256:")
    assert "python3-minimal" in image.packages


def test_pip_gets_the_pinned_package_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def pip(folder: Path, *arguments: str | Path) -> None:
        called.append(arguments)
        assert (folder / "requirements.txt").read_text() == "board==1.0 --hash=sha256:00\n"
        (folder / "board-1.0-py3-none-any.whl").touch()

    monkeypatch.setattr(wheels, "pip", pip)
    made = wheels.download("board==1.0 --hash=sha256:00", tmp_path, print)
    assert made.name == "board-1.0-py3-none-any.whl"
    assert made == wheels.download("board==1.0 --hash=sha256:00", tmp_path, print)
    assert [{"--no-deps", "--require-hashes"} <= set(each) for each in called] == [True]
