"""The clock of a machine: which time service sets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import clock, ledger


def process(root: Path, pid: int, comm: str, cgroup: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "comm").write_text(f"{comm}\n")
    (folder / "cgroup").write_text(cgroup)


@pytest.mark.parametrize(
    ("comm", "cgroup", "names"),
    [
        ("chronyd", "0::/system.slice/chrony.service\n", ["chrony"]),
        ("systemd-timesyn", "0::/system.slice/systemd-timesyncd.service\n", ["systemd-timesyncd"]),
        ("ntpd", "0::/system.slice/openntpd.service\n", ["openntpd"]),
        ("ntpd", "5:pids:/system.slice/ntpsec.service\n1:name=systemd:/system.slice/ntpsec.service\n", ["ntpsec"]),
        ("ptp4l", "0::/system.slice/system-ptp4l.slice/ptp4l@eth0.service\n", ["ptp4l@eth0"]),
        # No service of the machine: a pod, Docker's container, a user's process, and a name that only looks like one.
        ("chronyd", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n", []),
        ("chronyd", "0::/system.slice/docker-0123.scope\n", []),
        ("chronyd", "0::/user.slice/user-1000.slice/session-1.scope\n", []),
        ("chronyd", "0::/user.slice/user-1000.slice/user@1000.service/app.slice/chronyd.service\n", []),
        ("chronyd", "0::/system.slice/{{ evil }} $(id).service\n", []),
        ("sshd", "0::/system.slice/chrony.service\n", []),
        ("chronyd", "", []),
    ],
)
def test_a_time_service_is_a_process_of_a_unit(tmp_path: Path, comm: str, cgroup: str, names: list[str]) -> None:
    process(tmp_path, 1, "systemd", "0::/init.scope\n")
    process(tmp_path, 20, comm, cgroup)
    assert clock.services(str(tmp_path)) == names


def test_a_process_that_ends_meanwhile_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/comm").mkdir()
    assert clock.services(str(tmp_path)) == []


def test_this_machines_kernel_tells() -> None:
    assert clock.synchronised() in {True, False}


def test_the_service_that_gpunodes_started_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger.json"))
    assert clock.read(str(tmp_path))["own"] == ""
    book = ledger.Ledger()
    book.note_service("chronyd", {"enabled": True, "active": True})
    book.save()
    assert clock.read(str(tmp_path))["own"] == "", "it ran before"
    book.note_service("systemd-timesyncd", {"enabled": False, "active": False})
    book.save()
    assert clock.read(str(tmp_path)) == {
        "synchronised": clock.synchronised(),
        "services": [],
        "own": "systemd-timesyncd",
    }
    (tmp_path / "ledger.json").write_text("damaged")
    assert clock.read(str(tmp_path))["own"] == ""
