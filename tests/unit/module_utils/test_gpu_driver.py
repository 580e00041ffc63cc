"""A driver brought into a kernel, its devices shown, its builds' errors read. No program is started."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import escalate, gpu_facts, gpu_users, ledger
from gpunodes.ansible.module_utils.driver_upgrade import users
from gpunodes.ansible.module_utils.host import gpu_driver
from gpunodes.ansible.module_utils.host.changes import Changes
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Driver, Spec
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

DRIVER = Driver(("nvidia", "nvidia-uvm"), "nouveau")
GCC = """\
make -C /lib/modules/6.12.1/build M=/var/lib/dkms/nvidia/580.65.06/build
  CC [M]  /var/lib/dkms/nvidia/580.65.06/build/nvidia.o
In file included from /var/lib/dkms/nvidia/580.65.06/build/nvidia.c:3:
/var/lib/dkms/nvidia/580.65.06/build/nv.h:12:5: warning: unused variable 'x' [-Wunused-variable]
/var/lib/dkms/nvidia/580.65.06/build/nvidia/nv-mm.c:412:9: error: implicit declaration of function 'vm_flags_set'
/var/lib/dkms/nvidia/580.65.06/build/nvidia/nv-mm.c:413:9: error: second
make[3]: *** [scripts/Makefile.build:229: /var/lib/dkms/nvidia/580.65.06/build/nvidia.o] Error 1
make[1]: *** [Makefile:1936: /var/lib/dkms/nvidia/580.65.06/build] Error 2
"""


@dataclass
class Machine:
    """A machine's /sys, /dev and /lib/modules in a folder, and the programs that change them."""

    root: Path
    calls: list[list[str]] = field(default_factory=list)
    installed: str = "580.65.06"
    stuck: bool = False
    refusal: str = ""
    initramfs: str = "usr/lib/modules/6.12.1/kernel/drivers/net/virtio_net.ko\n"

    def load(self, name: str, version: str = "") -> None:
        folder = self.root / "sys/module" / name.replace("-", "_")
        folder.mkdir(parents=True)
        if version:
            (folder / "version").write_text(version + "\n")

    def run(self, argv: Sequence[str], *_: object) -> CommandResult:
        self.calls.append(list(argv))
        words = list(argv)
        if words[0] == "modinfo":
            return (
                CommandResult(argv, 0, self.installed + "\n", "")
                if self.installed
                else CommandResult(argv, 1, "", "not found")
            )
        if words[:2] == ["modprobe", "--remove"]:
            if not self.stuck:
                (self.root / "sys/module" / words[2]).rmdir()
                return CommandResult(argv, 0, "", "")
            return CommandResult(argv, 1, "", f"modprobe: FATAL: Module {words[2]} is in use.")
        if words[0] == "modprobe":
            if self.refusal:
                return CommandResult(argv, 1, "", self.refusal)
            self.load(words[1], self.installed)
        if words[0] == "dkms":
            self.installed = "580.65.06" if self.installed != "never" else ""
        outputs = {"lsinitramfs": self.initramfs, "lsinitrd": self.initramfs}
        return CommandResult(argv, 0, outputs.get(words[0], ""), "")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    for name, folder in {"SYS": "sys", "DEV": "dev", "DKMS": "dkms", "MODULES": "modules", "BOOT": "boot"}.items():
        monkeypatch.setattr(gpu_driver, name, str(tmp_path / folder))
        (tmp_path / folder).mkdir()
    (tmp_path / "sys/module").mkdir()
    monkeypatch.setattr(gpu_driver, "CDI", str(tmp_path / "cdi/nvidia.yaml"))
    monkeypatch.setattr(gpu_driver, "run", made.run)
    monkeypatch.setattr(platform, "release", lambda: "6.12.1")
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    return made


def changes(check: bool = False) -> Changes:
    return Changes(Spec(section="gpu"), check)


@pytest.mark.usefixtures("machine")
def test_the_modules_are_loaded_once_and_noted() -> None:
    first = changes()
    gpu_driver.note_modules(first, DRIVER)
    gpu_driver.load_driver(first, DRIVER)
    assert first.actions == ["load kernel modules nvidia, nvidia-uvm"]
    first.save()
    assert ledger.load(ledger.path_of("gpu")).modules == ["nvidia", "nvidia-uvm"]
    assert not Path(ledger.PATH).exists()
    second = changes()
    gpu_driver.load_driver(second, DRIVER)
    assert second.actions == []


def test_modules_that_only_a_boot_loads_are_noted(machine: Machine) -> None:
    """As where the kernel's own driver does not release the GPUs, or the power failed after the installation."""
    machine.load("nouveau")
    machine.stuck = True
    first = converge(Spec(section="gpu", driver=DRIVER))
    assert first.reboot
    first.save()
    (machine.root / "sys/module/nouveau").rmdir()
    for name in DRIVER.modules:
        machine.load(name)
    second = converge(Spec(section="gpu", driver=DRIVER))
    second.save()
    assert second.actions == []
    assert ledger.load(ledger.path_of("gpu")).modules == ["nvidia", "nvidia-uvm"]


@pytest.mark.usefixtures("machine")
def test_a_driver_that_was_loaded_before_gpunodes_is_not_noted(machine: Machine) -> None:
    machine.load("nvidia", machine.installed)
    machine.load("nvidia-uvm")
    run = converge(Spec(section="gpu", driver=DRIVER))
    assert run.ledger.modules == []


def test_check_mode_loads_nothing(machine: Machine) -> None:
    machine.load("nouveau")
    look = changes(check=True)
    gpu_driver.load_driver(look, DRIVER)
    assert look.actions == ["unload nouveau", "load kernel modules nvidia, nvidia-uvm"]
    assert "modprobe" not in str(machine.calls)


def test_a_rival_that_does_not_let_go_takes_a_reboot(machine: Machine) -> None:
    machine.load("nouveau")
    machine.stuck = True
    run = changes()
    gpu_driver.load_driver(run, DRIVER)
    assert "Module nouveau is in use" in run.reboot
    assert ["modprobe", "nvidia"] not in machine.calls
    assert run.ledger.unloaded == ["nouveau"]


def test_a_rival_that_lets_go_takes_none(machine: Machine) -> None:
    machine.load("nouveau")
    run = changes()
    gpu_driver.load_driver(run, DRIVER)
    assert run.reboot == ""
    assert ["modprobe", "nvidia"] in machine.calls


@pytest.mark.parametrize(("inside", "noted"), [("drivers/gpu/drm/nouveau/nouveau.ko.xz\n", "rebuilt"), ("", "seen")])
def test_the_initramfs_is_rebuilt_only_where_the_rival_is_in_it(machine: Machine, inside: str, noted: str) -> None:
    (machine.root / "boot/initrd.img-6.12.1").write_text("")
    machine.initramfs = inside
    run = changes()
    gpu_driver.load_driver(run, DRIVER)
    assert run.ledger.initramfs == noted
    assert any(call[0] in {"update-initramfs", "dracut"} for call in machine.calls) == (noted == "rebuilt")


def test_a_loaded_driver_is_not_replaced_under_its_users(machine: Machine) -> None:
    machine.load("nvidia", "580.65.06")
    machine.load("nvidia-uvm")
    machine.installed = "590.44.01"
    run = changes()
    gpu_driver.load_driver(run, DRIVER)
    assert run.reboot == "the driver 580.65.06 is loaded, and 590.44.01 is installed"
    assert run.actions == []


def test_a_module_that_was_not_built_is_built(machine: Machine) -> None:
    machine.installed = ""
    (machine.root / "modules/6.12.1/build").mkdir(parents=True)
    (machine.root / "modules/6.12.1/build/Makefile").write_text("")
    gpu_driver.load_driver(changes(), DRIVER)
    assert ["dkms", "autoinstall", "-k", "6.12.1"] in machine.calls


def test_without_headers_nothing_is_built(machine: Machine) -> None:
    machine.installed = ""
    with pytest.raises(MachineProblem, match=r"headers of the running kernel 6\.12\.1"):
        gpu_driver.load_driver(changes(), DRIVER)


def test_a_failed_build_shows_the_compilers_first_error(machine: Machine) -> None:
    machine.installed = "never"
    log = machine.root / "dkms/nvidia/580.65.06/build/make.log"
    log.parent.mkdir(parents=True)
    log.write_text(GCC)
    problem = gpu_driver.build_problem("nvidia", "6.12.1")
    assert problem
    assert "nvidia/nv-mm.c:412:9: error: implicit declaration of function 'vm_flags_set'" in problem.problem.found
    assert str(log) in problem.problem.remedy
    assert gpu_driver.build_problem("nvidia", "6.12.1", since=log.stat().st_mtime + 1) is None


def test_secure_boot_is_named(machine: Machine) -> None:
    machine.refusal = "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service"
    with pytest.raises(MachineProblem, match="Secure Boot is on"):
        gpu_driver.load_driver(changes(), DRIVER)


# dmesg --notime. github.com/negativo17/nvidia-driver/issues/158, after an attempt of another driver
# (github.com/NVIDIA/open-gpu-kernel-modules/issues/393); the second from a public report, with the end of it.
REFUSALS = {
    "the proprietary modules": (
        """\
nvidia-nvlink: Nvlink Core is being initialized, major device number 508
NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:25a0)
NVRM: installed in this system is not supported by the
NVRM: NVIDIA 520.56.06 driver release.
NVRM: Please see 'Appendix A - Supported NVIDIA GPU Products'
NVRM: in this release's README, available on the operating system
NVRM: specific graphics driver download page at www.nvidia.com.
nvidia: probe of 0000:01:00.0 failed with error -1
NVRM: None of the NVIDIA devices were initialized.
nvidia-nvlink: Unregistered Nvlink Core, major device number 508
nvidia-nvlink: Nvlink Core is being initialized, major device number 508
NVRM: The NVIDIA GPU 0000:09:00.0 (PCI ID: 10de:1d01)
             NVRM: installed in this system is not supported by open
             NVRM: nvidia.ko because it does not include the required GPU
             NVRM: System Processor (GSP).
             NVRM: Please see the 'Open Linux Kernel Modules' and 'GSP
nvidia 0000:09:00.0: probe with driver nvidia failed with error -1
NVRM: The NVIDIA probe routine failed for 1 device(s).
NVRM: None of the NVIDIA devices were initialized.
nvidia-nvlink: Unregistered Nvlink Core, major device number 508
""",
        "(The NVIDIA GPU 0000:09:00.0 (PCI ID: 10de:1d01) installed in this system is not supported by open nvidia.ko ",
        "install the driver with the proprietary kernel modules",
    ),
    "the open modules": (
        """\
NVRM: The NVIDIA GPU 0000:02:00.0 (PCI ID: 10de:2c31)
NVRM: installed in this system requires use of the NVIDIA open kernel modules.
NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x22:0x56:1017)
NVRM: The NVIDIA probe routine failed for 1 device(s).
NVRM: None of the NVIDIA devices were initialized.
""",
        "installed in this system requires use of the NVIDIA open kernel modules.)",
        "install the driver with the open kernel modules",
    ),
}


def kernel_wrote(machine: Machine, *messages: str) -> None:
    """/dev/kmsg with messages of the kernel; a line feed in one is escaped there."""
    records = [f"4,{number},{number},-;{text}\n" for number, text in enumerate(messages)]
    (machine.root / "dev/kmsg").write_text("".join(records))


def test_a_program_that_crashes_is_not_the_driver_s_reason(machine: Machine) -> None:
    """The kernel writes the name of its file; user space writes with another facility."""
    kernel_wrote(
        machine,
        r"NVRM: GPU 0000:02:00.0: RmInitAdapter failed!\x0aNVRM: (0x22:0x56:1017)",
        r"x[7]: segfault at 0 ip 0 sp 0 error 4 in \x0aNVRM: This is not supported by open\x0a[400000+1000]",
        r"x[8]: segfault at 0 ip 0 sp 0 error 4 in Nvlink Core is being initialized[400000+1000]",
    )
    with (machine.root / "dev/kmsg").open("a") as file:
        file.write("12,9,9,-;NVRM: written by a program\n")
    assert gpu_driver.messages(gpu_driver._kernel_log()) == "GPU 0000:02:00.0: RmInitAdapter failed! (0x22:0x56:1017)"


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_module_shows_the_driver_s_own_reason(machine: Machine, case: str) -> None:
    log, found, remedy = REFUSALS[case]
    kernel_wrote(machine, *log.splitlines())
    machine.refusal = "modprobe: ERROR: could not insert 'nvidia': No such device"
    with pytest.raises(MachineProblem) as raised:
        gpu_driver.load_driver(changes(), DRIVER)
    assert "the module nvidia does not load: modprobe: ERROR" in raised.value.problem.found
    assert found in raised.value.problem.found
    assert raised.value.problem.remedy.startswith(remedy)
    # A module that was loaded may still have no GPU.
    with pytest.raises(MachineProblem) as raised:
        gpu_driver.publish_devices(changes())
    assert found in raised.value.problem.found
    assert raised.value.problem.remedy.startswith(remedy)


def test_a_module_that_does_not_load_without_messages_of_its_own(machine: Machine) -> None:
    machine.refusal = "modprobe: FATAL: Module nvidia not found"
    with pytest.raises(MachineProblem, match=r"does not load: modprobe: FATAL: Module nvidia not found; wanted"):
        gpu_driver.load_driver(changes(), DRIVER)


@pytest.mark.usefixtures("machine")
def test_a_specification_of_other_devices_is_written_anew() -> None:
    specification = "path: /dev/nvidia0\n hostPath: /usr/lib/libcuda.so.580.65.06\n"
    assert gpu_driver.matches_devices(specification, ["/dev/nvidia0"], "580.65.06")
    assert not gpu_driver.matches_devices(specification, ["/dev/nvidia0", "/dev/nvidia1"], "580.65.06")
    assert not gpu_driver.matches_devices(specification, ["/dev/nvidia0"], "590.44.01")
    with pytest.raises(MachineProblem, match="nvidia0"):
        gpu_driver.publish_devices(changes())


def with_devices(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc whose links to /dev/nvidia0 and others lead to devices of the driver; a user cannot make devices."""
    proc.mkdir()
    (proc / "devices").write_text("Character devices:\n195 nvidia\n")
    monkeypatch.setattr(gpu_users, "_major", lambda _: 195)


def test_users_of_a_gpu_are_named_and_its_own_services_are_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_driver, "PROC", str(machine.root / "proc"))
    with_devices(machine.root / "proc", monkeypatch)
    groups = {"7": "nvidia-persistenced.service", "8": "kubepods.slice/pod1", "9": "user.slice"}
    for number, group in groups.items():
        folder = machine.root / "proc" / number
        (folder / "fd").mkdir(parents=True)
        (folder / "fd/3").symlink_to("/dev/null" if number == "9" else "/dev/nvidia0")
        (folder / "comm").write_text("python3\n")
        (folder / "cgroup").write_text(f"0::/system.slice/{group}\n")
    assert gpu_driver.holders(["nvidia-persistenced"]) == ["python3 (8)"]
    assert sorted(gpu_driver.holders([])) == ["python3 (7)", "python3 (8)"]


@pytest.mark.usefixtures("machine")
def test_a_process_that_closes_files_meanwhile_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader does so all the time. Its device may have been deleted since, too."""
    with_devices(tmp_path / "proc", monkeypatch)
    folder = tmp_path / "proc/8"
    (folder / "fd").mkdir(parents=True)
    for number, link in enumerate(("/dev/null", "/dev/nvidia0 (deleted)", "/dev/null")):
        (folder / f"fd/{number}").symlink_to(link)
    (folder / "comm").write_text("python3\n")
    (folder / "cgroup").write_text("0::/user.slice\n")
    readlink = os.readlink

    def closed(path: str) -> str:
        if path.endswith(("/0", "/2")):
            raise FileNotFoundError(errno.ENOENT, "", path)
        return readlink(path)

    monkeypatch.setattr(gpu_driver, "PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(os, "readlink", closed)
    assert gpu_driver.holders([]) == ["python3 (8)"]
    assert [each.name for each in users.find()] == ["python3"]
    assert gpu_facts._clients(str(tmp_path)) == 1
    find = gpu_users.find
    monkeypatch.setattr(gpu_users, "find", lambda names: find(names, str(tmp_path / "proc")))
    assert escalate.holders([]) == ["python3 (8)"]


def test_debian_calls_its_module_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/lib/modules/6.12/updates/dkms/nvidia-current.ko.xz"
    monkeypatch.setattr("gpunodes.ansible.module_utils.gpu_facts.module_file", lambda _: path)
    monkeypatch.setattr(
        gpu_driver, "run", lambda argv, *_: CommandResult(argv, 0, "550.163.01\n" if argv[-1] == path else "", "")
    )
    assert gpu_driver._version("nvidia", "6.12") == "550.163.01"
