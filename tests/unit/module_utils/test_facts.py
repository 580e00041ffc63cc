"""Facts of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import facts, gpu_facts, ledger
from gpunodes.planner import reports

from tests import node_certificates


def test_os_release() -> None:
    text = 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n# x=1\n'
    assert facts.parse_os_release(text) == {
        "id": "debian",
        "version": "13",
        "codename": "trixie",
        "name": "Debian GNU/Linux 13 (trixie)",
        "like": None,
        "base": None,
    }


def test_memory() -> None:
    assert facts.parse_memory("MemTotal:        4018596 kB\nMemFree: 1 kB\n") == 3924


def test_sources_are_filled_in_for_the_system() -> None:
    debian: dict[str, str | None] = {"id": "debian", "version": "12", "codename": "bookworm"}
    rocky: dict[str, str | None] = {"id": "rocky", "version": "9.4", "codename": None}
    docker = {"name": "docker", "url": "https://d/{system}", "suite": "{codename}", "systems": ["debian 12"]}
    flat = {"name": "kubernetes", "url": "https://k/{format}/", "suite": "/"}
    assert facts.filled(docker, debian)["url"] == "https://d/debian/dists/bookworm/InRelease"
    assert facts.filled(flat, debian)["url"] == "https://k/deb/InRelease"
    assert facts.filled(flat, rocky)["url"] == "https://k/rpm/repodata/repomd.xml"
    assert facts.applies(docker, debian)
    assert not facts.applies(docker, rocky)
    assert facts.applies(flat, rocky)
    ubuntu = {"id": "ubuntu", "version": "22.04", "codename": "jammy", "name": "Ubuntu 22.04"}
    assert facts.applies({"systems": ["ubuntu 22.04"]}, ubuntu)
    assert not facts.applies({"systems": ["ubuntu 24.04"]}, ubuntu)
    assert [facts.applies({"gpus": True}, ubuntu, gpus) for gpus in (True, False)] == [True, False]


@pytest.mark.parametrize(
    ("stage", "unfinished"), [("", False), ("join started", True), ("init started", True), ("join done", False)]
)
def test_a_machine_says_that_its_join_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str, unfinished: bool
) -> None:
    """The role worker asks kubeadm_join of a machine that says so: else nobody would finish what is left."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    ledger.Ledger(kubeadm=stage).save()
    assert facts.kubernetes()["unfinished"] is unfinished


@pytest.mark.parametrize(("days", "ended"), [(-1, True), (1, False), (None, False)])
def test_a_machine_says_that_the_certificate_of_its_kubelet_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, days: int | None, ended: bool
) -> None:
    path = tmp_path / "kubelet-client-current.pem"
    if days is not None:
        path.write_text(node_certificates.pem("w1", days))
    monkeypatch.setattr(facts, "CLIENT_CERTIFICATE", str(path))
    assert facts.kubernetes()["ended"] is ended


def test_a_damaged_certificate_has_not_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kubelet-client-current.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    monkeypatch.setattr(facts, "CLIENT_CERTIFICATE", str(path))
    assert facts.kubernetes()["ended"] is False


@pytest.mark.parametrize("directory", ["", "/nowhere", "/da ta", "/data\n[Mount]"])
def test_the_facts_of_this_machine_have_the_shape_that_preflight_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: str
) -> None:
    """Also with a data directory that cannot be used: that is a fact with its problem, not a failure."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger.json"))
    monkeypatch.setattr(gpu_facts, "read", lambda **_: {"functions": []})
    found = facts.read([], directory=directory)
    assert reports.machine_problem(found) == ""
    assert (found["data_directory"]["problem"] is None) == (directory == "")
    assert found["data_directory"]["path"] == (directory if directory == "/nowhere" else "")
    assert {disk["path"] for disk in found["disks"]} >= {"/usr", "/var/lib", "/var/cache", "/boot", "/tmp"}
    assert {disk["path"] for disk in found["disks"]} >= {
        f"/var/lib/{name}" for name in ("containerd", "docker", "kubelet")
    }
    assert found["clock"]["began"] <= found["time"]
