"""The ledger of changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import ledger
from gpunodes.ansible.module_utils.problem import MachineProblem


def test_round_trip(tmp_path: Path) -> None:
    path = str(tmp_path / "lib" / "ledger.json")
    book = ledger.Ledger()
    book.note_packages(["runc", "runc"])
    book.note_file("/etc/a", ledger.OldFile("before", 0o640, 1, 2))
    book.note_service("containerd", {"enabled": False, "active": False})
    book.save(path)
    assert ledger.load(path) == book
    assert book.packages == ["runc"]
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700


def test_the_first_note_stands() -> None:
    book = ledger.Ledger()
    book.note_file("/etc/a", ledger.OldFile(None))
    book.note_file("/etc/a", ledger.OldFile("ours"))
    book.note_sysctl("net.ipv4.ip_forward", "0")
    book.note_sysctl("net.ipv4.ip_forward", "1")
    assert book.files["/etc/a"].content is None
    assert book.sysctls == {"net.ipv4.ip_forward": "0"}


def test_a_restart_is_owed_until_done() -> None:
    book = ledger.Ledger()
    book.note_restart("containerd")
    assert ledger.from_json(book.to_json()).restarts == ["containerd"]
    book.restarted("containerd")
    assert book.restarts == []


def test_none_is_an_empty_one(tmp_path: Path) -> None:
    assert ledger.load(str(tmp_path / "none")) == ledger.Ledger()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', json.dumps({"version": 2, "files": {}})])
def test_a_damaged_or_later_one_is_refused(text: str) -> None:
    with pytest.raises(MachineProblem):
        ledger.from_json(text)
