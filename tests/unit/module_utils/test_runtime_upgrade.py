"""A container runtime replaced and put back, interrupted anywhere. apt, nvidia-ctk and services are stand-ins."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import pytest
from gpunodes.ansible.module_utils import ledger, packages
from gpunodes.ansible.module_utils.driver_upgrade import kept
from gpunodes.ansible.module_utils.host import files, services
from gpunodes.ansible.module_utils.host.spec import File, Generated, Service, Spec
from gpunodes.ansible.module_utils.os_upgrade import locks
from gpunodes.ansible.module_utils.packages import PackageState, RequestedPackage
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.ansible.module_utils.runtime_upgrade import store, upgrade

OLD = {"containerd": "1.7.24~ds1-6", "runc": "1.1.15-1", "nvidia-container-toolkit": "1.19.0-1"}
NEW = {"containerd": "2.1.4-1", "runc": "1.3.1-1", "nvidia-container-toolkit": "1.20.2-1"}


class PowerCutError(Exception):
    pass


@dataclass
class Machine:
    """A machine; ``cut`` is the program at which the power is cut, ``broken`` a version that does not install."""

    root: Path
    there: dict[str, PackageState]
    sources: dict[str, list[str]]
    active: set[str] = field(default_factory=lambda: {"containerd"})
    calls: list[list[str]] = field(default_factory=list)
    removes: str = ""
    broken: str = ""
    cut: str = ""
    half: str = ""

    @property
    def config(self) -> Path:
        return self.root / "etc/config.toml"

    @property
    def drop_in(self) -> Path:
        return self.root / "etc/99-nvidia.toml"

    def specs(self, version: str = "") -> dict[str, Spec]:
        me = pwd.getpwuid(os.getuid()).pw_name
        contents = {"1.*": "version = 2\n", "2.*": "version = 3\n"}
        return {
            "container_toolkit": Spec(
                section="gpu",
                packages=(RequestedPackage("nvidia-container-toolkit", "1.20.*", hold=True, replace=True),),
                generated=(Generated(str(self.drop_in), ("nvidia-ctk", "%i", "%o"), input=str(self.config)),),
                services=(Service("containerd"),),
            ),
            "containerd": Spec(
                packages=(
                    RequestedPackage("containerd", version, hold=True, replace=True),
                    RequestedPackage("runc", replace=True),
                ),
                files=(File(str(self.config), package="containerd", contents=contents, owner=me),),
                services=(Service("containerd"),),
            ),
        }

    def run(self, argv: Sequence[str], *_: object, **__: object) -> CommandResult:
        words = list(argv)
        self.calls.append(words)
        if self.cut and self.cut in " ".join(words):
            raise PowerCutError
        if words[0] == "nvidia-ctk":
            # It continues what is there, in its format.
            before = Path(words[2]).read_text() if Path(words[2]).exists() else Path(words[1]).read_text()
            Path(words[2]).write_text(before.rstrip("\n") + "\n")
        if words[0] == "apt-cache":
            lines = [f"{name} | {each} | http://x Packages" for name in words for each in self.sources.get(name, ())]
            return CommandResult(argv, 0, "\n".join(lines), "")
        if words[:2] == ["dpkg", "--audit"]:
            return CommandResult(argv, 0, self.half, "")
        if words[0] == "dpkg":
            return CommandResult(argv, int(not words[2] > words[4]), "", "")
        if words[:2] in (["systemctl", "restart"], ["systemctl", "start"]):
            version = "version = 3" if self.version().startswith("2") else "version = 2"
            read = [path.read_text() for path in (self.config, self.drop_in) if path.exists()]
            good = all(text.startswith(version) for text in read) or version == "version = 3"
            self.active = {"containerd"} if good else set()
            return CommandResult(argv, int(not good), "", "")
        return CommandResult(argv, 0, "", "")

    def version(self) -> str:
        return self.there["containerd"].version

    def apt(self, *arguments: str) -> CommandResult:
        self.run(["apt-get", *arguments])
        folder = next((each.split("=", 1)[1] for each in arguments if "Archives=" in each), "")
        asked = dict(each.split("=", 1) for each in arguments if "=" in each and not each.startswith("-"))
        if "--simulate" in arguments:
            lines = [f"Inst {name} [{self.there[name].version}] ({each} X [amd64])" for name, each in asked.items()]
            return CommandResult(
                arguments, 0, "\n".join([*lines, *([f"Remv {self.removes}"] if self.removes else [])]), ""
            )
        if "--download-only" in arguments:
            for name, each in asked.items():
                if each in self.sources.get(name, ()):
                    (Path(folder) / f"{name}_{each}_amd64.deb").touch()
            return CommandResult(arguments, 0, "", "")
        names = [Path(each).name.split("_") for each in arguments if each.endswith(".deb")]
        if self.broken and any(each[1].startswith(self.broken) for each in names):
            return CommandResult(arguments, 100, "", "E: Sub-process /usr/bin/dpkg returned an error code (1)")
        self.there |= {name: PackageState(version, held=False) for name, version, _ in names}
        return CommandResult(arguments, 0, "", "")

    # The package manager

    unread = ""

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        return {name: self.there[name] for name in names if name in self.there}

    def matching(self, _: Sequence[str]) -> Mapping[str, PackageState]:
        return {}

    def hold(self, names: Sequence[str], held: bool) -> None:
        for name in names:
            self.there[name] = PackageState(self.there[name].version, held=held)

    def refresh(self, _: Sequence[str] = ()) -> None:
        self.calls.append(["apt-get", "update"])

    def finish_interrupted(self) -> bool:
        return False


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    there = {name: PackageState(version, held=name != "runc") for name, version in OLD.items()}
    made = Machine(tmp_path, there, {name: [NEW[name], OLD[name]] for name in OLD})
    (tmp_path / "etc").mkdir()
    made.config.write_text("version = 2\n")
    made.drop_in.write_text("version = 2\n")
    monkeypatch.setattr(upgrade, "run", made.run)
    monkeypatch.setattr(files, "must", made.run)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-ctk").touch(0o755)
    monkeypatch.setattr(files, "PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(services, "must", made.run)
    monkeypatch.setattr(services, "run", made.run)
    monkeypatch.setattr(
        services, "states", lambda names: {n: {"enabled": True, "active": n in made.active} for n in names}
    )
    monkeypatch.setattr(upgrade, "apt", made.apt)
    monkeypatch.setattr(store, "apt", made.apt)
    monkeypatch.setattr(store, "ARCHIVES", str(tmp_path / "archives"))
    monkeypatch.setattr(store, "FOLDER", str(tmp_path / "cache/runtime"))
    monkeypatch.setattr(upgrade, "ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(locks, "wait", lambda *_: None)
    monkeypatch.setattr(packages, "detect", lambda: made)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    # gpunodes generated the drop-in when the machine joined.
    book = ledger.Ledger(files={str(made.drop_in): ledger.OldFile(None)})
    book.save(ledger.path_of("gpu"))
    return made


def versions(machine: Machine) -> dict[str, str]:
    return {name: state.version for name, state in machine.there.items()}


def is_new(machine: Machine) -> bool:
    texts = (machine.config.read_text(), machine.drop_in.read_text())
    return versions(machine) == NEW and texts == ("version = 3\n",) * 2 and machine.active == {"containerd"}


def is_old(machine: Machine) -> bool:
    texts = (machine.config.read_text(), machine.drop_in.read_text())
    return versions(machine) == OLD and texts == ("version = 2\n",) * 2 and machine.active == {"containerd"}


def restarts() -> list[str]:
    return [*ledger.load().restarts, *ledger.load(ledger.path_of("gpu")).restarts]


def test_what_is_pending_is_read_without_a_change(machine: Machine) -> None:
    found, changes = upgrade.pending(machine.specs())
    assert (found.new, found.old) == (NEW, OLD)
    assert changes == []
    assert is_old(machine)
    lists = {word for call in machine.calls for word in call if "Dir::State::Lists" in word}
    assert len(lists) == 1
    assert not Path(lists.pop().partition("=")[2]).exists()
    machine.config.write_text("old\n")
    assert f"write {machine.config}" in upgrade.pending(machine.specs())[1]
    assert machine.config.read_text() == "old\n"
    machine.half = "containerd is half installed"
    assert upgrade.pending(machine.specs()) == (store.Kept({}, {}), ["finish an interrupted package installation"])


def test_a_runtime_is_replaced_and_put_back_without_a_network(machine: Machine) -> None:
    specs = machine.specs()
    first = upgrade.prepare(specs)
    assert first.actions[0].startswith("download containerd 2.1.4-1, runc 1.3.1-1, ")
    assert is_old(machine)
    assert upgrade.prepare(specs).actions == []
    done = upgrade.apply(specs)
    assert done.actions[0].startswith("replace containerd 1.7.24~ds1-6, ")
    upgrade.verify(specs)
    assert upgrade.running(specs, "containerd") == "containerd://2.1.4"
    assert is_new(machine)
    assert [name for name, state in machine.there.items() if not state.held] == ["runc"]
    assert upgrade.apply(specs).actions == []
    assert upgrade.pending(specs) == (store.Kept({}, {}), [])
    machine.calls.clear()
    upgrade.undo(specs)
    assert is_old(machine)
    assert upgrade.running(specs, "containerd") == "containerd://1.7.24"
    assert not [call for call in machine.calls if "update" in call or "--download-only" in call]
    # Of a package that its sources have, too, apt would fetch the file there.
    [installed] = [call for call in machine.calls if any(word.endswith(".deb") for word in call)]
    assert {*packages.WITHOUT_SOURCES} <= {*installed}
    assert upgrade.undo(specs).actions == []
    with pytest.raises(MachineProblem, match=r"installed: .*containerd 1\.7"):
        upgrade.verify(specs)
    assert ledger.load().directories == [str(machine.root / "cache")]
    # Others held them before.
    assert ledger.load().holds == []


def test_what_was_not_held_before_is_released_by_a_reset(machine: Machine) -> None:
    machine.hold(["containerd"], held=False)
    upgrade.prepare(machine.specs())
    upgrade.apply(machine.specs())
    assert [name for name, state in machine.there.items() if not state.held] == ["runc"]
    assert ledger.load().holds == ["containerd"]


def test_the_configuration_of_a_version_is_there_before_its_package_starts_the_service(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade.prepare(machine.specs())
    real, seen = machine.apt, []

    def apt(*arguments: str) -> CommandResult:
        seen.append((machine.config.read_text(), machine.drop_in.read_text(), restarts()))
        return real(*arguments)

    monkeypatch.setattr(upgrade, "apt", apt)
    upgrade.apply(machine.specs())
    assert seen == [("version = 3\n", "version = 3\n", ["containerd", "containerd"])]
    assert restarts() == []


def test_an_old_package_whose_copy_was_interrupted_is_copied_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it under its name would count as kept, and could not be put back."""
    archives = machine.root / "archives"
    archives.mkdir()
    for name, version in OLD.items():
        (archives / f"{name}_{version}_amd64.deb").write_text("whole")
        machine.sources[name].remove(version)
    real = shutil.copyfileobj

    def cut(source: IO[bytes], made: IO[bytes]) -> None:
        made.write(source.read(1))
        made.flush()
        raise PowerCutError

    monkeypatch.setattr(shutil, "copyfileobj", cut)
    with pytest.raises(PowerCutError):
        upgrade.prepare(machine.specs())
    monkeypatch.setattr(shutil, "copyfileobj", real)
    upgrade.prepare(machine.specs())
    found = store.load()
    assert found is not None
    assert [Path(each).read_text() for each in found.files(found.old)] == ["whole"] * 3


@pytest.mark.parametrize("cut", ["nvidia-ctk", "apt-get", "systemctl restart"])
def test_an_interrupted_replacement_continues_or_is_put_back(machine: Machine, cut: str) -> None:
    specs = machine.specs()
    for finish, check in ((upgrade.apply, is_new), (upgrade.undo, is_old)):
        upgrade.prepare(specs)
        machine.cut = cut
        with pytest.raises(PowerCutError):
            upgrade.apply(specs)
        machine.cut = ""
        assert upgrade.pending(specs) != (store.Kept({}, {}), [])
        assert upgrade.prepare(specs).actions == []
        finish(specs)
        assert check(machine)
        assert finish(specs).actions == []
        upgrade.undo(specs)


def test_packages_of_which_some_are_replaced_already_are_put_back_together(machine: Machine) -> None:
    upgrade.prepare(machine.specs())
    machine.there["containerd"] = PackageState(NEW["containerd"], held=False)
    assert upgrade.prepare(machine.specs()).actions == []
    upgrade.undo(machine.specs())
    assert is_old(machine)


def test_an_interrupted_preparation_continues(machine: Machine) -> None:
    machine.cut = "--download-only"
    with pytest.raises(PowerCutError):
        upgrade.prepare(machine.specs())
    assert store.load() is None
    machine.cut = ""
    assert upgrade.prepare(machine.specs()).actions
    assert store.load() == store.Kept(NEW, OLD)


def test_packages_that_do_not_install_are_put_back(machine: Machine) -> None:
    upgrade.prepare(machine.specs())
    machine.broken = NEW["containerd"]
    with pytest.raises(MachineProblem, match="installing containerd"):
        upgrade.apply(machine.specs())
    upgrade.undo(machine.specs())
    assert is_old(machine)


def test_packages_of_an_earlier_replacement_are_not_put_back(machine: Machine) -> None:
    """Something else has replaced them since, and nothing is pending."""
    upgrade.prepare(machine.specs())
    upgrade.apply(machine.specs())
    machine.there["containerd"] = PackageState("2.1.5-1", held=True)
    machine.sources["containerd"] = ["2.1.5-1"]
    assert upgrade.prepare(machine.specs()).actions == []
    assert store.load() is None
    assert upgrade.apply(machine.specs()).actions == []
    with pytest.raises(MachineProblem, match="no package was replaced"):
        upgrade.undo(machine.specs())
    assert machine.version() == "2.1.5-1"


@pytest.mark.parametrize("cut", ["", "systemctl restart"])
def test_a_later_change_of_the_configuration_alone_is_not_taken_back(machine: Machine, cut: str) -> None:
    """Neither are packages of the replacement before; a node whose verification fails is kept, not given back."""
    upgrade.prepare(machine.specs())
    upgrade.apply(machine.specs())
    machine.config.write_text("old\n")
    assert upgrade.prepare(machine.specs()).actions == []
    assert upgrade.undo(machine.specs()).actions == [], "nothing was applied yet"
    machine.cut = cut
    with pytest.raises(PowerCutError) if cut else contextlib.nullcontext():
        assert upgrade.apply(machine.specs()).actions[0] == f"write {machine.config}"
    machine.cut = ""
    with pytest.raises(MachineProblem, match="the earlier configuration is not kept"):
        upgrade.undo(machine.specs())
    upgrade.apply(machine.specs())
    assert is_new(machine)


def test_what_is_not_prepared_is_not_applied(machine: Machine) -> None:
    with pytest.raises(MachineProblem, match="run the stage prepare"):
        upgrade.apply(machine.specs("2.1.*"))
    assert upgrade.undo(machine.specs()).actions == []
    assert is_old(machine)


def test_check_mode_changes_nothing(machine: Machine) -> None:
    assert upgrade.prepare(machine.specs(), check=True).actions
    assert not (machine.root / "cache").exists()
    upgrade.prepare(machine.specs())
    assert upgrade.apply(machine.specs(), check=True).differences[0].after == NEW
    assert upgrade.undo(machine.specs(), check=True).actions == []
    assert is_old(machine)
    upgrade.apply(machine.specs())
    assert upgrade.undo(machine.specs(), check=True).differences[0].after == OLD
    assert is_new(machine)


def test_a_service_that_does_not_run_is_found(machine: Machine) -> None:
    upgrade.prepare(machine.specs())
    upgrade.apply(machine.specs())
    machine.active = set()
    with pytest.raises(MachineProblem, match="containerd does not run"):
        upgrade.verify(machine.specs())


def test_a_replacement_that_would_remove_a_package_is_refused(machine: Machine) -> None:
    machine.removes = "docker.io [26.1]"
    for stage in (upgrade.pending, upgrade.prepare):
        with pytest.raises(MachineProblem, match=r"would remove docker\.io"):
            stage(machine.specs())
    assert is_old(machine)


def test_an_old_package_that_cannot_be_had_stops_before_anything(machine: Machine) -> None:
    machine.sources["containerd"] = [NEW["containerd"]]
    with pytest.raises(MachineProblem, match=r"containerd 1\.7\.24~ds1-6 cannot be downloaded"):
        upgrade.prepare(machine.specs())
    assert store.load() is None
    (machine.root / "archives").mkdir()
    (machine.root / "archives" / f"containerd_{OLD['containerd']}_amd64.deb").touch()
    upgrade.prepare(machine.specs())
    assert store.load() == store.Kept(NEW, OLD)


def test_a_kept_set_with_a_missing_file_or_a_changed_list_is_none(machine: Machine) -> None:
    upgrade.prepare(machine.specs())
    for text in ("", "{", "[]", '{"new": 1}', '{"new": {"../x": "1"}, "old": {}}'):
        Path(store.FOLDER, "set.json").write_text(text)
        assert store.load() is None
    upgrade.prepare(machine.specs())
    next(Path(store.FOLDER).glob("runc_1.3*")).unlink()
    assert store.load() is None


def test_dnf_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "detect", packages.Dnf)
    for stage in (upgrade.pending, upgrade.prepare, upgrade.apply, upgrade.undo, upgrade.verify):
        with pytest.raises(MachineProblem, match="its packages come by dnf"):
            stage(machine.specs())


TOOLKIT = (
    RequestedPackage("a", "1.20.*", replace=True),
    RequestedPackage("b", "1.20.*", same_as="a", replace=True),
)


@pytest.mark.parametrize(
    ("there", "available", "chosen"),
    [
        ({"a": "1.19.0-1", "b": "1.19.0-1"}, ["1.21.0-1", "1.20.1-1"], {"a": "1.20.1-1", "b": "1.20.1-1"}),
        ({"a": "1.20.1-1", "b": "1.20.1-1"}, ["1.20.1-1"], {}),
        # A newer patch is taken, an older one is not, and neither is a version that the request does not allow.
        ({"a": "1.20.1-1", "b": "1.20.1-1"}, ["1.20.2-1"], {"a": "1.20.2-1", "b": "1.20.2-1"}),
        ({"a": "1.20.2-1", "b": "1.20.2-1"}, ["1.20.1-1"], {}),
        ({"a": "1.20.2-1", "b": "1.20.2-1"}, ["1.21.0-1"], {}),
        # What is newer than the request goes back to it.
        ({"a": "1.21.0-1", "b": "1.21.0-1"}, ["1.21.0-1", "1.20.1-1"], {"a": "1.20.1-1", "b": "1.20.1-1"}),
        # Half of an interrupted replacement.
        ({"a": "1.20.1-1", "b": "1.19.0-1"}, ["1.20.1-1"], {"b": "1.20.1-1"}),
        ({"a": "1.20.1-1"}, ["1.20.1-1"], {"b": "1.20.1-1"}),
        ({"a": "1.20.1-1", "b": "1.20.1-1"}, [], {}),
    ],
)
def test_which_versions_are_chosen(
    there: dict[str, str], available: list[str], chosen: dict[str, str], machine: Machine
) -> None:
    assert machine
    installed = {name: PackageState(version, held=True) for name, version in there.items()}
    assert upgrade.choose(TOOLKIT, installed, {"a": available, "b": available}) == chosen


def test_a_version_that_no_source_has_is_named() -> None:
    old = {"a": PackageState("1.19.0-1", held=True)}
    with pytest.raises(MachineProblem, match=r"no a 1\.20\.\*; available: 1\.19\.0-1"):
        upgrade.choose(TOOLKIT, old, {"a": ["1.19.0-1"]})


def test_the_folder_of_kept_packages_is_removed_by_a_reset() -> None:
    assert store.FOLDER.startswith(f"{kept.ROOT}/")
    assert replace(store.Kept({}, {}), old={"x": "1"}).files({}) == []
