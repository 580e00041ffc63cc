"""Packages of gpunodes that an administrator's packages need by now: they stay, and nothing of others is removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
from gpunodes.ansible.module_utils import in_use, ledger, lock, nfs_clients, nfs_mounts, packages, still_needed, undo
from gpunodes.ansible.module_utils.host import services, users
from gpunodes.ansible.module_utils.package_listings import parse_rpm_test
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

from .test_converge import Packages

OURS = ("kubelet", "iptables", "dkms", "gcc", "make")
THEIRS = {"ufw": ["iptables"], "zfs-dkms": ["dkms"], "zfs": ["zfs-dkms"]}
NEEDS = {"kubelet": ["iptables"], "dkms": ["gcc", "make"], **THEIRS}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """A machine with the packages of gpunodes; what depends on what is in NEEDS."""
    manager = Packages()
    manager.there = {name: packages.PackageState("1", held=False) for name in OURS}
    manager.needs = dict(NEEDS)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger" / "ledger.json"))
    monkeypatch.setattr(lock, "PATH", str(tmp_path / "lock"))
    monkeypatch.setattr(undo, "TEMPORARY_FILES", ())
    monkeypatch.setattr(packages, "detect", lambda: manager)
    monkeypatch.setattr(undo, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    ledger.Ledger(packages=["kubelet", "iptables"]).save()
    ledger.Ledger(packages=["dkms", "gcc", "make"]).save(ledger.path_of("gpu"))
    return manager


def installed_later(machine: Packages, *names: str) -> None:
    machine.there |= {name: packages.PackageState("1", held=False) for name in names}


def test_without_others_all_packages_go_in_one_removal_each(machine: Packages) -> None:
    undoer = undo.Undoer()
    undoer.run()
    assert (machine.there, undoer.notes) == ({}, [])
    assert machine.calls == ["purge dkms gcc make", "purge kubelet iptables"]


def test_what_others_need_stays_with_what_it_needs(machine: Packages) -> None:
    installed_later(machine, "ufw", "zfs-dkms", "zfs")
    checked = undo.Undoer(check=True)
    would = checked.run()
    assert {*machine.there} == {*OURS, "ufw", "zfs-dkms", "zfs"}
    undoer = undo.Undoer()
    assert undoer.run() == would
    assert {*machine.there} == {"iptables", "dkms", "gcc", "make", "ufw", "zfs-dkms", "zfs"}
    assert (
        undoer.notes
        == checked.notes
        == [
            "dkms, gcc, make stay: zfs-dkms, zfs, which gpunodes did not install, need them",
            "iptables stays: ufw, which gpunodes did not install, needs it",
        ]
    )
    shown = [name for each in checked.differences if each.title == "packages" for name in (each.before or {})]
    assert shown == ["kubelet"]
    # They are the administrator's now.
    assert not Path(ledger.PATH).parent.exists()
    assert undo.Undoer().run() == []


def test_the_ledger_gets_those_of_a_section(machine: Packages) -> None:
    installed_later(machine, "zfs-dkms")
    undo.Undoer(section="gpu").run()
    assert {*machine.there} == {*OURS, "zfs-dkms"}
    assert not Path(ledger.path_of("gpu")).exists()
    assert ledger.load().packages == ["kubelet", "iptables", "dkms", "gcc", "make"]
    # The administrator removes it again.
    del machine.there["zfs-dkms"]
    undoer = undo.Undoer()
    undoer.run()
    assert (machine.there, undoer.notes) == ({}, [])


def test_a_section_leaves_the_packages_of_another(machine: Packages) -> None:
    """A machine that serves shares and mounts some: both need the package with the programs."""
    installed_later(machine, "nfs-common", "nfs-kernel-server")
    machine.needs["nfs-kernel-server"] = ["nfs-common"]
    ledger.Ledger(packages=["nfs-common"]).save(ledger.path_of("nfs_client"))
    ledger.Ledger(packages=["nfs-kernel-server"]).save(ledger.path_of("nfs_server"))
    undoer = undo.Undoer(section="nfs_client")
    undoer.run()
    assert undoer.notes == []
    assert "nfs-kernel-server" in machine.there
    undo.Undoer(section="nfs_server").run()
    assert {*machine.there} == {*OURS}
    # With the ledger all of them go, whatever needs what.
    undoer = undo.Undoer()
    undoer.run()
    assert (machine.there, undoer.notes) == ({}, [])


def test_one_of_two_alternatives_stays(machine: Packages) -> None:
    installed_later(machine, "tool")
    machine.needs["tool"] = ["gcc|make"]
    undo.Undoer().run()
    assert {*machine.there} == {"tool", "make"}


def test_services_users_and_folders_of_a_package_stay_with_it(
    machine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_later(machine, "nfs-common", "theirs", "containerd", "docker-theirs")
    machine.needs |= {"theirs": ["nfs-common"], "docker-theirs": ["containerd"]}
    state, images, other = (tmp_path / name for name in ("nfs", "containerd", "other"))
    for path in (state, images, other):
        path.mkdir()
    machine.files = {
        "nfs-common": ["/lib/systemd/system/rpc-statd.service", str(state)],
        "containerd": ["/usr/lib/systemd/system/containerd.service"],
    }
    off = {"enabled": False, "active": False}
    before = ledger.Ledger(
        packages=["nfs-common", "containerd"],
        services={"rpc-statd": off, "containerd": off, "kubelet": off},
        users=["statd", "nvpd"],
        groups=["docker"],
        directories=[str(state), str(images), str(other)],
    )
    before.save()
    on = {"enabled": True, "active": True}
    monkeypatch.setattr(services, "states", lambda names: dict.fromkeys(names, on))
    monkeypatch.setattr(users, "has_user", lambda _: True)
    monkeypatch.setattr(users, "has_group", lambda _: True)
    actions = undo.Undoer(section="").run()
    assert [each for each in actions if "kubelet" in each] == ["stop kubelet", "disable kubelet"]
    assert not [each for each in actions if "statd" in each or "containerd" in each]
    assert "remove the user nvpd" in actions
    assert "remove the group docker" in actions
    assert (state.exists(), images.exists(), other.exists()) == (True, True, False)


NFT = ("nftables", "libnftables1", "libnftnl11")


@pytest.fixture
def ruleset(machine: Packages, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """nftables came with the NFS client, one of its libraries with iptables; whether its service is enabled."""
    installed_later(machine, *NFT)
    machine.needs |= {"nftables": ["libnftables1"], "libnftables1": ["libnftnl11"]}
    ledger.Ledger(packages=["kubelet", "iptables", "libnftnl11"]).save()
    ledger.Ledger(packages=["nftables", "libnftables1"]).save(ledger.path_of("nfs_client"))
    state = {"enabled": True, "active": True}
    monkeypatch.setattr(services, "states", lambda names: dict.fromkeys(names, state))
    return state


@pytest.mark.usefixtures("ruleset")
def test_a_ruleset_that_an_administrator_loads_at_boot_stays(machine: Packages) -> None:
    """A purge of nftables deletes /etc/nftables.conf: the machine would boot without its firewall."""
    note = "nftables stays: its service is enabled, and loads a ruleset that gpunodes did not write"
    undoer = undo.Undoer()
    undoer.run()
    assert ({*machine.there}, undoer.notes) == ({*NFT}, [note])


def test_the_ledger_gets_a_package_that_an_administrator_configured(
    machine: Packages, ruleset: dict[str, bool]
) -> None:
    undo.Undoer(section="nfs_client").run()
    assert {*NFT} <= {*machine.there}
    ruleset["enabled"] = False
    undoer = undo.Undoer()
    undoer.run()
    assert (machine.there, undoer.notes) == ({}, [])


@pytest.fixture
def exports(machine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server that gpunodes installed, with the exports of its share; the file for those of others."""
    installed_later(machine, "nfs-kernel-server", "nfs-common")
    machine.needs["nfs-kernel-server"] = ["nfs-common"]
    machine.files["nfs-kernel-server"] = ["/usr/lib/systemd/system/nfs-server.service"]
    theirs, own = tmp_path / "exports", tmp_path / "exports.d" / "gpunodes.exports"
    own.parent.mkdir()
    own.write_text("/srv/training 192.0.2.1(rw)\n")
    theirs.write_text("# /srv/homes hostname1(rw)\n\n")
    monkeypatch.setattr(in_use, "EXPORTS", str(theirs))
    monkeypatch.setattr(in_use, "OWN_EXPORTS", str(own))
    on = {"enabled": True, "active": True}
    monkeypatch.setattr(services, "states", lambda names: dict.fromkeys(names, on))
    section = ledger.Ledger(packages=["nfs-kernel-server", "nfs-common"])
    section.note_service("nfs-server", {"enabled": False, "active": False})
    section.note_file(str(own), ledger.OldFile(None))
    section.save(ledger.path_of("nfs_server"))
    return theirs


@pytest.mark.parametrize("name", ["exports", "exports.d/theirs.exports"])
def test_a_server_with_exports_of_others_stays(
    machine: Packages, exports: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ran, run = answers()
    monkeypatch.setattr(undo, "run", run)
    other = exports.parent / name
    other.write_text("# homes\n/srv/homes 192.0.2.0/24(rw)\n")
    assert not nfs_clients.is_removed()
    undoer = undo.Undoer(section="nfs_server")
    actions = undoer.run()
    assert {"nfs-kernel-server", "nfs-common"} <= {*machine.there}
    assert undoer.notes == [f"nfs-kernel-server stays: {other} has exports that gpunodes did not write"]
    assert not [each for each in actions if "nfs-server" in each]
    assert [path.name for path in (exports.parent / "exports.d").iterdir()] == [other.name] * (other != exports)
    assert ["exportfs", "-ra"] in ran, "it no longer serves the share"


@pytest.mark.usefixtures("exports")
def test_a_server_without_other_exports_goes(machine: Packages) -> None:
    assert nfs_clients.is_removed()
    undoer = undo.Undoer(section="nfs_server")
    assert "stop nfs-server" in undoer.run()
    assert ({*machine.there}, undoer.notes) == ({*OURS}, [])


@pytest.fixture
def mounts(machine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with the NFS client of gpunodes, one share mounted for a pod, and an own fstab; their folder."""
    installed_later(machine, "nfs-common")
    ledger.Ledger(packages=["nfs-common"]).save(ledger.path_of("nfs_client"))
    pod = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/gpunodes-training.default"
    (tmp_path / "fstab").write_text("# nas:/home /home nfs defaults\n/dev/vda1 / ext4 defaults 0 1\n\nbroken\n")
    (tmp_path / "mounts").write_text(f"/dev/vda1 / ext4 rw 0 0\n10.0.0.5:/srv {pod} nfs4 rw,vers=4.2 0 0\n")
    monkeypatch.setattr(in_use, "FSTAB", str(tmp_path / "fstab"))
    monkeypatch.setattr(nfs_mounts, "MOUNTS", str(tmp_path / "mounts"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "line"),
    [("fstab", "nas:/home /home nfs noauto"), ("mounts", "nas:/home /home nfs4 rw,addr=10.0.0.9 0 0")],
)
def test_the_nfs_client_stays_for_mounts_of_others(machine: Packages, mounts: Path, name: str, line: str) -> None:
    """Without mount.nfs the next boot or the automounter could not mount it any more."""
    path = mounts / name
    path.write_text(f"{path.read_text()}{line}\n")
    undoer = undo.Undoer(section="nfs_client")
    undoer.run()
    assert "nfs-common" in machine.there
    assert undoer.notes == [f"nfs-common stays: {path} has an NFS mount on /home, which gpunodes did not make"]


@pytest.mark.usefixtures("mounts")
def test_the_nfs_client_goes_without_other_mounts(machine: Packages) -> None:
    undoer = undo.Undoer(section="nfs_client")
    undoer.run()
    assert ({*machine.there}, undoer.notes) == ({*OURS}, [])


def test_a_removal_that_apt_cannot_simulate_changes_nothing(machine: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Sequence[str]) -> Sequence[str]:
        raise MachineProblem("unmet dependencies")

    monkeypatch.setattr(machine, "removals", refused)
    with pytest.raises(MachineProblem, match="unmet dependencies"):
        undo.Undoer().run()
    assert {*machine.there} == {*OURS}
    # A dry run does not finish what was interrupted.
    assert "remove dkms, gcc, make" in undo.Undoer(check=True).run()


def test_few_simulations_find_one_of_many() -> None:
    asked: list[int] = []

    class Manager(Packages):
        def removals(self, names: Sequence[str]) -> Sequence[str]:
            asked.append(len(names))
            return super().removals(names)

    manager = Manager()
    names = [f"package-{number}" for number in range(64)]
    installed_later(manager, *names, "theirs")
    manager.needs = {"theirs": ["package-40"]}
    found = still_needed.find(cast("packages.Manager", manager), names, {*names})
    assert (found.packages, found.by) == (["package-40"], ["theirs"])
    assert len(asked) <= 13


def answers(*results: str) -> tuple[list[Sequence[str]], Callable[..., CommandResult]]:
    """A stand-in for programs that answer in turn."""
    asked: list[Sequence[str]] = []
    left = [*results]

    def run(argv: Sequence[str], *_: object, **__: object) -> CommandResult:
        asked.append(argv)
        return CommandResult(argv, 0, left.pop(0) if left else "", "")

    return asked, run


def test_apt_simulates_a_removal_without_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its sources apt would install an alternative instead of removing what depends on the package."""
    asked, run = answers("Purg dkms [3.0.10-8]\nPurg zfs-dkms [2.1.11-1]\n")
    monkeypatch.setattr(packages, "run", run)
    assert packages.Apt().removals(["dkms"]) == ["dkms", "zfs-dkms"]
    [argv] = asked
    assert {"purge", "--simulate", "--allow-change-held-packages", *packages.WITHOUT_SOURCES} <= {*argv}


def test_rpm_names_what_depends_on_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "error: Failed dependencies:\n"
        "\tgcc is needed by (installed) dkms-3.0.13-1.el9.noarch\n"
        "\tmake >= 3 is needed by (installed) kernel-devel-matched-5.14.0-503.el9.x86_64\n"
    )
    assert parse_rpm_test(text) == ["dkms", "kernel-devel-matched"]
    asked, run = answers(text, "\tdkms is needed by (installed) zfs-dkms-2.1-1.el9.noarch\n")
    monkeypatch.setattr(packages, "run", run)
    assert packages.Dnf().removals(["gcc"]) == ["gcc", "dkms", "kernel-devel-matched", "zfs-dkms"]
    assert all([*argv[:3]] == ["rpm", "--erase", "--test"] for argv in asked)
