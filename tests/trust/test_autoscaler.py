"""The playbook of the autoscaler installs it, with the image of an archive: the walk of all playbooks removes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpunodes.engine import control_planes
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.inventory import Inventory
from gpunodes.lab.mirror.oci import Blobs, OciImage, write_archive
from gpunodes.lab.mirror.tree import TreeEntry
from gpunodes.operations.autoscale import commands

from tests.hostile import Machines, machines
from tests.trust.test_walk import check, make, modules, played

POOLS = {"h100": {"priority": 50, "spare": 1, "resources": {"limits": {"nvidia.com/gpu": 8}}, "taints": []}}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A small archive as `make image` writes it."""
    blobs = Blobs(tmp_path / "blobs")
    image = OciImage("gpunodes.dev/gpunodes", ("1.0",), (blobs.layer([TreeEntry("/program", b"")]),), ("/program",))
    write_archive(path := tmp_path / "image.oci.tar", image, blobs, "amd64")
    return path


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return make(tmp_path, monkeypatch)


def test_it_is_installed_with_the_image_of_an_archive(fleet: Machines, archive: Path) -> None:
    fleet.answer("control-1", "image_loaded", {"actions": [], "loaded": False})
    fleet.answer("control-1", "stat", {"stat": {"exists": False}})
    given = {"autoscaler_state": "present", "autoscaler_archive": str(archive), "autoscaler_pools": POOLS}
    done = played(fleet, "autoscale.yml", "-e", json.dumps(given))
    check(fleet, done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout
    assert modules(fleet) == {"image_loaded", "copy", "stat", "kube_objects"}
    assert fleet.asked.count("control-1/image_loaded") == 2


def test_the_command_runs_it_and_copies_no_image_that_is_loaded(
    fleet: Machines, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fleet.answer("control-1", "image_loaded", {"actions": [], "loaded": True})
    made = InventoryFleet(Inventory(fleet.inventory))
    choice = control_planes.Choice(made.inventory.control_planes()[0])
    commands._run(made, choice, lambda: None, POOLS, archive, state="present")
    assert modules(fleet) == {"image_loaded", "kube_objects"}


def test_a_control_plane_that_is_dead_stops_neither_up_nor_down(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["control-1", "control-2", "control-3"]
    fleet = machines(tmp_path / "fleet", {"control_plane": names}, {})
    for name, value in fleet.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    document = json.loads(fleet.inventory.read_text())
    dead = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    document["control_plane"]["hosts"]["control-1"] |= dead
    fleet.inventory.write_text(json.dumps(document))
    choice = control_planes.Choice(Inventory(fleet.inventory).control_planes()[1], [("control-1", "it is dead")])
    fleet.answer("control-2", "image_loaded", {"actions": [], "loaded": True})
    fleet.answer("control-3", "image_loaded", {"actions": [], "loaded": False})
    fleet.answer("control-3", "stat", {"stat": {"exists": False}})
    for given, state in ((archive, "present"), (None, "absent")):
        made = InventoryFleet(Inventory(fleet.inventory))
        left_out = commands._run(made, choice, lambda: None, POOLS, given, state=state)
        assert left_out == {"control-1": "it is dead"}
    assert fleet.asked.count("control-2/kube_objects") == 2
    assert "control-3/copy" in fleet.asked
    assert not [each for each in fleet.asked if each.startswith("control-1/")]


def test_it_needs_an_image(fleet: Machines) -> None:
    done = played(fleet, "autoscale.yml", "-e", "autoscaler_state=present")
    assert "there is no image of the power server" in " ".join(done.stdout.split())
    assert modules(fleet) == set()
