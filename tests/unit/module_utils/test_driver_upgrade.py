"""A driver replaced and put back, interrupted anywhere. apt, modules and services are stand-ins of the test."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import gpu_users, ledger, packages
from gpunodes.ansible.module_utils.driver_upgrade import kept, transaction, upgrade, users
from gpunodes.ansible.module_utils.host import gpu_driver, services
from gpunodes.ansible.module_utils.host.spec import Driver, Service, Spec
from gpunodes.ansible.module_utils.packages import PackageState, RequestedPackage
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

OLD, NEW = "580.65.06", "590.44.01"
HOLDS = ("nvidia-*", "libnvidia-*", "libcuda1", "cuda-drivers*")
COMMON = ("nvidia-open", "nvidia-kernel-open-dkms", "libcuda1")
SPEC = Spec(
    section="gpu",
    packages=(RequestedPackage("nvidia-driver-pinning-590"), RequestedPackage("nvidia-open", "590.*", hold=True)),
    holds=HOLDS,
    driver=Driver(("nvidia", "nvidia-uvm")),
    services=(Service("nvidia-persistenced"),),
)


def version_set(version: str) -> dict[str, str]:
    branch = version[:3]
    own = {f"nvidia-driver-pinning-{branch}": f"{branch}-1", **dict.fromkeys(COMMON, f"{version}-1")}
    return own | ({f"nvidia-open-{branch}": f"{version}-1"} if branch == "580" else {})


class PowerCutError(Exception):
    pass


@dataclass
class Machine:
    """A machine with a driver; ``cut`` is the program at which the power is cut."""

    root: Path
    there: dict[str, PackageState]
    active: set[str] = field(default_factory=lambda: {"nvidia-persistenced", "nvidia-dcgm"})
    calls: list[list[str]] = field(default_factory=list)
    stuck: bool = False
    broken: str = ""
    cut: str = ""
    newest: str = NEW
    """What the source offers of 590."""

    @property
    def module(self) -> Path:
        return self.root / "sys/module/nvidia"

    def load(self) -> None:
        self.module.mkdir(parents=True, exist_ok=True)
        (self.root / "sys/module/nvidia_uvm").mkdir(exist_ok=True)
        (self.module / "version").write_text(self.dkms() + "\n")
        (self.module / "refcnt").write_text("3\n" if self.stuck else "0\n")

    def dkms(self) -> str:
        return packages.upstream(self.there["nvidia-kernel-open-dkms"].version)

    def run(self, argv: Sequence[str], *_: object, **__: object) -> CommandResult:
        words = list(argv)
        self.calls.append(words)
        if self.cut and self.cut in " ".join(words):
            raise PowerCutError
        if words[0] == "rmmod" and not self.stuck:
            for path in sorted((self.root / "sys/module" / words[1]).glob("*")):
                path.unlink()
            (self.root / "sys/module" / words[1]).rmdir()
        if words[0] == "modprobe":
            self.load()
        if words[0] == "modinfo":
            return CommandResult(argv, 0, f"{self.dkms()}\n", "")
        if words[:2] == ["systemctl", "stop"]:
            self.active -= {*words[2:]}
        if words[:2] == ["systemctl", "start"]:
            self.active |= {*words[2:]}
        if words[:2] == ["systemctl", "is-enabled"]:
            return CommandResult(argv, 1, "", "")
        return CommandResult(argv, 0, "", "")

    def apt(self, *arguments: str) -> CommandResult:
        self.run(["apt-get", *arguments])
        folder = next((each.split("=", 1)[1] for each in arguments if "Archives=" in each), "")
        if "--simulate" in arguments:
            lines = [f"Inst {name} [x] ({each} NVIDIA: [amd64])" for name, each in version_set(self.newest).items()]
            gone = [name for name in version_set(OLD) if name not in version_set(NEW)]
            return CommandResult(arguments, 0, "\n".join([*lines, *(f"Remv {name} [x]" for name in gone)]), "")
        if "--download-only" in arguments:
            for each in arguments:
                name, _, version = each.partition("=")
                if version and not name.startswith("-"):
                    (Path(folder) / f"{name}_{version}_amd64.deb").touch()
            return CommandResult(arguments, 0, "", "")
        files = [Path(each).name.split("_") for each in arguments if each.endswith(".deb")]
        if self.broken and any(each[1].startswith(self.broken) for each in files):
            return CommandResult(arguments, 100, "", "E: Sub-process /usr/bin/dpkg returned an error code (1)")
        for each in arguments:
            self.there.pop(each.removesuffix("-"), None)
        self.there |= {name: PackageState(version, held=False) for name, version, _ in files}
        return CommandResult(arguments, 0, "", "")

    # The package manager

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        return {name: self.there[name] for name in names if name in self.there}

    def matching(self, patterns: Sequence[str]) -> Mapping[str, PackageState]:
        return {name: state for name, state in self.there.items() if transaction.belongs(name, patterns)}

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        every = [version_set(version) for version in (self.newest, OLD)]
        found = {name: [*dict.fromkeys(each[name] for each in every if name in each)] for name in names}
        return {name: versions for name, versions in found.items() if versions}

    def hold(self, names: Sequence[str], held: bool) -> None:
        for name in names:
            self.there[name] = PackageState(self.there[name].version, held=held)

    def refresh(self, _: Sequence[str] = ()) -> None:
        self.calls.append(["apt-get", "update"])

    def finish_interrupted(self) -> bool:
        return False

    unread = ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, {name: PackageState(each, held=True) for name, each in version_set(OLD).items()})
    for name, folder in {"SYS": "sys", "DEV": "dev", "PROC": "proc", "BOOT": "boot", "DKMS": "dkms"}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(gpu_driver, name, str(tmp_path / folder))
    (tmp_path / "dev/nvidiactl").touch()
    made.load()
    on = {"nvidia-persistenced", "nvidia-dcgm"}

    def states(names: Sequence[str]) -> dict[str, dict[str, bool]]:
        return {name: {"enabled": True, "active": name in made.active} for name in names if name in on}

    for module in (upgrade, gpu_driver):
        monkeypatch.setattr(module, "run", made.run)
    monkeypatch.setattr(services, "must", made.run)
    monkeypatch.setattr(services, "run", made.run)
    monkeypatch.setattr(services, "states", states)
    monkeypatch.setattr(transaction, "apt", made.apt)
    monkeypatch.setattr(transaction, "PREFERENCES", str(tmp_path / "none"))
    monkeypatch.setattr(transaction, "ARCHIVES", str(tmp_path / "archives"))
    monkeypatch.setattr(gpu_driver, "publish_devices", lambda _: None)
    monkeypatch.setattr(kept, "ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "FOLDER", str(tmp_path / "cache/driver"))
    monkeypatch.setattr(upgrade, "BLOCK", str(tmp_path / "modprobe.d/block.conf"))
    monkeypatch.setattr(upgrade, "_RELEASE_S", 0)
    monkeypatch.setattr(users, "MIG_INSTANCES", str(tmp_path / "mig*"))
    monkeypatch.setattr(packages, "detect", lambda: made)
    monkeypatch.setattr(platform, "release", lambda: "6.12.1")
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    return made


def versions(machine: Machine) -> dict[str, str]:
    return {name: state.version for name, state in machine.there.items()}


def is_new(machine: Machine) -> bool:
    return versions(machine) == version_set(NEW) and users.loaded_version() == NEW


def is_old(machine: Machine) -> bool:
    return versions(machine) == version_set(OLD) and users.loaded_version() == OLD


def test_a_driver_is_replaced_and_put_back_without_a_network(machine: Machine) -> None:
    first = upgrade.prepare(SPEC)
    assert first.actions == [f"download the driver that replaces {OLD}, and keep the packages of {OLD}"]
    assert is_old(machine)
    assert sorted(path.name for path in Path(kept.FOLDER).iterdir()) == [OLD, NEW]
    assert upgrade.prepare(SPEC).actions == []
    done = upgrade.apply(SPEC)
    assert done.actions[0] == f"replace driver {OLD} by {NEW}"
    assert done.version == upgrade.verify(SPEC) == NEW
    assert is_new(machine)
    assert machine.active == {"nvidia-persistenced", "nvidia-dcgm"}
    assert all(state.held for state in machine.there.values())
    assert not Path(upgrade.BLOCK).exists()
    assert upgrade.apply(SPEC).actions == []
    machine.calls.clear()
    upgrade.undo(SPEC)
    assert is_old(machine)
    assert machine.active == {"nvidia-persistenced", "nvidia-dcgm"}
    assert not [call for call in machine.calls if "update" in call or "--download-only" in call]
    # Of a package that its sources have, too, apt would fetch the file there.
    [installed] = [call for call in machine.calls if any(word.endswith(".deb") for word in call)]
    assert {*packages.WITHOUT_SOURCES} <= {*installed}
    assert upgrade.undo(SPEC).actions == []
    noted = ledger.load(ledger.path_of("gpu"))
    assert {"nvidia-driver-pinning-590"} <= {*noted.packages}
    assert noted.directories == [kept.ROOT]
    # Those that both drivers have were held by others.
    assert {*noted.holds} == {*version_set(OLD)} ^ {*version_set(NEW)}
    assert upgrade.BLOCK in noted.files


@pytest.mark.parametrize("cut", ["systemctl stop", "rmmod nvidia_uvm", "rmmod nvidia", "apt-get", "modprobe", "start"])
def test_an_interrupted_replacement_continues_or_is_put_back(machine: Machine, cut: str) -> None:
    upgrade.prepare(SPEC)
    machine.cut = cut
    with pytest.raises(PowerCutError):
        upgrade.apply(SPEC)
    machine.cut = ""
    assert upgrade.prepare(SPEC).actions == []
    upgrade.apply(SPEC)
    assert is_new(machine)
    assert machine.active == {"nvidia-persistenced", "nvidia-dcgm"}
    assert upgrade.apply(SPEC).actions == []


@pytest.mark.parametrize("cut", ["systemctl stop", "rmmod nvidia", "apt-get", "modprobe"])
def test_an_interrupted_replacement_can_be_undone(machine: Machine, cut: str) -> None:
    upgrade.prepare(SPEC)
    machine.cut = cut
    with pytest.raises(PowerCutError):
        upgrade.apply(SPEC)
    machine.cut = ""
    upgrade.undo(SPEC)
    assert is_old(machine)
    assert not Path(upgrade.BLOCK).exists()


def test_an_interrupted_preparation_continues(machine: Machine) -> None:
    machine.cut = "--download-only"
    with pytest.raises(PowerCutError):
        upgrade.prepare(SPEC)
    assert is_old(machine)
    assert kept.load(OLD) is None
    machine.cut = ""
    upgrade.prepare(SPEC)
    assert {kept.load(each).version for each in (OLD, NEW)} == {OLD, NEW}  # type: ignore[union-attr]  # both are there


def test_a_driver_in_use_is_left_as_it_was_and_its_users_are_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade.prepare(SPEC)
    machine.stuck = True
    machine.load()
    monkeypatch.setattr(gpu_users, "_major", lambda _: 195)
    (machine.root / "proc/7/fd").mkdir(parents=True)
    (machine.root / "proc/devices").write_text("Character devices:\n195 nvidia\n")
    (machine.root / "proc/7/fd/3").symlink_to("/dev/nvidia0")
    (machine.root / "proc/7/comm").write_text("Xorg\x1b[2J\nroot: ok\n")
    with pytest.raises(MachineProblem) as error:
        upgrade.apply(SPEC)
    assert str(error.value).startswith("Xorg?[2J root: ok (process 7) uses the GPUs; wanted: ")
    assert is_old(machine)
    assert machine.active == {"nvidia-persistenced", "nvidia-dcgm"}
    assert not Path(upgrade.BLOCK).exists()


def test_with_a_reboot_the_new_driver_is_installed_beside_the_loaded_one(machine: Machine) -> None:
    upgrade.prepare(SPEC)
    machine.stuck = True
    machine.load()
    done = upgrade.apply(SPEC, reboot=True)
    assert done.reboot == f"the driver {OLD} is loaded, and {NEW} is installed"
    assert versions(machine) == version_set(NEW)
    machine.stuck = False
    machine.load()  # the boot
    assert upgrade.apply(SPEC, reboot=True).reboot == ""
    assert is_new(machine)


def test_a_driver_that_does_not_build_is_put_back(machine: Machine) -> None:
    upgrade.prepare(SPEC)
    machine.broken = NEW
    log = machine.root / f"dkms/nvidia/{NEW}/build/make.log"
    log.parent.mkdir(parents=True)
    log.write_text("nvidia.c:3:9: error: implicit declaration of function 'x'\n")
    os.utime(log, (1e10, 1e10))
    with pytest.raises(MachineProblem, match=r"does not build for the kernel 6\.12\.1: nvidia\.c:3:9"):
        upgrade.apply(SPEC)
    upgrade.undo(SPEC)
    assert is_old(machine)


@pytest.mark.parametrize(("offered", "expected"), [("590.48.02", "590.48.02"), ("590.40.01", NEW), (NEW, NEW)])
def test_a_newer_driver_of_the_source_is_fetched_after_a_failure(machine: Machine, offered: str, expected: str) -> None:
    """The one that did not build is not tried for ever."""
    upgrade.prepare(SPEC)
    machine.broken = NEW
    with pytest.raises(MachineProblem):
        upgrade.apply(SPEC)
    upgrade.undo(SPEC)
    machine.broken, machine.newest = "", offered
    assert bool(upgrade.prepare(SPEC).actions) is (expected != NEW)
    assert sorted(path.name for path in Path(kept.FOLDER).iterdir()) == [OLD, expected]
    assert upgrade.apply(SPEC).version == expected
    upgrade.undo(SPEC)
    assert is_old(machine)


def test_a_newer_driver_of_the_source_does_not_disturb_an_interrupted_replacement(machine: Machine) -> None:
    upgrade.prepare(SPEC)
    machine.cut = "modprobe"
    with pytest.raises(PowerCutError):
        upgrade.apply(SPEC)
    machine.cut, machine.newest = "", "590.48.02"
    machine.there["nvidia-open"] = PackageState(f"{OLD}-1", held=True)
    assert upgrade.prepare(SPEC).actions == []
    upgrade.apply(SPEC)
    assert is_new(machine)


def test_another_old_driver_than_the_kept_one_is_kept(machine: Machine) -> None:
    """It came by other means after the earlier attempt was undone: the way back leads to it."""
    upgrade.prepare(SPEC)
    for name, version in version_set("580.95.05").items():
        machine.there[name] = PackageState(version, held=True)
    machine.load()
    assert upgrade.prepare(SPEC).actions
    assert sorted(path.name for path in Path(kept.FOLDER).iterdir()) == ["580.95.05", NEW]


def test_what_is_not_prepared_is_not_applied(machine: Machine) -> None:
    with pytest.raises(MachineProblem, match="run the stage prepare"):
        upgrade.apply(SPEC)
    assert upgrade.undo(SPEC).actions == []
    assert is_old(machine)


def test_check_mode_changes_nothing(machine: Machine) -> None:
    assert upgrade.prepare(SPEC, check=True).actions
    assert not Path(kept.ROOT).exists()
    upgrade.prepare(SPEC)
    machine.calls.clear()
    assert upgrade.apply(SPEC, check=True).differences[0].after == {"loaded": NEW}
    assert is_old(machine)
    assert machine.calls == []


def test_mig_instances_are_not_destroyed(machine: Machine) -> None:
    (machine.root / "mig1").mkdir()
    with pytest.raises(MachineProblem, match="1 MIG instances exist"):
        upgrade.prepare(SPEC)


def test_an_old_package_that_cannot_be_had_stops_before_anything(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = machine.apt

    def lost(*arguments: str) -> CommandResult:
        return CommandResult(arguments, 0, "", "") if "--reinstall" in arguments else real(*arguments)

    monkeypatch.setattr(transaction, "apt", lost)
    with pytest.raises(MachineProblem, match=f"nvidia-open {OLD}-1.*cannot be downloaded; wanted: all packages of"):
        upgrade.prepare(SPEC)
    archives = machine.root / "archives"
    archives.mkdir()
    for name, version in version_set(OLD).items():
        (archives / f"{name}_{version}_amd64.deb").touch()
    upgrade.prepare(SPEC)
    assert kept.load(OLD)


def test_a_kept_set_with_a_missing_or_changed_list_is_none(machine: Machine) -> None:
    upgrade.prepare(SPEC)
    next(Path(kept.FOLDER, NEW).glob("libcuda1_*")).unlink()
    assert kept.load(NEW) is None
    for text in ("", "{", "[]", '{"version": "../x", "packages": {}, "replaces": ""}'):
        Path(kept.FOLDER, OLD, "set.json").write_text(text)
        assert kept.load(OLD) is None
    assert kept.load("../../etc") is None
    with pytest.raises(MachineProblem, match="is not the version of a driver"):
        kept.partial("../x")
    assert is_old(machine)


@pytest.mark.parametrize(
    ("removed", "message"),
    [("containerd", "replacing the driver would remove containerd"), ("cuda-toolkit-13-0", "remove cuda-toolkit-13-0")],
)
def test_only_packages_of_the_driver_are_removed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, removed: str, message: str
) -> None:
    result = CommandResult([], 0, f"Inst nvidia-open [1] ({NEW}-1 NVIDIA: [amd64])\nRemv {removed} [1]\n", "")
    monkeypatch.setattr(transaction, "apt", lambda *_: result)
    with pytest.raises(MachineProblem, match=message):
        upgrade.prepare(SPEC)
    assert is_old(machine)


@pytest.mark.parametrize(
    ("cgroup", "place"),
    [
        (
            "0::/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-a.scope",
            "pod 11111111-2222-3333-4444-555555555555",
        ),
        (f"0::/system.slice/docker-{'a' * 64}.scope", f"container {'a' * 12}"),
        ("0::/system.slice/xorg.service", "xorg.service"),
        ("0::/user.slice\n\x1b[2J/evil.service\x1b", ""),
        ("", ""),
    ],
)
def test_where_a_process_belongs(cgroup: str, place: str) -> None:
    assert users.place_of(cgroup) == place


@pytest.mark.usefixtures("machine")
def test_modules_of_others_are_unloaded_first(tmp_path: Path) -> None:
    (tmp_path / "sys/module/nvidia/holders/mine").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia_drm").mkdir()
    assert users.loaded() == ["mine", "nvidia_drm", "nvidia_uvm", "nvidia"]


def test_the_pin_of_the_old_branch_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "PREFERENCES", str(tmp_path))
    (tmp_path / "nvidia-driver-pinning-580").write_text("old")
    (tmp_path / "theirs").write_text("kept")
    with transaction.preferences(HOLDS, NEW) as option:
        folder = Path(option.partition("=")[2])
        assert sorted(path.name for path in folder.iterdir()) == ["gpunodes-driver.pref", "theirs"]
        assert "Pin: version /^([0-9]+:)?590\\.44\\.01(-|$)/" in (folder / "gpunodes-driver.pref").read_text()
    assert not folder.exists()
