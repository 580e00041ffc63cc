"""What is read of a machine's GPUs: machines made of files, each with one trait."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import gpu_facts, gpu_users
from gpunodes.ansible.module_utils.process import CommandResult

KERNEL = "6.12.48+deb13-amd64"
DEP = f"/lib/modules/{KERNEL}/modules.dep"
EFIVARS = "/sys/firmware/efi/efivars"
SECURE_BOOT = f"{EFIVARS}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"


class Root:
    """A machine of files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file("/proc/sys/kernel/osrelease", KERNEL)
        self.file("/var/lib/dpkg/status", "")

    def file(self, name: str, content: str | bytes) -> None:
        path = self.path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def link(self, name: str, target: str) -> None:
        path = self.path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def pci(
        self, address: str, device: str, class_: str = "0x030200", vendor: str = "0x10de", driver: str = ""
    ) -> None:
        folder = f"/sys/bus/pci/devices/{address}"
        values = {
            "vendor": vendor,
            "device": device,
            "class": class_,
            "subsystem_vendor": "0x10de",
            "subsystem_device": "0x12a2",
        }
        for name, value in values.items():
            self.file(f"{folder}/{name}", value + "\n")
        if driver:
            self.link(f"{folder}/driver", f"../../../bus/pci/drivers/{driver}")

    def packages(self, packages: Mapping[str, str], maintainer: str = "NVIDIA <cudatools@nvidia.com>") -> None:
        self.file(
            "/var/lib/dpkg/status",
            "\n\n".join(
                f"Package: {name}\nStatus: hold ok installed\nMaintainer: {maintainer}\nVersion: {version}\nA: b"
                for name, version in packages.items()
            )
            + "\n\nPackage: nvidia-smi\nStatus: deinstall ok config-files\nMaintainer: m\nVersion: 1\n",
        )

    def read(self) -> dict[str, object]:
        return gpu_facts.read(str(self.path))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def t4(root: Root) -> Root:
    root.pci("0000:3b:00.0", "0x1eb8")
    return root


def test_a_machine_without_gpu_has_nothing_more(root: Root) -> None:
    root.pci("0000:00:02.0", "0x1234", "0x030000", vendor="0x1234")
    assert root.read() == {"functions": [], "nvswitches": 0}


def test_a_machine_without_a_pci_bus(root: Root) -> None:
    assert root.read()["functions"] == []


def test_functions_are_gpus_and_switches_only(root: Root) -> None:
    root.pci("0000:07:00.0", "0x20b2", driver="nvidia")
    root.pci("0000:07:00.1", "0x0fbc", "0x040300")
    root.pci("0000:c5:00.0", "0x1af1", "0x068000")
    found = root.read()
    assert found["functions"] == [
        {
            "address": "0000:07:00.0",
            "vendor": "10de",
            "device": "20b2",
            "subsystem": "10de:12a2",
            "class": "030200",
            "driver": "nvidia",
        },
        {
            "address": "0000:c5:00.0",
            "vendor": "10de",
            "device": "1af1",
            "subsystem": "10de:12a2",
            "class": "068000",
            "driver": None,
        },
    ]
    assert found["nvswitches"] == 1


def test_a_bus_of_another_domain_is_a_bus(root: Root) -> None:
    root.pci("10000:00:00.0", "0x1eb8")
    assert [function["address"] for function in root.read()["functions"]] == ["10000:00:00.0"]  # type: ignore[attr-defined]  # JSON


def test_nouveau(t4: Root) -> None:
    assert t4.read()["nouveau"] == "absent"
    t4.file(DEP, "kernel/drivers/gpu/drm/nouveau/nouveau.ko.xz: x\n")
    assert t4.read()["nouveau"] == "available"
    t4.file("/etc/modprobe.d/gpunodes.conf", "# why\nblacklist nouveau\n")
    assert t4.read()["nouveau"] == "blacklisted"
    t4.file("/sys/module/nouveau/refcnt", "0")
    assert t4.read()["nouveau"] == "loaded"


def test_nouveau_is_blacklisted_on_the_kernels_command_line(t4: Root) -> None:
    t4.file(DEP, "kernel/drivers/gpu/drm/nouveau/nouveau.ko: x\n")
    t4.file("/proc/cmdline", "root=/dev/sda1 modprobe.blacklist=floppy,nouveau quiet")
    assert t4.read()["nouveau"] == "blacklisted"


def test_secure_boot(t4: Root) -> None:
    assert t4.read()["secure_boot"] is False
    t4.file("/sys/firmware/efi/fw_platform_size", "64")
    assert t4.read()["secure_boot"] is None
    t4.file(SECURE_BOOT, b"\x06\0\0\0\x01")
    assert t4.read()["secure_boot"] is True
    t4.file(f"{EFIVARS}/MokSBStateRT-{SHIM}", b"\x06\0\0\0\x01")
    assert t4.read()["secure_boot"] is False


def test_the_owners_key_is_enrolled_when_the_firmwares_list_has_it(t4: Root) -> None:
    assert t4.read()["mok"] == {"key": None, "enrolled": False}
    t4.file("/var/lib/dkms/mok.pub", b"0\x82DER")
    assert t4.read()["mok"] == {"key": "/var/lib/dkms/mok.pub", "enrolled": False}
    t4.file(f"{EFIVARS}/MokListRT-{SHIM}", b"\x06\0\0\0list0\x82DERmore")
    assert t4.read()["mok"] == {"key": "/var/lib/dkms/mok.pub", "enrolled": True}


def test_headers(t4: Root) -> None:
    name = f"linux-headers-{KERNEL}"
    assert t4.read()["headers"] == {"running": False, "package": name}
    t4.link(f"/lib/modules/{KERNEL}/build", f"../../../usr/src/{name}")
    assert t4.read()["headers"] == {"running": False, "package": name}
    t4.file(f"/usr/src/{name}/Makefile", "")
    assert t4.read()["headers"] == {"running": True, "package": None}
    t4.packages({name: "6.12.48-1"})
    assert t4.read()["headers"] == {"running": True, "package": name}


def test_no_driver(t4: Root) -> None:
    found = t4.read()
    assert found["driver"] == {"module": None, "loaded": False, "origin": None, "packages": {}, "flavour": None}
    assert found["clients"] is None


def load(root: Root, version: str, words: str) -> None:
    root.file("/sys/module/nvidia/version", version + "\n")
    root.file("/proc/driver/nvidia/version", f"NVRM version: {words}  {version}  Release Build\n")


def test_a_driver_of_nvidias_repository(t4: Root) -> None:
    load(t4, "580.65.06", "NVIDIA UNIX Open Kernel Module for x86_64")
    t4.packages({"nvidia-open-580": "580.65.06-1", "libcuda1": "580.65.06-1", "nvidia-container-toolkit": "1.20.1-1"})
    found = t4.read()
    assert found["driver"] == {
        "module": "580.65.06",
        "loaded": True,
        "origin": "nvidia-repository",
        "packages": {"libcuda1": "580.65.06-1", "nvidia-open-580": "580.65.06-1"},
        "flavour": "open",
    }
    assert found["toolkit"] == {"nvidia-container-toolkit": "1.20.1-1"}


@pytest.mark.parametrize(
    ("packages", "maintainer", "origin", "flavour"),
    [
        (
            {"nvidia-kernel-dkms": "550.163.01-2"},
            "Debian NVIDIA Maintainers <x@lists.debian.net>",
            "distribution",
            "proprietary",
        ),
        ({"nvidia-open-kernel-dkms": "550.163.01-2"}, "somebody", "distribution", "open"),
        ({"nvidia-headless-580-server-open": "580.82"}, "Ubuntu Core Developers", "distribution", "open"),
        ({"nvidia-dkms-570": "570.1"}, "NVIDIA <cudatools@nvidia.com>", "nvidia-repository", "proprietary"),
        ({"cuda-drivers-580": "580.1"}, "somebody", "nvidia-repository", None),
        ({"nvidia-dkms-570": "570.1"}, "somebody", "unknown", "proprietary"),
    ],
)
def test_packages_tell_where_a_driver_is_from(
    t4: Root, packages: Mapping[str, str], maintainer: str, origin: str, flavour: str | None
) -> None:
    t4.packages(packages, maintainer)
    driver = t4.read()["driver"]
    assert isinstance(driver, dict)
    assert (driver["origin"], driver["flavour"]) == (origin, flavour)


def test_a_runfile_leaves_its_uninstaller(t4: Root) -> None:
    load(t4, "535.161.08", "NVIDIA UNIX x86_64 Kernel Module")
    t4.file("/usr/bin/nvidia-uninstall", "")
    driver = t4.read()["driver"]
    assert isinstance(driver, dict)
    assert (driver["origin"], driver["flavour"]) == ("runfile", "proprietary")


def test_a_module_that_no_package_brought(t4: Root) -> None:
    load(t4, "535.161.08", "NVIDIA UNIX x86_64 Kernel Module")
    driver = t4.read()["driver"]
    assert isinstance(driver, dict)
    assert driver["origin"] == "unknown"


def test_cuda_toolkits_and_who_brought_them(t4: Root) -> None:
    t4.packages({"cuda-toolkit-13-0": "13.0.1-1", "nvidia-cuda-toolkit": "12.4.131~12.4.1-2"})
    for folder in ("cuda-13.0", "cuda-11.8"):
        t4.file(f"/usr/local/{folder}/bin/nvcc", "")
    assert t4.read()["cuda"] == {"11.8": "runfile", "12.4": "distribution", "13.0": "nvidia-repository"}


def test_runtimes(t4: Root) -> None:
    t4.packages({"containerd.io": "1.7.28-1", "docker-ce": "5:28.1.0-1"})
    assert t4.read()["runtimes"] == {"containerd.io": "1.7.28-1", "docker-ce": "5:28.1.0-1"}


def test_clients_are_processes_with_a_gpu_open(t4: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_users, "_major", lambda _: 195)
    t4.file("/proc/devices", "Character devices:\n195 nvidia\n")
    load(t4, "580.65.06", "NVIDIA UNIX Open Kernel Module for x86_64")
    for pid, (name, device) in enumerate(
        [
            ("python3", "/dev/nvidia0"),
            ("train", "/dev/nvidia-uvm"),
            ("nvidia-persistenced", "/dev/nvidia0"),
            ("dcgm", "/dev/nvidiactl"),
            ("bash", "/dev/pts/0"),
        ],
        100,
    ):
        t4.file(f"/proc/{pid}/comm", name[:15] + "\n")
        t4.link(f"/proc/{pid}/fd/3", device)
    assert t4.read()["clients"] == 2


def test_a_gpu_that_left_its_driver_behind_is_looked_at(root: Root) -> None:
    load(root, "580.65.06", "NVIDIA UNIX Open Kernel Module for x86_64")
    assert root.read()["functions"] == []
    assert "driver" in root.read()


def test_rpm() -> None:
    listing = "kmod-nvidia-open-dkms\t580.65.06-1.el9\tNVIDIA Corporation\nbash\t5\tRocky\n"
    found = gpu_facts.parse_rpm(listing)
    assert found == {"kmod-nvidia-open-dkms": gpu_facts.InstalledPackage("580.65.06-1.el9", "NVIDIA Corporation")}


@pytest.mark.parametrize(
    ("listed", "shown", "available"),
    [(True, True, True), (True, False, False), (False, False, True)],
)
def test_headers_are_missing_only_if_all_lists_of_apt_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, listed: bool, shown: bool, available: bool
) -> None:
    """gpunodes reads the lists of its own sources first: the distribution's may never have been read."""
    (tmp_path / "own_InRelease").touch()
    if listed:
        # Of a source without an InRelease file.
        (tmp_path / "debian_dists_trixie_Release").touch()
    uris = "'http://own/InRelease' own_InRelease 0 \n'http://debian/InRelease' debian_dists_trixie_InRelease 0 \n"

    def run(argv: list[str], limit_s: float) -> CommandResult:
        assert limit_s
        if argv == ["apt-get", "update", "--print-uris"]:
            return CommandResult(argv, 0, uris, "")
        return CommandResult(argv, 0 if shown else 100, "", "")

    monkeypatch.setattr(gpu_facts, "_APT_LISTS", str(tmp_path))
    monkeypatch.setattr(gpu_facts, "run", run)
    assert gpu_facts._is_available("/", "linux-headers-6.1.0-1-amd64") is available
