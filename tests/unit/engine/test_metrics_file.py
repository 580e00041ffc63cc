"""The file for node exporter: replaced in one step, readable, in a folder that exists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpunodes.engine import metrics_file
from gpunodes.errors import GpunodesError, WrongInput


def test_it_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "gpunodes.prom"
    path.write_text("old")
    path.chmod(0o600)
    before = path.stat().st_ino
    umask = os.umask(0o077)
    try:
        metrics_file.check(path)
        metrics_file.write(path, "new\n")
    finally:
        os.umask(umask)
    assert path.read_text() == "new\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "gpunodes.prom"
    other.write_text("kept")
    path.symlink_to(other)
    metrics_file.write(path, "new\n")
    assert (other.read_text(), path.is_symlink()) == ("kept", False)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("none/gpunodes.prom", "there is no folder"),
        ("gpunodes.txt", "node exporter does not read"),
        ("folder.prom", "is a folder"),
        ("/proc/gpunodes.prom", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_made(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "folder.prom").mkdir()
    with pytest.raises(WrongInput, match=found):
        metrics_file.check(tmp_path / name)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "gpunodes.prom"
    path.mkdir()
    with pytest.raises(GpunodesError, match=r"cannot be written to .*gpunodes\.prom"):
        metrics_file.write(path, "new\n")
    assert list(tmp_path.iterdir()) == [path]
