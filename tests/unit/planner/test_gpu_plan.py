"""The planner's plans for machines with GPUs: one named case for each card and each pitfall."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner.gpu import Flavour, Group, Plan, RequestedSoftware, Source, gpus_of, plan

NOVEMBER_2026 = 1_795_000_000.0
KERNELS = {
    "debian": "6.12.48+deb13-amd64",
    "ubuntu": "6.8.0-45-generic",
    "rhel": "5.14.0-503.11.1.el9_5.x86_64",
}
CARDS = {
    "K10": "118f",
    "GTX 650": "0fc6",
    "K80": "102d",
    "M60": "13f2",
    "P100": "15f8",
    "V100": "1db6",
    "T4": "1eb8",
    "A100": "20b2",
    "L4": "27b8",
    "RTX 4090": "2684",
    "H100": "2330",
    "GH200": "2342",
    "B200": "2901",
    "RTX PRO 6000": "2bb5",
    "B300": "3182",
    "GB300": "31c2",
    "unknown": "3500",
}
DRIVER: dict[str, Any] = {"module": None, "loaded": False, "origin": None, "packages": {}, "flavour": None}


def function(device: str, number: int, **changes: Any) -> dict[str, Any]:
    """A GPU as gpu_facts reports it."""
    found = {
        "address": f"0000:{number:02x}:00.0",
        "vendor": "10de",
        "device": device,
        "subsystem": "10de:1234",
        "class": "030200",
        "driver": None,
    }
    return {**found, **changes}


def installed(version: str, origin: str, flavour: str = "open", *, loaded: bool = True) -> dict[str, Any]:
    return {"module": version, "loaded": loaded, "origin": origin, "packages": {}, "flavour": flavour}


def machine(*cards: str, system: str = "debian 13", arch: str = "x86_64", **gpu: Any) -> dict[str, Any]:
    """The facts of a machine with these cards and no driver; ``gpu`` changes its GPU facts."""
    id_, version = system.split()
    kernel = KERNELS[id_]
    found = {
        "functions": [function(CARDS[card], number) for number, card in enumerate(cards, 1)],
        "nvswitches": 0,
        "nouveau": "available",
        "secure_boot": False,
        "mok": {"key": None, "enrolled": False},
        "headers": {"running": False, "package": f"linux-headers-{kernel}"},
        "driver": DRIVER,
        "cuda": {},
        "toolkit": {},
        "runtimes": {},
        "clients": None,
    }
    return {
        "os": {"id": id_, "version": version},
        "arch": arch,
        "kernel": kernel,
        "time": NOVEMBER_2026,
        "packages": {},
        "kubernetes": {"role": None},
        "gpu": {**found, **gpu},
    }


def planned(facts: dict[str, Any], **requested: Any) -> Plan:
    result = plan("gpu-1", facts, RequestedSoftware(**{"kubernetes_version": "1.36", **requested}))
    assert isinstance(result, Plan), result
    return result


def refused(facts: dict[str, Any], **requested: Any) -> tuple[Problem, ...]:
    result = plan("gpu-1", facts, RequestedSoftware(**{"kubernetes_version": "1.36", **requested}))
    assert not isinstance(result, Plan), result
    assert all(conflict.found and conflict.wanted and conflict.remedy for conflict in result)
    return result


def names(made: Plan, group: Group) -> list[str]:
    return [package.name for package in made.group(group)]


@pytest.mark.parametrize(
    ("card", "system", "generation", "flavour", "branch", "source"),
    [
        ("K80", "debian 12", "kepler", Flavour.PROPRIETARY, "470", Source.DISTRIBUTION),
        ("K80", "ubuntu 24.04", "kepler", Flavour.PROPRIETARY, "470", Source.DISTRIBUTION),
        ("K10", "debian 12", "kepler-sm30", Flavour.PROPRIETARY, "470", Source.DISTRIBUTION),
        ("GTX 650", "debian 12", "kepler-sm30", Flavour.PROPRIETARY, "470", Source.DISTRIBUTION),
        ("B300", "ubuntu 24.04", "blackwell-ultra", Flavour.OPEN, "580", Source.NVIDIA),
        ("M60", "debian 13", "maxwell", Flavour.PROPRIETARY, "580", Source.NVIDIA),
        ("P100", "debian 13", "pascal", Flavour.PROPRIETARY, "580", Source.NVIDIA),
        ("V100", "rhel 9", "volta", Flavour.PROPRIETARY, "580", Source.NVIDIA),
        ("T4", "debian 13", "turing", Flavour.OPEN, "580", Source.NVIDIA),
        ("A100", "ubuntu 22.04", "ampere", Flavour.OPEN, "580", Source.NVIDIA),
        ("RTX 4090", "debian 13", "ada", Flavour.OPEN, "580", Source.NVIDIA),
        ("H100", "ubuntu 24.04", "hopper", Flavour.OPEN, "580", Source.NVIDIA),
        ("B200", "ubuntu 24.04", "blackwell", Flavour.OPEN, "580", Source.NVIDIA),
        ("RTX PRO 6000", "debian 13", "blackwell", Flavour.OPEN, "580", Source.NVIDIA),
        ("unknown", "debian 13", "newer", Flavour.OPEN, "595", Source.NVIDIA),
    ],
)
def test_each_card_gets_its_driver(
    card: str, system: str, generation: str, flavour: Flavour, branch: str, source: Source
) -> None:
    made = planned(machine(card, system=system))
    assert (made.generations, made.flavour, made.branch, made.source) == ((generation,), flavour, branch, source)
    assert made.persistence
    assert made.blacklist_nouveau
    assert names(made, Group.TOOLKIT)[0] == "nvidia-container-toolkit"
    assert made.labels["gpunodes.dev/gpu-count"] == "1"


def test_a_k80_has_no_driver_on_debian_13() -> None:
    found = refused(machine("K80"))
    assert "Kepler" in found[0].found
    assert "Debian 12" in found[0].remedy


@pytest.mark.parametrize("card", ["K10", "GTX 650"])
def test_kepler_of_sm_30_ends_at_cuda_10_2(card: str) -> None:
    (conflict, *_) = refused(machine(card, system="debian 12"), cuda=("11.8",))
    assert "CUDA 11.8 does not support Kepler sm_30 GPUs" in conflict.found
    assert "CUDA 10.2, the last version" in conflict.wanted
    assert not any("CUDA 11.8 does not" in each.found for each in refused(machine("K80"), cuda=("11.8",)))


@pytest.mark.parametrize("card", ["B300", "GB300"])
def test_a_b300_needs_a_branch_of_cuda_12_9(card: str) -> None:
    arch = "aarch64" if card == "GB300" else "x86_64"
    (conflict, *_) = refused(machine(card, system="ubuntu 24.04", arch=arch), driver="570")
    assert ("Blackwell Ultra" in conflict.found, "575, the first branch" in conflict.wanted) == (True, True)
    assert planned(machine("B200", system="ubuntu 24.04"), driver="570").branch == "570"


def test_a_cuda_newer_than_13_2() -> None:
    made = planned(machine("H100", system="ubuntu 24.04"), cuda=("13.4",))
    assert (made.branch, names(made, Group.CUDA)) == ("580", ["cuda-toolkit-13-4"])


def test_an_unknown_newer_gpu_is_a_warning_and_not_refused() -> None:
    """It says which driver the GPU gets, also when that is not the newest one."""
    for requested, branch in ({}, "595"), ({"driver": "580"}, "580"), ({"driver": "610"}, "610"):
        (warning,) = [text for text in planned(machine("unknown"), **requested).warnings if "PCI device" in text]
        assert f"newer than gpunodes' table of GPUs: it gets driver {branch} with open modules, untested" in warning
        assert ("the newest in the table is 610" in warning) == (branch != "610")


def test_a_machine_without_gpu_is_a_cpu_node() -> None:
    made = planned(machine(), driver="580", cuda=("13.0",))
    assert made.packages == ()
    assert made.gates == {}
    assert made.branch == ""
    assert [text in " ".join(made.warnings) for text in ("driver 580", "CUDA 13.0")] == [True, True]


def test_facts_of_an_older_reader_have_no_gpu() -> None:
    facts = machine("T4")
    del facts["gpu"]
    assert planned(facts).packages == ()


@pytest.mark.parametrize(
    ("system", "branch", "driver", "fabric"),
    [
        ("debian 13", "580", ["nvidia-driver-pinning-580", "nvidia-open-580"], "nvidia-fabricmanager"),
        ("debian 13", "595", ["nvidia-driver-pinning-595", "nvidia-open"], "nvidia-fabricmanager"),
        ("ubuntu 24.04", "570", ["nvidia-open-570"], "nvidia-fabricmanager-570"),
        ("rhel 9", "580", ["nvidia-open"], "nvidia-fabric-manager"),
    ],
)
def test_names_change_at_590_and_with_the_system(system: str, branch: str, driver: list[str], fabric: str) -> None:
    made = planned(machine("A100", system=system, nvswitches=6), driver=branch, source="nvidia")
    assert names(made, Group.DRIVER) == driver
    assert made.fabric_manager
    (package,) = made.group(Group.FABRIC_MANAGER)
    assert (package.name, package.same_version_as) == (fabric, driver[-1])
    assert made.module_stream == ("nvidia-driver:580-open" if system == "rhel 9" else "")


def test_a_b200_needs_the_subnet_manager_though_no_switch_is_on_the_bus() -> None:
    assert names(planned(machine("B200")), Group.FABRIC_MANAGER) == ["nvidia-fabricmanager", "nvlsm"]


def test_an_a100_without_switches_needs_no_fabric_manager() -> None:
    assert not planned(machine("A100")).fabric_manager


def test_two_generations_share_a_branch_and_the_older_modules() -> None:
    made = planned(machine("P100", "T4"))
    assert (made.flavour, made.branch) == (Flavour.PROPRIETARY, "580")


def test_two_generations_that_share_nothing_are_refused() -> None:
    found = refused(machine("V100", "B200"))
    assert "need the open modules" in found[0].found
    found = refused(machine("K80", "H100", system="ubuntu 24.04"))
    assert "Kepler" in found[0].found


def test_a_driver_too_old_for_cuda_is_refused_together_with_all_other_conflicts() -> None:
    found = refused(machine("P100"), driver="570", cuda=("13.0",), cudnn="9.11", gates={"Accelerators": True})
    facts = " | ".join(conflict.found for conflict in found)
    for message in (
        "driver 570 is too old for CUDA 13.0",
        "CUDA 13.0 does not support Pascal",
        "cuDNN 9.11",
        "Accelerators",
    ):
        assert message in facts


def test_cudnn_for_old_cards_is_the_last_that_supports_them() -> None:
    (package,) = planned(machine("P100"), cudnn="9").group(Group.CUDNN)
    assert (package.name, package.version) == ("cudnn9-cuda-12", "9.10.*")
    (package,) = planned(machine("T4"), cudnn="9", cuda=("13.0",)).group(Group.CUDNN)
    assert (package.name, package.version) == ("cudnn9-cuda-13", "9.*")


def test_several_cuda_versions_are_installed_side_by_side() -> None:
    made = planned(machine("T4", system="ubuntu 24.04"), cuda=("12.8", "13.0"))
    assert names(made, Group.CUDA) == ["cuda-toolkit-12-8", "cuda-toolkit-13-0"]


def test_secure_boot_accepts_only_signed_modules() -> None:
    assert "Secure Boot" in refused(machine("T4", secure_boot=True))[0].found
    made = planned(machine("T4", secure_boot=True, mok={"key": "/var/lib/dkms/mok.pub", "enrolled": True}))
    assert made.source is Source.NVIDIA
    made = planned(machine("T4", system="ubuntu 24.04", secure_boot=True))
    assert names(made, Group.DRIVER)[0] == "linux-modules-nvidia-580-server-open-generic"
    assert names(made, Group.HEADERS) == []


def test_missing_headers_of_the_running_kernel_are_refused() -> None:
    found = refused(machine("T4", headers={"running": False, "package": None}))
    assert "headers" in found[0].found


@pytest.mark.parametrize(
    ("system", "kernel", "flavour"),
    [
        ("debian 12", "6.1.0-50-amd64", Flavour.OPEN),
        ("debian 12", "6.1.0-56-amd64", Flavour.PROPRIETARY),
        ("debian 13", "6.12.96+deb13-amd64", Flavour.OPEN),
        ("debian 13", "6.12.107+deb13-cloud-amd64", Flavour.PROPRIETARY),
    ],
)
def test_modules_that_do_not_build_for_the_kernel_are_not_chosen(system: str, kernel: str, flavour: Flavour) -> None:
    made = planned({**machine("H100", system=system), "kernel": kernel}, source="distribution")
    assert made.flavour is flavour
    reasons = [reason for reason in made.reasons if reason.choice == "no open kernel modules"]
    assert bool(reasons) == (flavour is Flavour.PROPRIETARY)
    assert all(kernel in reason.why and reason.source for reason in reasons)
    assert planned({**machine("H100", system=system), "kernel": kernel}).source is Source.NVIDIA


def test_modules_that_do_not_build_for_the_kernel_are_reported() -> None:
    facts = {**machine("H100"), "kernel": "7.3.4+deb13-amd64"}
    (conflict,) = refused(facts, source="distribution")
    assert "550 from the distribution do not build for the kernel 7.3.4+deb13-amd64" in conflict.found
    assert "before 6.19" in conflict.wanted
    assert "boot an older kernel" in conflict.remedy
    facts["gpu"]["driver"] = installed("550.163.01", "distribution")
    assert planned(facts, source="distribution").branch == "550"  # it was built already, perhaps with a patch


def test_a_driver_from_a_runfile_is_refused() -> None:
    found = refused(machine("T4", driver=installed("535.161.08", "runfile", "proprietary")))
    assert ".run" in found[0].found
    assert "nvidia-uninstall" in found[0].remedy


def test_a_real_h200() -> None:
    """The facts of one in a virtual machine with Ubuntu 24.04, without the driver that its provider had put there."""
    gpu: dict[str, Any] = {
        "functions": [
            {
                "address": "0000:00:06.0",
                "vendor": "10de",
                "device": "2335",
                "subsystem": "10de:18bf",
                "class": "030200",
                "driver": "nvidia",
            }
        ],
        "nouveau": "absent",
        "cuda": {"13.0": "nvidia-repository"},
        "cudnn": {f"libcudnn9{part}-cuda-13": "9.14.0.64-1" for part in ("", "-dev", "-headers")},
        "clients": 0,
    }
    facts = machine(system="ubuntu 24.04", **gpu)
    made = planned(facts, cuda=("13.0",))
    assert (made.generations, made.flavour, made.branch) == (("hopper",), Flavour.OPEN, "580")
    assert not made.blacklist_nouveau
    assert not made.group(Group.FABRIC_MANAGER)
    facts["gpu"]["driver"] = installed("580.159.04", "unknown")
    [conflict] = refused(facts)
    assert "by an unknown installer" in conflict.found
    assert "gpunodes_driver_source to existing" in conflict.remedy
    kept = planned(facts, source="existing")
    assert (kept.source, kept.branch, kept.flavour) == (Source.EXISTING, "580", Flavour.OPEN)
    assert {package.group for package in kept.packages} == {Group.TOOLKIT}
    assert not kept.reboot_needed


def test_an_existing_driver_stays_from_every_source() -> None:
    for origin in ("runfile", "unknown", "nvidia-repository", "distribution"):
        facts = machine("H100", system="ubuntu 24.04", driver=installed("580.65.06", origin))
        made = planned(facts, source="existing", sharing="time-slicing-4")
        assert {package.group for package in made.packages} == {Group.TOOLKIT}
        assert (made.fabric_manager, made.persistence, made.blacklist_nouveau) == (False, False, False)
        assert made.hold == tuple(names(made, Group.TOOLKIT))
        assert (made.sharing, made.serving) == ("time-slicing-4", "")
    cuda = planned(
        machine("H100", system="ubuntu 24.04", driver=installed("580.65.06", "runfile")),
        source="existing",
        cuda=("13.0",),
        cudnn="9",
    )
    assert names(cuda, Group.CUDA) == ["cuda-toolkit-13-0"]
    assert names(cuda, Group.CUDNN)
    assert not cuda.group(Group.HEADERS)


@pytest.mark.parametrize(
    ("driver", "requested", "found"),
    [
        (DRIVER, {}, "no NVIDIA driver is installed"),
        (installed("580.65.06", "runfile", loaded=False), {}, "not loaded"),
        (installed("580.65.06", "runfile"), {"driver": "595"}, "driver 580.65.06 is installed"),
        (installed("580.65.06", "runfile"), {"driver": "580.95.05"}, "driver 580.65.06 is installed"),
        (installed("570.86.10", "runfile"), {"cuda": ("13.0",)}, "driver 570 is too old for CUDA 13.0"),
        (installed("580.65.06", "runfile"), {"cuda": ("12.0",)}, "NVIDIA's repository has no CUDA 12.0"),
    ],
)
def test_an_existing_driver_that_does_not_fit_is_refused(
    driver: dict[str, Any], requested: dict[str, Any], found: str
) -> None:
    conflicts = refused(machine("H100", system="debian 13", driver=driver), source="existing", **requested)
    assert any(found in conflict.found for conflict in conflicts), conflicts


def test_an_existing_driver_of_an_unknown_branch_is_a_warning() -> None:
    made = planned(machine("H100", driver=installed("700.10.01", "runfile")), source="existing")
    assert "700.10.01 is not in gpunodes' table" in made.warnings[0]


def test_an_existing_driver_on_switches_needs_its_fabric_manager() -> None:
    made = planned(machine("H100", driver=installed("580.65.06", "runfile"), nvswitches=4), source="existing")
    assert not made.group(Group.FABRIC_MANAGER)
    assert "Fabric Manager 580.65.06" in made.warnings[0]


def test_a_driver_that_meets_the_request_is_kept() -> None:
    made = planned(machine("T4", driver=installed("550.163.01", "distribution", "proprietary")))
    assert (made.branch, made.source, made.flavour) == ("550", Source.DISTRIBUTION, Flavour.PROPRIETARY)
    assert made.reboot_needed is None


def test_a_driver_of_another_source_is_refused() -> None:
    found = refused(machine("T4", driver=installed("550.163.01", "distribution"), clients=0), source="nvidia")
    assert "gpu remove gpu-1" in found[0].remedy


def test_a_driver_in_use_is_not_replaced() -> None:
    facts = machine("T4", driver=installed("580.65.06", "nvidia-repository"), clients=3)
    assert "3 processes use it" in refused(facts, driver="595")[0].found
    facts["gpu"]["clients"] = None
    facts["kubernetes"] = {"role": "worker"}
    assert "pods may use it" in refused(facts, driver="595")[0].found
    facts["gpu"]["clients"] = 0
    made = planned(facts, driver="595")
    assert made.reboot_needed
    assert "will be replaced" in made.warnings[0]


def test_nouveau_needs_a_reboot_only_when_loaded() -> None:
    assert planned(machine("T4", nouveau="loaded")).reboot_needed
    assert planned(machine("T4", nouveau="blacklisted")).reboot_needed is None
    assert not planned(machine("T4", nouveau="absent")).blacklist_nouveau


def test_a_runtime_without_cdi_is_refused() -> None:
    facts = machine("T4", runtimes={"containerd": "1.6.20~ds1-1+deb12u1"})
    assert "1.6.20" in refused(facts)[0].found
    assert planned(machine("T4", runtimes={"docker-ce": "5:28.1.0-1~debian.13"}), runtime="docker").cri_dockerd


def test_gpus_of_virtual_machines_are_ignored() -> None:
    facts = machine("T4", "T4")
    facts["gpu"]["functions"][0]["driver"] = "vfio-pci"
    assert len(gpus_of(facts)) == 1
    assert "vfio-pci" in planned(facts).warnings[0]


def test_old_kubernetes_gets_its_gate() -> None:
    assert planned(machine("T4"), kubernetes_version="1.7").gates == {"Accelerators": True}
    assert planned(machine("T4"), kubernetes_version="1.9").gates == {"DevicePlugins": True}
    assert planned(machine("T4")).gates == {}
