"""Upgrades of packages and kernels, interrupted or not. apt is a stand-in with the real output of a simulation."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import ledger, packages
from gpunodes.ansible.module_utils.host import gpu_driver
from gpunodes.ansible.module_utils.os_upgrade import kernels, locks, reboot, upgrade
from gpunodes.ansible.module_utils.os_upgrade.upgrade import Request
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

from tests.unit.module_utils.test_os_pending import RELEASE, output

METAS = ("linux-headers-cloud-amd64", "linux-image-cloud-amd64")
NEW = (f"linux-headers-{RELEASE}", f"linux-image-{RELEASE}")
KEPT = """
Configuration file '/etc/issue'
 ==> Modified (by you or by a script) since installation.
 ==> Keeping old config file as default.
"""


@dataclass
class Apt:
    """A machine's packages, and what apt was told to do."""

    calls: list[list[str]] = field(default_factory=list)
    there: dict[str, packages.PackageState] = field(default_factory=dict)
    simulation: str = field(default_factory=lambda: output("upgrade-debian12.txt"))
    removes: str = ""
    """What apt says when it simulates an installation of exact versions."""
    interrupted: bool = False
    archives: str = "'http://m/x.deb' x.deb 1 MD5Sum:0\n"
    broken: str = ""
    """A package whose configuration fails: it stays on the disk."""
    image: str = f"vmlinuz-{RELEASE}"
    """What is there of its kernel, below /boot."""

    def run(self, *arguments: str) -> CommandResult:
        words = [each for each in arguments if not each.startswith("-o")]
        self.calls.append(words)
        # Else apt upgrades what has the same source package, such as the kernel's metapackages.
        exactly = "-oAPT::Get::Upgrade-By-Source-Package=false" in arguments
        assert exactly or not any("=" in each for each in words)
        out = ""
        if "--simulate" in words:
            done = any("=" in each for each in words)
            out = self.removes if done else self.simulation
        elif "--print-uris" in words:
            out = self.archives
        elif "--download-only" in words:
            self.archives = ""
        elif words[0] == "install":
            out = KEPT
            for each in words[1:]:
                name, _, version = each.partition("=")
                self.there[name] = packages.PackageState(version, held=False)
                if name == self.broken:
                    (Path(gpu_driver.BOOT) / self.image).parent.mkdir(parents=True, exist_ok=True)
                    (Path(gpu_driver.BOOT) / self.image).touch()
                    return CommandResult(arguments, 100, "", "E: Sub-process /usr/bin/dpkg returned an error code (1)")
            self.simulation = ""
        elif words[0] == "purge":
            for name in words[1:]:
                self.there.pop(name, None)
        return CommandResult(arguments, 0, out, "")

    def changes(self) -> list[list[str]]:
        quiet = {"--simulate", "--print-uris"}
        return [call for call in self.calls if not quiet & {*call}]

    def installed(self, names: Sequence[str]) -> Mapping[str, packages.PackageState]:
        return {name: self.there[name] for name in names if name in self.there}

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {name: ["6.1.192-2"] for name in names}

    def hold(self, names: Sequence[str], held: bool) -> None:
        self.calls.append(["hold" if held else "unhold", *names])
        for name in names:
            self.there[name] = packages.PackageState(self.there[name].version, held=held)

    def refresh(self) -> None:
        self.calls.append(["update"])

    def finish_interrupted(self) -> bool:
        was, self.interrupted = self.interrupted, False
        return was


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    made = Apt()
    for name in METAS:
        made.there[name] = packages.PackageState("6.1.158-1", held=False)
    monkeypatch.setattr(upgrade, "apt", made.run)
    monkeypatch.setattr(upgrade, "_apt_only", lambda: None)
    monkeypatch.setattr(upgrade, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-41-cloud-amd64")
    monkeypatch.setattr(packages, "detect", lambda: made)
    monkeypatch.setattr(locks, "wait", lambda *_: None)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(gpu_driver, "BOOT", str(tmp_path))
    monkeypatch.setattr(gpu_driver, "MODULES", str(tmp_path / "modules"))
    monkeypatch.setattr(kernels, "newest", lambda running: running)
    return made


def names(call: list[str]) -> list[str]:
    return [each.partition("=")[0] for each in call[1:]]


def test_packages_come_first_then_the_kernel_then_what_depends_on_it(apt: Apt) -> None:
    done = upgrade.apply(Request())
    rest, kernel, metas = apt.changes()
    assert "bash" in names(rest)
    assert not {*METAS, *NEW} & {*names(rest)}
    assert (names(kernel), names(metas)) == ([*NEW], [*METAS])
    assert (
        done.notes
        == ["/etc/issue: the machine's version was kept; the package's is beside it, as /etc/issue.dpkg-dist"] * 3
    )
    apt.calls.clear()
    assert upgrade.apply(Request()).actions == []
    assert apt.changes() == []


@pytest.mark.parametrize("own", [True, False])
def test_headers_of_a_new_kernel_leave_with_the_driver_as_those_before(apt: Apt, own: bool) -> None:
    """Those of an administrator stay; gpunodes has those of the running kernel in the ledger if it installed them."""
    before = ["dkms", *(["linux-headers-6.1.0-41-cloud-amd64"] if own else [])]
    ledger.Ledger(packages=[*before]).save(ledger.path_of("gpu"))
    apt.removes = "".join(f"Inst {name} (6.1.192-2 Debian-Security)\n" for name in (*NEW, "linux-kbuild-6.2"))
    upgrade.apply(Request())
    new = [NEW[0], "linux-kbuild-6.2"] if own else []
    assert ledger.load(ledger.path_of("gpu")).packages == [*before, *new]


def test_a_kernel_that_the_table_refuses_is_not_installed_and_held(apt: Apt) -> None:
    done = upgrade.apply(Request(refused={RELEASE: "it does not build"}, driver=True))
    assert [call[0] for call in apt.changes()] == ["install", "hold"]
    assert f"the kernel {RELEASE} is not installed: it does not build" in done.notes
    assert ledger.load().holds == [*METAS]
    assert f"linux-image-{RELEASE}" not in apt.there
    # The second run has nothing to do: apt keeps them back.
    apt.simulation = output("upgrade-debian12-held.txt").partition("Inst")[0]
    apt.calls.clear()
    assert upgrade.apply(Request(refused={RELEASE: "x"}, driver=True)).actions == []


def test_a_kernel_for_which_dkms_fails_is_removed_before_it_can_boot(apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "build_driver", lambda release: f"nv.c: error for {release}")
    done = upgrade.apply(Request(driver=True))
    assert [call[0] for call in apt.changes()] == ["install", "install", "purge", "hold"]
    assert names(apt.changes()[2]) == [*NEW]
    assert not {*NEW} & {*apt.there}
    assert apt.there[METAS[0]].version == "6.1.158-1"
    assert f"the kernel {RELEASE} is removed again: nv.c: error for {RELEASE}" in done.notes


@pytest.mark.parametrize(
    ("broken", "image"),
    [
        (f"linux-image-{RELEASE}", f"vmlinuz-{RELEASE}"),
        # Of a kernel that is split: its last package copies the image to /boot, and its headers failed before that.
        (f"linux-headers-{RELEASE}", f"modules/{RELEASE}/vmlinuz"),
    ],
)
def test_a_kernel_whose_packages_dkms_fails_is_removed_too(
    apt: Apt, monkeypatch: pytest.MonkeyPatch, broken: str, image: str
) -> None:
    """Debian's hook /etc/kernel/postinst.d/dkms fails the package of a kernel for which a module does not build."""
    apt.broken, apt.image = broken, image
    monkeypatch.setattr(kernels, "build_driver", lambda release: f"nv.c: error for {release}")
    done = upgrade.apply(Request(driver=True))
    assert [call[0] for call in apt.changes()] == ["install", "install", "purge", "hold"]
    assert f"the kernel {RELEASE} is removed again: nv.c: error for {RELEASE}" in done.notes


@pytest.mark.parametrize("driver", [True, False])
def test_a_kernel_that_fails_for_another_reason_is_an_error(
    apt: Apt, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    apt.broken = f"linux-image-{RELEASE}"
    monkeypatch.setattr(kernels, "build_driver", lambda _: "")
    with pytest.raises(MachineProblem, match="Sub-process"):
        upgrade.apply(Request(driver=driver))
    assert [call[0] for call in apt.changes()] == ["install", "install"]


def test_a_kernel_that_an_interrupted_run_left_without_a_driver_is_removed_first(
    apt: Apt, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt.interrupted, apt.simulation = True, ""
    broken = f"half-configured linux-image-{RELEASE}\nunpacked linux-headers-{RELEASE}\n"
    listing = f"{broken}installed linux-image-6.1.0-1\n"
    monkeypatch.setattr(kernels, "run", lambda argv, *_: CommandResult(argv, 0, listing, ""))
    monkeypatch.setattr(kernels, "has_driver", lambda _: False)
    upgrade.apply(Request(driver=True))
    assert apt.changes() == [["purge", f"linux-image-{RELEASE}", f"linux-headers-{RELEASE}"]]


def test_all_parts_of_a_split_kernel_leave_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    new, running = "7.3.4+deb13-cloud-amd64", "7.2.12+deb13-cloud-amd64"
    states = {"base": "installed", "binary": "installed", "headers": "half-configured", "image": "half-configured"}
    listing = "".join(
        f"{state} linux-{part}-{new}\ninstalled linux-{part}-{running}\n" for part, state in states.items()
    )
    listing += "installed linux-headers-7.3.4+deb13-common\nconfig-files linux-image-7.1.2+deb13-cloud-amd64\n"
    monkeypatch.setattr(kernels, "run", lambda argv, *_: CommandResult(argv, 0, listing, ""))
    monkeypatch.setattr(kernels, "has_driver", lambda _: False)
    monkeypatch.setattr("platform.release", lambda: running)
    assert kernels.half_installed() == [f"linux-{part}-{new}" for part in states]


@pytest.mark.parametrize(
    ("running", "package"),
    [
        ("6.12.57+deb13-amd64", "linux-headers-6.12.57+deb13-common"),
        ("6.12.57+deb13-amd64", "linux-headers-6.12.57+deb13-amd64"),
        ("6.8.0-45-generic", "linux-headers-6.8.0-45"),
        ("6.12.57+deb13-amd64", "linux-image-6.12.57+deb13-amd64-dbg"),
    ],
)
def test_packages_of_the_running_kernel_are_never_removed(
    running: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "linux-headers-6.8.0-4"
    listing = f"half-configured {package}\nunpacked {other}\n"
    monkeypatch.setattr(kernels, "run", lambda argv, *_: CommandResult(argv, 0, listing, ""))
    monkeypatch.setattr(kernels, "has_driver", lambda _: False)
    monkeypatch.setattr("platform.release", lambda: running)
    assert kernels.half_installed() == [other]


def test_a_kernel_that_builds_now_is_released(apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.Ledger(holds=[*METAS, "theirs"]).save()
    for name in METAS:
        apt.there[name] = packages.PackageState("6.1.158-1", held=True)
    monkeypatch.setattr(kernels, "build_driver", lambda _: "")
    upgrade.apply(Request(driver=True))
    assert ["unhold", *METAS] in apt.changes()
    assert apt.there[METAS[0]].version == "6.1.192-2"


def test_a_hold_of_the_user_stays(apt: Apt) -> None:
    apt.simulation = output("upgrade-debian12-held.txt")
    done = upgrade.apply(Request())
    assert f"kept back, because they are held or their upgrade would remove others: {', '.join(METAS)}" in done.notes
    assert all(call[0] != "unhold" for call in apt.changes())


def test_headers_come_with_the_kernel_if_the_driver_needs_them(apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    apt.simulation = "".join(f"{line}\n" for line in apt.simulation.splitlines() if "headers" not in line)
    monkeypatch.setattr(kernels, "build_driver", lambda _: "")
    upgrade.apply(Request(driver=True))
    assert f"linux-headers-{RELEASE}" in apt.there
    assert apt.changes()[1] == ["install", f"linux-image-{RELEASE}=6.1.192-2", f"linux-headers-{RELEASE}=6.1.192-2"]


def test_nothing_is_removed(apt: Apt) -> None:
    apt.removes = "Remv containerd [1.7.24]\n"
    with pytest.raises(MachineProblem, match="would remove containerd"):
        upgrade.apply(Request())
    assert apt.changes() == []


def test_check_mode_changes_nothing(apt: Apt) -> None:
    done = upgrade.apply(Request(), check=True)
    assert apt.changes() == []
    assert done.actions[1] == f"install the kernel {RELEASE}"
    held = upgrade.apply(Request(refused={RELEASE: "x"}), check=True)
    assert held.actions[-1] == f"hold {', '.join(METAS)}"
    assert apt.changes() == []
    assert ledger.load().holds == []
    assert upgrade.prepare(Request(), check=True).actions == ["download 17 packages"] or apt.changes() == []


def test_packages_are_downloaded_once(apt: Apt) -> None:
    done = upgrade.prepare(Request(refused={RELEASE: "x"}))
    assert done.actions
    assert not {*METAS, *NEW} & {*names(apt.changes()[0])}
    assert upgrade.prepare(Request(refused={RELEASE: "x"})).actions == []


def test_a_full_boot_folder_is_refused_before_the_download(
    apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "initrd.img-6.1.0-41-cloud-amd64").touch()
    monkeypatch.setattr(os.path, "getsize", lambda _: 1 << 60)
    with pytest.raises(MachineProblem, match="of free space; wanted: "):
        upgrade.prepare(Request())
    assert apt.changes() == []


def test_an_interrupted_installation_is_finished_first(apt: Apt) -> None:
    apt.interrupted = True
    assert upgrade.apply(Request()).actions[0] == "finish an interrupted package installation"


def test_a_kernel_of_an_interrupted_run_must_have_a_driver_too(apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    apt.simulation = ""
    monkeypatch.setattr(kernels, "newest", lambda _: RELEASE)
    monkeypatch.setattr(kernels, "build_driver", lambda _: "the headers are not installed")
    with pytest.raises(MachineProblem, match=f"the next boot would choose the kernel {RELEASE}"):
        upgrade.apply(Request(driver=True))
    upgrade.apply(Request())


@pytest.mark.parametrize(("rebooted", "fails"), [(True, True), (False, False)])
@pytest.mark.usefixtures("apt")
def test_the_newest_kernel_must_run_after_a_reboot(
    rebooted: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "newest", lambda _: RELEASE)
    monkeypatch.setattr(reboot, "reasons", lambda: ["it is due"])
    if fails:
        with pytest.raises(MachineProblem, match="GRUB_DEFAULT"):
            upgrade.verify(Request(), rebooted=rebooted)
    else:
        assert upgrade.verify(Request(), rebooted=rebooted) == ["it is due"]
