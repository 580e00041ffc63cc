"""What apt would upgrade. The outputs are of apt 2.6.1 on Debian 12 with an older kernel, without most packages."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils.host import gpu_driver
from gpunodes.ansible.module_utils.os_upgrade import kernels, locks, reboot
from gpunodes.ansible.module_utils.os_upgrade.pending import Package, kept_files, parse
from gpunodes.ansible.module_utils.problem import MachineProblem

APT = Path(__file__).parents[1] / "fixtures/apt"
RELEASE = "6.1.0-56-cloud-amd64"
# Of apt 2.4 on Ubuntu 22.04: an update that is in two pockets, one of ESM, and one that is not for security.
UBUNTU = """\
Inst libssl3 [3.0.2-0ubuntu1.10] (3.0.2-0ubuntu1.12 Ubuntu:22.04/jammy-updates, Ubuntu:22.04/jammy-security [amd64])
Inst vim [2:8.2.1] (2:8.2.2 UbuntuESM:22.04/jammy-infra-security [amd64])
Inst tzdata [2023c] (2024a-0ubuntu0.22.04.1 Ubuntu:22.04/jammy-updates [all])
Inst linux-image-5.15.0-91-generic (5.15.0-91.101 Ubuntu:22.04/jammy-security [amd64])
Inst linux-generic [5.15.0.88.85] (5.15.0.91.88 Ubuntu:22.04/jammy-security [amd64])
"""


def output(name: str) -> str:
    return (APT / name).read_text()


def test_a_new_kernel_and_the_packages_that_bring_it() -> None:
    found = parse(output("upgrade-debian12.txt"))
    assert found.kernels() == [RELEASE]
    assert [each.name for each in found.of_kernel(RELEASE)] == [f"linux-headers-{RELEASE}", f"linux-image-{RELEASE}"]
    metas = [each.name for each in found.upgrades if each.is_kernel_meta]
    assert metas == ["linux-headers-cloud-amd64", "linux-image-cloud-amd64"]
    chosen = {each.name: each for each in found.chosen([], security=False)}
    assert {"bash", "linux-base", "linux-libc-dev"} <= set(chosen)
    assert not {*metas, f"linux-image-{RELEASE}"} & set(chosen)
    assert (chosen["bash"].old, chosen["bash"].new) == ("5.2.15-2+b8", "5.2.15-2+b13")


def test_the_parts_of_a_split_kernel_come_with_it() -> None:
    """Of apt 2.6.1 with the packages of trixie-backports; that the older ones are installed is made up."""
    found = parse(output("upgrade-debian13-backports.txt"))
    [release] = found.kernels()
    parts = {f"linux-{part}-{release}" for part in ("base", "binary", "modules", "image", "headers")}
    assert {each.name for each in found.of_kernel(release)} == parts
    # Each needs the others in its own version: one of them alone would bring the kernel.
    metas = {f"linux-{part}-cloud-amd64" for part in ("base", "modules", "image", "headers")}
    assert {each.name for each in found.upgrades if each.is_kernel_meta} == metas
    assert found.chosen([], security=False) == []


def test_debug_symbols_are_no_kernel() -> None:
    names = [f"linux-image-{RELEASE}-dbg", "linux-image-unsigned-6.8.0-45-generic-dbgsym"]
    assert [Package(name, "", "2").kernel for name in names] == ["", ""]
    assert Package("linux-image-amd64-dbg", "1", "2").is_kernel_meta


def test_other_packages_of_linux_bring_no_kernel() -> None:
    names = ("linux-base", "linux-base-sgx", "linux-sysctl-defaults", "linux-libc-dev", f"linux-base-{RELEASE}")
    assert not [name for name in names if Package(name, "1", "2").is_kernel_meta]


def test_only_security_updates() -> None:
    found = parse(output("upgrade-debian12.txt"))
    names = {each.name for each in found.chosen([], security=True)}
    assert "bash" not in names
    assert {"linux-libc-dev", "liblzma5"} <= names
    security = {each.name for each in parse(UBUNTU).upgrades if each.security}
    assert security == {"libssl3", "vim", "linux-generic"}
    assert parse(UBUNTU).kernels() == ["5.15.0-91-generic"]


@pytest.mark.parametrize(
    ("origin", "security"),
    [
        ("Debian-Security:12/oldstable-security", True),
        ("Ubuntu:24.04/noble-security", True),
        ("UbuntuESMApps:22.04/jammy-apps-security", True),
        ("Debian:12.15/oldstable", False),
        ("Ubuntu:24.04/noble-updates", False),
        ("evil-security:1/stable", False),
        ("", False),
    ],
)
def test_origins_of_security_updates(origin: str, security: bool) -> None:
    assert Package("x", "1", "2", (origin,)).security is security


def test_patterns_keep_packages() -> None:
    found = parse(output("upgrade-debian12.txt"))
    assert "bash" not in {each.name for each in found.chosen(["ba*"], security=False)}


def test_held_packages_are_kept_back() -> None:
    found = parse(output("upgrade-debian12-held.txt"))
    assert found.kept_back == ["linux-headers-cloud-amd64", "linux-image-cloud-amd64"]
    assert found.kernels() == []
    assert parse(output("upgrade-debian12.txt")).kept_back == []


@pytest.mark.parametrize(
    "listing", ["", "Inst", "Inst x", "Inst \x1b[2J (", "Inst x [1] (2)\n", "\x00" * 99, "(" * 9999]
)
def test_what_is_no_output_of_apt_is_nothing(listing: str) -> None:
    assert parse(listing).upgrades == []
    assert parse(listing).new == []


def test_configuration_files_that_stayed() -> None:
    # dpkg 1.21.22, apt-get install with --force-confdef --force-confold.
    text = """\
Setting up openssh-server (1:9.2p1-2+deb12u7) ...

Configuration file '/etc/ssh/sshd_config'
 ==> Modified (by you or by a script) since installation.
 ==> Package distributor has shipped an updated version.
 ==> Keeping old config file as default.
Configuration file '/etc/other'
 ==> Using new config file as default.
Installing new version of config file /etc/apt/x ...
"""
    assert kept_files(text) == ["/etc/ssh/sshd_config"]
    assert kept_files("Configuration file '\n" * 1000) == []


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("6.1.0-9-amd64", "6.1.0-56-amd64"),
        ("6.12.48+deb13-amd64", "6.12.107+deb13-amd64"),
        ("5.15.0-91-generic", "6.8.0-45-generic"),
    ],
)
def test_kernels_are_compared_by_their_numbers(older: str, newer: str) -> None:
    assert kernels.numbers(older) < kernels.numbers(newer)
    assert kernels.flavour(older) == kernels.flavour(newer)


def test_the_next_boot_takes_the_newest_kernel_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "BOOT", str(tmp_path / "boot"))
    monkeypatch.setattr(gpu_driver, "MODULES", str(tmp_path / "modules"))
    (tmp_path / "boot").mkdir()
    for release in ("6.1.0-9-amd64", "6.1.0-56-amd64", "6.1.0-60-cloud-amd64", "6.1.0-61-amd64"):
        (tmp_path / f"boot/vmlinuz-{release}").touch()
        (tmp_path / f"modules/{release}").mkdir(parents=True)
        (tmp_path / f"modules/{release}/modules.dep").touch()
        if release != "6.1.0-61-amd64":
            (tmp_path / f"boot/initrd.img-{release}").touch()
    # The newest has no initramfs: it cannot boot.
    assert kernels.newest("6.1.0-9-amd64") == "6.1.0-56-amd64"
    assert kernels.newest("6.1.0-60-cloud-amd64") == "6.1.0-60-cloud-amd64"
    assert kernels.newest("5.10.0-1-other") == "5.10.0-1-other"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reboot, "PROC", str(tmp_path))
    monkeypatch.setattr(reboot, "REQUIRED", str(tmp_path / "reboot-required"))
    monkeypatch.setattr(kernels, "newest", lambda running: running)
    monkeypatch.setattr(gpu_driver, "BOOT", str(tmp_path))
    (tmp_path / "stat").write_text("btime 1000\n")
    return tmp_path


DELETED = "7f00-7f01 r-xp 00000000 fe:01 12 /usr/lib/x86_64-linux-gnu/libssl.so.3 (deleted)\n"


def process(proc: Path, pid: int, cgroup: str, maps: str = DELETED, state: str = "S") -> None:
    (proc / str(pid)).mkdir()
    (proc / f"{pid}/cgroup").write_text(f"0::{cgroup}\n")
    (proc / f"{pid}/maps").write_text(maps)
    (proc / f"{pid}/stat").write_text(f"{pid} (a) b) {state} 1 2\n")


def test_services_with_replaced_libraries_make_a_reboot_due(proc: Path) -> None:
    process(proc, 1, "/init.scope")
    process(proc, 50, "/system.slice/ssh.service")
    process(proc, 51, "/system.slice/other.service", maps=DELETED.replace(" (deleted)", ""))
    process(proc, 52, "/kubepods.slice/kubepods-pod1.slice/cri-containerd-a.scope")
    process(proc, 53, "/user.slice/user-0.slice/session-1.scope")
    process(proc, 54, "/system.slice/hung.service", state="D")
    process(proc, 55, "/system.slice/temp.service", maps="7f r-xp 0 0 0 /tmp/x.so (deleted)\n")
    assert reboot.services() == ["ssh.service", "systemd"]
    assert reboot.reasons() == ["ssh.service, systemd run with libraries that were replaced"]


def test_other_reasons_for_a_reboot(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reboot.reasons() == []
    (proc / "reboot-required").touch()
    (proc / "reboot-required.pkgs").write_text("linux-base\nlibc6\x1b[2J\n")
    assert reboot.reasons() == ["the system requires it for libc6?[2J, linux-base"]
    (proc / "reboot-required").unlink()
    (proc / f"vmlinuz-{platform.release()}").touch()
    assert "was replaced by a newer build" in reboot.reasons()[0]
    monkeypatch.setattr(kernels, "newest", lambda _: "9.9.9-1-amd64")
    assert "the kernel 9.9.9-1-amd64 is installed" in reboot.reasons()[0]


def test_a_lock_is_waited_for_and_its_holder_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(locks, "PATHS", (str(path), str(tmp_path / "none")))
    locks.wait(0)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"

    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(MachineProblem, match=rf"process {other.pid}\b.*has held the package manager's lock"):
            locks.wait(0)
        other.communicate("\n")
    locks.wait(0)
    with path.open("w") as file:
        # A lock of this process itself is none that it would have to wait for.
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert locks.holder(str(path)) == 0


def test_a_holder_has_no_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "PROC", str(tmp_path))
    process(tmp_path, 7, "/system.slice/apt-daily-upgrade.service")
    (tmp_path / "7/comm").write_text("un\x1b[2J\nattended\n")
    text = locks.described(7)
    assert text == "un?[2J attended (process 7 of apt-daily-upgrade.service)"
    assert locks.described(os.getpid() + 10**7).startswith("a process")
