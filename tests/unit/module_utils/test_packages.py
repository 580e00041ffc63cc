"""Package managers: their listings, versions and errors."""

from __future__ import annotations

import pytest
from gpunodes.ansible.module_utils import packages
from gpunodes.ansible.module_utils.problem import MachineProblem


def test_only_whole_packages_count() -> None:
    listing = "kubelet\thi \t1.36.3-1.1\ncontainerd\tiF \t1.7.24\nrunc\tii \t1.1.15\nsocat\trc \t1.8\n"
    found = packages.parse_dpkg(listing)
    assert found == {
        "kubelet": packages.PackageState("1.36.3-1.1", held=True),
        "runc": packages.PackageState("1.1.15", held=False),
    }


def test_madison_gives_versions_best_first() -> None:
    listing = (
        " kubelet | 1.36.3-1.1 | http://m/deb  Packages\n kubelet | 1.36.1-1.1 | http://m/deb  Packages\n"
        " kubelet | 1.36.3-1.1 | http://m/deb  Packages\n kubelet | 1.36.3-1.1 | http://m/deb Sources\n"
    )
    assert packages.parse_madison(listing) == {"kubelet": ["1.36.3-1.1", "1.36.1-1.1"]}


def test_simulation_tells_new_upgraded_and_removed() -> None:
    listing = (
        "Remv containerd [1.7.24]\nInst containerd.io (2.2.9-1 Docker:stable [amd64])\n"
        "Inst libseccomp2 [2.5.4-1] (2.5.4-2 Debian:13 [amd64])\nConf containerd.io (2.2.9-1)\n"
    )
    assert packages.parse_simulation(listing) == packages.Effects(["containerd.io"], ["containerd"], ["libseccomp2"])


@pytest.mark.parametrize(
    ("pattern", "version", "good"),
    [
        ("1.36.*", "1.36.3-1.1", True),
        ("1.36.3-*", "1.36.3-1.1", True),
        ("1.36.3-*", "1.36.30-1.1", False),
        ("1.3.*", "1.36.3-1.1", False),
        ("1.36.*", "0:1.36.3-150500.1.1", True),
        ("", "anything", True),
    ],
)
def test_fits(pattern: str, version: str, good: bool) -> None:
    assert packages.fits(packages.RequestedPackage("kubelet", pattern), version) is good


def test_choosing_says_what_there_is() -> None:
    wanted = packages.RequestedPackage("kubelet", "1.36.9-*")
    with pytest.raises(MachineProblem, match=r"no kubelet 1\.36\.9-\*; available: 1.36.3-1.1"):
        packages.choose(wanted, ["1.36.3-1.1"])
    assert packages.choose(packages.RequestedPackage("kubelet", "1.36.*"), ["1.36.3-1.1", "1.36.1-1.1"]) == "1.36.3-1.1"


def test_apt_error_is_its_first_with_what_is_unmet() -> None:
    text = (
        "Reading package lists...\n kubelet : Depends: kubernetes-cni (>= 1.2.0) but it is not installable\n"
        "E: Unable to correct problems, you have held broken packages.\nE: second\n"
    )
    assert packages.apt_error(text) == (
        "E: Unable to correct problems, you have held broken packages.; "
        "kubelet : Depends: kubernetes-cni (>= 1.2.0) but it is not installable"
    )


def test_dnf_transaction() -> None:
    listing = (
        "Installing:\n kubelet  x86_64  1.36.3-150500.1.1  gpunodes-kubernetes  12 M\n"
        "Removing:\n runc  x86_64  1.1  @appstream  1 M\nTransaction Summary:\n"
    )
    assert packages.parse_dnf_transaction(listing) == packages.Effects(["kubelet"], ["runc"], [])
