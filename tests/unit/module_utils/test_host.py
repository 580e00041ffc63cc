"""The parts of a machine that are brought into a desired state: swap, services, files, sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.host import files, services, sources, spec, swap
from gpunodes.ansible.module_utils.problem import MachineProblem


def test_swap_lines_go_and_come_back() -> None:
    fstab = "UUID=1 / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n# /old none swap sw 0 0\n"
    quiet = swap.without_swap(fstab)
    assert "\n/swap.img" not in quiet
    assert swap.without_swap(quiet) == quiet
    assert swap.with_swap(quiet) == fstab


def test_active_swaps() -> None:
    listing = "Filename\tType\tSize\tUsed\tPriority\n/dev/vda2 partition 1 0 -2\n"
    assert swap.active_swaps(listing) == ["/dev/vda2"]


def test_services() -> None:
    listing = (
        "Id=containerd.service\nActiveState=active\nUnitFileState=enabled\n\n"
        "Id=kubelet.service\nActiveState=inactive\nUnitFileState=\n"
    )
    assert services.parse(listing) == {
        "containerd": {"enabled": True, "active": True},
        "kubelet": {"enabled": False, "active": False},
    }


def test_a_file_follows_its_package_version() -> None:
    file = spec.File("/etc/c", package="containerd", contents={"1.[67].*": "two", "2.*": "three"})
    assert files.variant(file, {"containerd": "1.7.24~ds1-6"}).content == "two"
    assert files.variant(file, {"containerd": "2.2.9-1"}).content == "three"
    with pytest.raises(MachineProblem, match=r"containerd is 3\.0"):
        files.variant(file, {"containerd": "3.0"})


def test_apt_source() -> None:
    source = spec.Repository("kubernetes", "http://m/v1.36/deb/", "KEY")
    assert sources.render(source, "/k.asc", apt=True) == (
        "Types: deb\nURIs: http://m/v1.36/deb/\nSuites: /\nSigned-By: /k.asc\n"
    )
    suite = spec.Repository("docker", "http://m/debian", "KEY", suite="bookworm", components="stable")
    assert "Suites: bookworm\nComponents: stable\n" in sources.render(suite, "/k.asc", apt=True)


def test_plain_data_becomes_a_desired_state() -> None:
    plain = {
        "files": [{"path": "/a", "content": "x"}],
        "driver": {"modules": ["nvidia"]},
        "checks": [],
        "groups": ["a"],
    }
    wanted = spec.Spec(files=(spec.File("/a", "x"),), driver=spec.Driver(["nvidia"]), checks=[], groups=["a"])
    assert spec.spec_from(plain) == wanted
    assert spec.spec_from({"driver": None}) == spec.Spec()
    wrongs: tuple[dict[str, Any], ...] = ({"file": []}, {"files": [{"name": "/a"}]})
    for wrong in wrongs:
        with pytest.raises(MachineProblem, match="unexpected keyword argument"):
            spec.spec_from(wrong)


def test_missing_parents(tmp_path: Path) -> None:
    assert files.missing_parents(str(tmp_path / "a" / "b" / "file")) == [str(tmp_path / "a"), str(tmp_path / "a/b")]
