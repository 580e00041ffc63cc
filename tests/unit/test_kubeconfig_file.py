"""Where a playbook may write the administrator's kubeconfig on the controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpunodes.ansible.filter.general import exposed


def test_a_file_of_this_user_or_none(tmp_path: Path) -> None:
    target = tmp_path / "admin.conf"
    assert exposed(str(target)) == exposed(str(tmp_path / "new" / "admin.conf")) == ""
    target.touch()
    assert exposed(str(target)) == ""
    tmp_path.chmod(0o1777)
    assert exposed(str(target)) == ""
    tmp_path.chmod(0o777)
    assert "everyone may replace" in exposed(str(target))


def test_no_link_and_no_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, target = tmp_path / "link", tmp_path / "admin.conf"
    target.touch()
    link.symlink_to(target)
    assert "is not a file of this user" in exposed(str(link))
    monkeypatch.setattr(os, "geteuid", lambda: target.stat().st_uid + 1)
    assert "is not a file of this user" in exposed(str(target))
