"""A machine of the lab that boots from a seed: its definition, its image, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
from gpunodes.errors import WrongInput
from gpunodes.lab import hypervisor, images, seeded
from gpunodes.lab.layout import USER, System

from tests.unit.test_lab_machines import LAYOUT, record


def parsed(xml: str) -> Any:
    return fromstring(xml)  # noqa: S314 - the lab made it


def test_the_definition_gets_the_seed_s_disk_and_its_own_kernel() -> None:
    machine = record().machines[1]
    plain = hypervisor.domain_xml(LAYOUT, machine, "tcg")
    found = parsed(seeded.with_seed(plain, Path("/d/seed.iso"), Path("/d/kernel"), Path("/d/initrd")))
    assert (found.findtext("os/kernel"), found.findtext("os/initrd")) == ("/d/kernel", "/d/initrd")
    disk = found.findall("devices/disk")[-1]
    source, target = disk.find("source"), disk.find("target")
    assert source is not None
    assert target is not None
    assert source.get("file") == "/d/seed.iso"
    assert target.get("dev") == "vdz"
    assert disk.find("readonly") is not None
    assert len(found.findall("devices/disk")) == len(parsed(plain).findall("devices/disk")) + 1


def test_the_image_of_a_seeded_machine_has_cloud_init_and_no_user() -> None:
    assert "useradd" not in images._customise(images.Kind.SEEDED)
    assert f"/home/{USER}" not in images._customise(images.Kind.SEEDED)
    assert "useradd" in images._customise(images.Kind.PLAIN)
    assert "cloud-init" in images._packages(images.Kind.SEEDED)
    assert "cloud-init" not in images._packages(images.Kind.PLAIN)
    assert images.recipe_hash(System.DEBIAN13) != images.recipe_hash(System.DEBIAN13, images.Kind.SEEDED)


def test_the_lab_tells_a_seeded_machine_neither_its_name_nor_a_user() -> None:
    lab = record()
    machine = lab.machines[1]
    files = {file.path: file.data.decode() for file in seeded.guest_files(lab, machine)}
    assert not [path for path in files if "ssh" in path or "home" in path]
    assert all(machine.name not in content for content in files.values())


def test_a_folder_without_a_seed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "user-data").write_text("#cloud-config\n")
    with pytest.raises(WrongInput, match="has no file meta-data"):
        seeded._check(tmp_path)
