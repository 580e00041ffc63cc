"""Converging a machine's files and services, interrupted or not, and taking it all back. No program is started."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import escalate, etcd_snapshot, ledger, lock, packages, undo
from gpunodes.ansible.module_utils.host import files, images, installation, sources, users
from gpunodes.ansible.module_utils.host.changes import Changes
from gpunodes.ansible.module_utils.host.converge import converge, diff
from gpunodes.ansible.module_utils.host.spec import File, Generated, Repository, Spec
from gpunodes.ansible.module_utils.probe import smi
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult


class Packages:
    """A package manager that only notes; installing may be made to fail."""

    unread = ""

    def __init__(self) -> None:
        self.there: dict[str, packages.PackageState] = {}
        self.calls: list[str] = []
        self.removes: list[str] = []
        self.downloads: dict[str, str] = {}
        self.broken = False
        self.needs: dict[str, list[str]] = {}
        """What packages depend on: each entry is one dependency, with its alternatives separated by "|"."""
        self.files: dict[str, list[str]] = {}

    def installed(self, names: Sequence[str]) -> Mapping[str, packages.PackageState]:
        return {name: self.there[name] for name in names if name in self.there}

    def finish_interrupted(self) -> bool:
        return False

    def refresh(self, files: Sequence[str] = ()) -> None:
        self.calls.append(f"refresh {' '.join(files)}".strip())

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {name: ["1.7.24-1"] for name in names}

    def effects(self, packages_: Mapping[str, str], *, replace: bool = False) -> packages.Effects:
        return packages.Effects([*packages_, "runc"], self.removes, [])

    def install(self, packages_: Mapping[str, str], *, replace: bool = False) -> None:
        self.calls.append("install")
        if self.broken:
            raise MachineProblem("power cut")
        for name, version in {**packages_, "runc": "1.1"}.items():
            self.there[name] = packages.PackageState(version, held=False)

    def download(self, packages_: Mapping[str, str]) -> None:
        self.downloads = dict(packages_)

    def has_downloaded(self, packages_: Mapping[str, str]) -> bool:
        return self.downloads == packages_

    def hold(self, names: Sequence[str], held: bool) -> None:
        for name in names:
            self.there[name] = packages.PackageState(self.there[name].version, held=held)

    def removals(self, names: Sequence[str]) -> Sequence[str]:
        left = {name for name in self.there if name not in names}
        while broken := {name for name in left for each in self.needs.get(name, ()) if not left & {*each.split("|")}}:
            left -= broken
        return [name for name in self.there if name not in left]

    def contents(self, names: Sequence[str]) -> tuple[Sequence[str], str]:
        return [path for name in names for path in self.files.get(name, ())], "adduser --system statd"

    def purge(self, names: Sequence[str]) -> None:
        self.calls.append(f"purge {' '.join(names)}")
        for name in self.removals(names):
            del self.there[name]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    manager = Packages()
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger" / "ledger.json"))
    monkeypatch.setattr(lock, "PATH", str(tmp_path / "lock"))
    monkeypatch.setattr(undo, "TEMPORARY_FILES", ())
    monkeypatch.setattr(packages, "detect", lambda: manager)
    monkeypatch.setattr(undo, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    return manager


def spec(root: Path, content: str = "ours") -> Spec:
    me = pwd.getpwuid(os.getuid()).pw_name
    return Spec(
        packages=(packages.RequestedPackage("containerd", "1.7.*", hold=True),),
        files=(
            File(str(root / "new" / "deep" / "file"), content, owner=me),
            File(str(root / "old"), content, owner=me),
        ),
        directories=(str(root / "state"),),
    )


def test_converge_again_and_undo(machine: Packages, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_text("theirs")
    (root / "old").chmod(0o640)

    first = converge(spec(root))
    assert first.actions == [
        f"write {root}/new/deep/file",
        f"write {root}/old",
        "install containerd 1.7.24-1",
        "hold containerd",
    ]
    assert [each.before for each in first.differences[:2]] == [None, "theirs"]
    assert converge(spec(root)).actions == []

    (root / "state").mkdir()
    (root / "state" / "left").write_text("x")
    actions = undo.Undoer().run()
    assert "remove containerd, runc" in actions
    assert machine.there == {}
    assert (root / "old").read_text() == "theirs"
    assert (root / "old").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in root.iterdir()) == ["old"]
    assert not Path(ledger.PATH).parent.exists()
    assert undo.Undoer().run() == []


@pytest.mark.usefixtures("machine")
def test_users_that_came_with_packages_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"daemon"}
    commands: list[Sequence[str]] = []

    def note(argv: Sequence[str], *_: object) -> CommandResult:
        commands.append(argv)
        return CommandResult(argv, 0, "", "")

    monkeypatch.setattr(users, "has_user", lambda name: name in there)
    monkeypatch.setattr(undo, "run", note)
    converge(dataclasses.replace(spec(tmp_path), users=("daemon", "nvpd", "other")))
    there.add("nvpd")
    assert "remove the user nvpd" in undo.Undoer().run()
    assert [words for words in commands if words[0] == "userdel"] == [["userdel", "nvpd"]]


@pytest.mark.usefixtures("machine")
def test_an_undo_of_nothing_leaves_no_lock_behind() -> None:
    with lock.held(path=lock.PATH):
        assert undo.Undoer().run() == []
    assert not Path(lock.PATH).exists()


def test_check_mode_changes_nothing(machine: Packages, tmp_path: Path) -> None:
    outcome = converge(spec(tmp_path / "root"), check=True)
    assert outcome.actions
    assert machine.calls == []
    assert not (tmp_path / "root").exists()
    assert not Path(ledger.PATH).exists()


def test_only_a_new_source_is_read_where_that_suffices(
    machine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[str] = []
    monkeypatch.setattr(machine, "available", lambda names: dict.fromkeys(names, there))
    monkeypatch.setattr(sources, "paths", lambda *_: (str(tmp_path / "key"), str(tmp_path / "kube.sources")))
    monkeypatch.setattr(sources.Sources, "_key", lambda *_: "key")
    monkeypatch.setattr(pwd, "getpwnam", lambda _: pwd.getpwuid(os.getuid()))
    wanted = dataclasses.replace(spec(tmp_path), repositories=(Repository("kube", "http://x/", "key"),))
    with pytest.raises(MachineProblem, match="no version is available"):
        converge(wanted)
    assert machine.calls == [f"refresh {tmp_path}/kube.sources", "refresh"]
    there.append("1.7.24-1")
    (tmp_path / "kube.sources").write_text("another")
    converge(wanted)
    assert machine.calls[2:] == [f"refresh {tmp_path}/kube.sources", "install"]


def test_images_come_in_the_background_once_and_never_in_check_mode(
    machine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(images, "start_fetching", lambda names: started.append(tuple(names)))
    wanted = dataclasses.replace(spec(tmp_path), images=("registry.k8s.io/pause:3.10", "example/tool:v{containerd}"))
    converge(wanted, check=True)
    assert started == []
    converge(wanted)
    converge(wanted)
    assert started == [("registry.k8s.io/pause:3.10", "example/tool:v1.7.24")]
    assert machine


def test_an_image_that_a_power_cut_interrupted_is_pending_though_nothing_else_is(
    machine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join left it as it was: the comparison with the machine did not know of images, and so the role was skipped."""
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(images, "start_fetching", lambda names: started.append(tuple(names)))
    monkeypatch.setattr(images, "_FETCHES", str(tmp_path / "fetches"))
    wanted = dataclasses.replace(spec(tmp_path), images=("registry.k8s.io/pause:3.10", "example/tool:v{containerd}"))
    converge(wanted)
    started.clear()
    mark = tmp_path / "fetches" / "example_tool:v1.7.24"
    mark.parent.mkdir()
    mark.write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    assert converge(wanted, check=True).actions == [], "it is being fetched, or its registry is down"
    mark.write_text("another boot\n")
    again = ["fetch example/tool:v1.7.24 again"]
    assert converge(wanted, check=True).actions == again
    assert started == []
    assert converge(wanted).actions == again
    assert started == [("registry.k8s.io/pause:3.10", "example/tool:v1.7.24")]
    assert machine


CTR = """#!/bin/sh
shift 2
echo "$*" >>{root}/log
case $* in
"leases ls") cat <<END
ID        CREATED AT           LABELS
1-cut     1999-11-28T03:05:31Z containerd.io/gc.expire=1999-11-29T03:05:31Z
2-of-one  1999-11-28T03:05:31Z containerd.io/gc.flat=1
3-now     $(date --utc +%FT%TZ) containerd.io/gc.expire=2999-11-29T03:05:31Z
4-ahead   2999-11-28T03:05:31Z containerd.io/gc.expire=2999-11-29T03:05:31Z
END
;;
"images ls name=="*) printf 'REF TYPE DIGEST\n%s type sha256:manifest\n' "${{3#name==}}" ;;
"images ls --quiet "*) printf 'pause:3\nsha256:config\n' ;;
*" fails:1") exit 7 ;;
"leases rm --sync 1-cut") exit 1 ;;
"content ls --quiet") printf 'sha256:there\nsha256:lost\n' ;;
esac
"""


@pytest.mark.parametrize("boot", ["another", "this"])
def test_what_a_power_cut_left_of_an_image_is_dropped_before_it_is_fetched_again(tmp_path: Path, boot: str) -> None:
    """With a stand-in for ctr, whose content store lists a blob that is not there.

    A real containerd 1.7 kept an emptied file of a layer until the lease of the pull was deleted.
    """
    blobs = tmp_path / "io.containerd.content.v1.content/blobs/sha256"
    fetches = tmp_path / "gpunodes-fetches"
    for folder in (blobs, fetches, tmp_path / "bin"):
        folder.mkdir(parents=True)
    (blobs / "there").write_text("x")
    (tmp_path / "bin/ctr").write_text(CTR.format(root=tmp_path))
    (tmp_path / "bin/ctr").chmod(0o755)
    this = Path("/proc/sys/kernel/random/boot_id").read_text()
    (fetches / "k8s_pause:3").write_text("another" if boot == "another" else this)
    script = images._FETCH.replace("/var/lib/containerd", str(tmp_path))
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    names = ("fails:1", "k8s/pause:3", "other:1")
    assert subprocess.run(["sh", "-c", script, "sh", *names], env=environment, check=False).returncode == 7
    told = (tmp_path / "log").read_text().splitlines()
    pulls = [f"images pull --hosts-dir /etc/containerd/certs.d {name}" for name in names]
    drops = [
        "leases rm --sync 1-cut",
        "leases rm --sync 4-ahead",
        "images rm --sync pause:3 sha256:config",
        "content rm sha256:lost",
    ]
    drops = drops if boot == "another" else []
    assert [line for line in told if " ls" not in line] == [*drops, *pulls]
    assert [path.name for path in fetches.iterdir()] == [".lock"]


def test_an_interrupted_installation_is_in_the_ledger(machine: Packages, tmp_path: Path) -> None:
    machine.broken = True
    with pytest.raises(MachineProblem, match="power cut"):
        converge(spec(tmp_path / "root"))
    assert ledger.load().packages == ["containerd", "runc"]
    machine.broken = False
    again = converge(spec(tmp_path / "root"))
    assert again.actions == ["install containerd 1.7.24-1", "hold containerd"]


def test_nothing_that_is_there_is_removed(machine: Packages, tmp_path: Path) -> None:
    machine.removes = ["docker.io"]
    with pytest.raises(MachineProblem, match=r"would remove docker\.io"):
        converge(spec(tmp_path / "root"))
    assert "install" not in machine.calls


def test_nothing_is_upgraded(machine: Packages, tmp_path: Path) -> None:
    machine.there["containerd"] = packages.PackageState("2.0.0", held=False)
    with pytest.raises(MachineProblem, match=r"containerd 2\.0\.0 is installed"):
        converge(spec(tmp_path / "root"))


def test_what_was_there_stays(machine: Packages, tmp_path: Path) -> None:
    machine.there["containerd"] = packages.PackageState("1.7.1-1", held=True)
    converge(spec(tmp_path / "root"))
    undo.Undoer().run()
    assert machine.there == {"containerd": packages.PackageState("1.7.1-1", held=True)}


@pytest.mark.parametrize("held", [True, False])
def test_a_hold_of_the_administrator_outlives_a_replacement(machine: Packages, held: bool) -> None:
    """The package manager releases what it replaces: it is held again, and was so before gpunodes."""
    machine.there["containerd"] = packages.PackageState("1.6.0-1", held=held)
    wanted = packages.RequestedPackage("containerd", "1.7.*", hold=True, replace=True)
    done = converge(Spec(packages=(wanted,)))
    assert done.actions == ["install containerd 1.7.24-1", "hold containerd"]
    assert machine.there["containerd"].held
    assert ledger.load().holds == ([] if held else ["containerd"])
    assert converge(Spec(packages=(wanted,))).actions == []


def test_what_a_pattern_holds_is_noted_unless_it_was_held(machine: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.there |= {f"nvidia-{name}": packages.PackageState("1", held=name == "mine") for name in ("mine", "other")}
    patterned = {name: state for name, state in machine.there.items() if name.startswith("nvidia-")}
    monkeypatch.setattr(machine, "matching", lambda _: machine.installed([*patterned]), raising=False)

    def install(chosen: Mapping[str, str], **_: bool) -> None:
        machine.there |= {name: packages.PackageState("2", held=False) for name in (*patterned, *chosen)}

    monkeypatch.setattr(machine, "install", install)
    converge(Spec(packages=(packages.RequestedPackage("containerd", "1.7.*"),), holds=("nvidia-*",)))
    assert [name for name, state in machine.there.items() if state.held] == ["nvidia-mine", "nvidia-other"]
    assert ledger.load().holds == ["nvidia-other"]


@pytest.mark.usefixtures("machine")
def test_a_survey_names_what_is_to_do(tmp_path: Path) -> None:
    wanted: dict[str, dict[str, Any]] = {
        "one": {"files": [{"path": str(tmp_path / "a"), "content": "x"}]},
        "two": {"directories": ["/tmp"]},
    }
    assert diff(wanted) == (["one"], {})
    assert not (tmp_path / "a").exists()


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    busy = pytest.raises(MachineProblem, match="another run of gpunodes is changing this machine")
    with lock.held(path=path), busy, lock.held(0, path):
        pass
    with lock.held(0, path):
        pass


@pytest.mark.usefixtures("machine")
def test_a_module_stream_is_enabled_once_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nvidia-driver.module"
    monkeypatch.setattr(packages, "stream_file", lambda _: str(file))
    chosen = "[nvidia-driver]\nname=nvidia-driver\nstream=580-open\nprofiles=\nstate=enabled\n"
    monkeypatch.setattr(sources, "must", lambda *_: file.write_text(chosen))
    wanted = Spec(module_stream="nvidia-driver:580-open")
    assert converge(wanted).actions == ["enable the module stream nvidia-driver:580-open"]
    assert converge(wanted).actions == []
    with pytest.raises(MachineProblem, match="580-open is enabled"):
        converge(Spec(module_stream="nvidia-driver:590-open"))
    undo.Undoer().run()
    assert not file.exists()


def test_an_undo_knows_what_the_single_files_keep() -> None:
    assert set(undo.TEMPORARY_FILES) == {f"/{smi.RUNNING_LOCK}", escalate.RESET, etcd_snapshot._LOCK}


@pytest.mark.usefixtures("machine")
def test_a_generated_file_is_ours_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "config.toml", tmp_path / "conf.d/99.toml"
    source.write_text("base")

    def must(argv: Sequence[str], *_: object) -> str:
        Path(argv[2]).write_text(Path(argv[1]).read_text() + " and more")
        Path(argv[1]).write_text("spoilt")
        return ""

    monkeypatch.setattr(files, "must", must)
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwnam", lambda _: me)
    wanted = Spec(generated=(Generated(str(target), ("tool", "%i", "%o"), str(source), str(source)),), section="gpu")
    assert converge(wanted).actions == [f"write {target}"]
    assert (target.read_text(), source.read_text()) == ("base and more", "base")
    assert converge(wanted).actions == []
    source.unlink()
    assert converge(wanted).actions == []


@pytest.mark.usefixtures("machine")
def test_versions_follow_the_package_that_they_must_equal() -> None:
    class Manager:
        unread = ""

        def available(self, names: Sequence[str]) -> dict[str, list[str]]:
            return {name: ["590.44.01-1", "580.82.07-1", "580.65.06-1"] for name in names}

        def refresh(self, _: object = ()) -> None:
            pass

        def finish_interrupted(self) -> bool:
            return False

    of_a_run = sources.Sources(Changes(Spec()))
    of_a_run.manager = Manager()  # type: ignore[assignment]  # a stand-in
    wanted = [
        packages.RequestedPackage("nvidia-open", "580.*"),
        packages.RequestedPackage("nvidia-fabricmanager", "580.*", False, "nvidia-open"),
    ]
    chosen = partial(installation._choose, Changes(Spec()), of_a_run)
    assert chosen(wanted, {}) == {"nvidia-open": "580.82.07-1", "nvidia-fabricmanager": "580.82.07-1"}
    assert chosen(wanted[1:], {"nvidia-open": "580.65.06-1"}) == {"nvidia-fabricmanager": "580.65.06-1"}
