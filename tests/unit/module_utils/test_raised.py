"""Limits of the kernel that are raised and never lowered, on a /proc/sys of the test."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import ledger, lock, undo
from gpunodes.ansible.module_utils.host import kernel
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Spec
from gpunodes.ansible.module_utils.process import CommandResult

WANTED = Spec(raised={"fs.inotify.max_user_instances": "8192", "kernel.pid_max": "4194304", "kernel.none": "1"})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(lock, "PATH", str(tmp_path / "lock"))
    monkeypatch.setattr(undo, "TEMPORARY_FILES", ())
    monkeypatch.setattr(undo, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    monkeypatch.setattr(kernel, "_SYS", str(tmp_path))
    monkeypatch.setattr(kernel, "_RAISED_FILE", str(tmp_path / "10-gpunodes.conf"))
    monkeypatch.setattr(pwd, "getpwnam", lambda _: pwd.getpwuid(os.getuid()))
    (tmp_path / "fs/inotify").mkdir(parents=True)
    (tmp_path / "kernel").mkdir()
    return tmp_path


def values(root: Path, instances: str = "", pid_max: str = "") -> tuple[str, str]:
    """Set the values that are given, and return both."""
    files = (root / "fs/inotify/max_user_instances", root / "kernel/pid_max")
    for file, value in zip(files, (instances, pid_max), strict=True):
        if value:
            file.write_text(f"{value}\n")
    return files[0].read_text().strip(), files[1].read_text().strip()


def test_low_limits_are_raised_and_put_back(root: Path) -> None:
    values(root, "128", "32768")
    planned = converge(WANTED, check=True)
    assert values(root) == ("128", "32768")
    assert not (root / "10-gpunodes.conf").exists()
    assert converge(WANTED).actions == planned.actions
    assert planned.actions == [
        f"write {root}/10-gpunodes.conf",
        "set fs.inotify.max_user_instances to 8192",
        "set kernel.pid_max to 4194304",
    ]
    assert values(root) == ("8192", "4194304")
    assert (root / "10-gpunodes.conf").read_text() == (
        "fs.inotify.max_user_instances = 8192\nkernel.pid_max = 4194304\n"
    )
    assert converge(WANTED).actions == []
    undo.Undoer().run()
    assert values(root) == ("128", "32768")
    assert not (root / "10-gpunodes.conf").exists()


def test_a_higher_limit_is_kept_now_and_at_boot(root: Path) -> None:
    values(root, "1048576", "32768")
    converge(WANTED)
    assert values(root) == ("1048576", "4194304")
    assert (root / "10-gpunodes.conf").read_text() == "kernel.pid_max = 4194304\n"
    undo.Undoer().run()
    assert values(root) == ("1048576", "32768")


def test_a_limit_that_was_raised_further_is_kept(root: Path) -> None:
    values(root, "128", "4194304")
    converge(WANTED)
    values(root, "65536")
    assert converge(WANTED).actions == []
    assert values(root)[0] == "65536"


def test_a_machine_with_high_limits_gets_no_file(root: Path) -> None:
    values(root, "8192", "4194304")
    assert converge(WANTED).actions == []
    assert not (root / "10-gpunodes.conf").exists()


def test_the_file_is_read_before_those_of_others() -> None:
    """systemd-sysctl sorts files by name; that of gpunodes must come before systemd's own and an administrator's."""
    assert Path(kernel._RAISED_FILE).name < "50-pid-max.conf"
    assert kernel._RAISED_FILE != kernel._SYSCTL_FILE
