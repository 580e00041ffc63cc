"""The history of a cluster stays when its control planes are replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpunodes import clusters
from gpunodes.engine import identities
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.settings import state_home


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_single_control_plane_needs_no_file() -> None:
    assert clusters.key(["10.0.0.1"]) == "10.0.0.1"
    assert list(state_home().iterdir()) == []


def test_the_key_stays_when_any_control_plane_is_replaced() -> None:
    assert clusters.key(["10.0.0.1"]) == "10.0.0.1"
    identities.remember("10.0.0.1", {"gpu-1": {"hostname": "gpu-1", "boot_id": "b1"}})
    for addresses in (
        ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        ["10.0.0.2", "10.0.0.3"],
        ["10.0.0.4", "10.0.0.2", "10.0.0.3"],
        ["10.0.0.3", "10.0.0.4", "10.0.0.5"],
        ["10.0.0.5"],
    ):
        assert clusters.key(addresses) == "10.0.0.1", addresses
    assert identities.recall(clusters.key(["10.0.0.5", "10.0.0.4"]), "gpu-1", "").boot_id == "b1"


def test_an_address_that_left_a_cluster_may_begin_another_one() -> None:
    clusters.key(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    clusters.key(["10.0.0.4", "10.0.0.2", "10.0.0.3"])
    assert clusters.key(["10.0.0.1"]) == "10.0.0.1 2"
    assert clusters.key(["10.0.0.1"]) == "10.0.0.1 2"
    assert clusters.key(["10.0.0.2"]) == "10.0.0.1"


def test_the_ca_is_kept_by_the_key() -> None:
    key = clusters.key(["a", "b"])
    assert clusters.ca(key) == ""
    clusters.remember_ca(key, "sha256:1")
    assert clusters.key(["b", "c"]) == key
    assert clusters.ca(key) == "sha256:1"
    assert (state_home() / "clusters.json").stat().st_mode & 0o777 == 0o600


def test_a_cluster_that_a_kubeconfig_led_to_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {gpu-1: }}\n")
    key = Inventory(path).cluster
    assert clusters.confirm(key, "uid-1")
    assert clusters.confirm(key, "uid-1")
    assert not clusters.confirm(key, "uid-2")
    assert clusters.confirm("another", "uid-2")
    assert clusters.ca(key) == ""
    assert clusters.key(["10.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert not clusters.confirm(key, "uid-2")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"clusters": [{"key": 5}]}', "\x00"])
def test_a_file_that_is_not_of_gpunodes_is_refused(text: str) -> None:
    (state_home() / "clusters.json").write_text(text)
    with pytest.raises(GpunodesError, match="does not list the clusters"):
        clusters.key(["a", "b"])


def test_a_disk_that_is_full_does_not_stop_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    assert clusters.key(["a", "b"]) == "a"


def test_an_inventory_has_all_its_control_planes_and_one_key(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {c2: {ansible_host: 10.0.0.2}, c1: {ansible_host: 10.0.0.1}}}\n")
    assert [each.name for each in Inventory(path).control_planes()] == ["c2", "c1"]
    assert Inventory(path).cluster == "10.0.0.2"
    path.write_text("control_plane: {hosts: {c1: {ansible_host: 10.0.0.1}}}\n")
    assert Inventory(path).cluster == "10.0.0.2"
    path.write_text("workers: {hosts: {w1: }}\n")
    with pytest.raises(WrongInput, match="no machine in the group control_plane"):
        Inventory(path).control_planes()
