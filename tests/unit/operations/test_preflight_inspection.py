"""Preflight inspection: for which Kubernetes version the machines check their package source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import runner
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations import preflight

from tests.stand_ins import Silent, facts

INVENTORY = """
control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}
workers: {hosts: {worker-1: {ansible_host: 10.0.0.2}}}
"""


def checked_versions(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: Mapping[str, Any] | None, requested: str = "1.36"
) -> list[str]:
    """The versions of all inspections, in order, if ``cluster`` is found; "" is the version in the settings."""
    checked = []
    if cluster:
        cluster = {"endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "a" * 64, "nodes": [], **cluster}

    def run(play: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        checked.append((play.variables or {}).get("gpunodes_kubernetes_version", ""))
        if cluster:
            result = {"cluster": cluster}
            on_event(TaskEnded("control-1", "cluster", "Read the cluster", Outcome.UNCHANGED, 1.0, result))
        on_event(
            TaskEnded(
                "worker-1", "settings", "Read", Outcome.UNCHANGED, 1.0, {"host_facts": facts(gpu={"functions": []})}
            )
        )
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    (folder / "hosts.yml").write_text(INVENTORY)
    inventory = Inventory(folder / "hosts.yml")
    workers = [machine for machine in inventory.machines() if machine.name == "worker-1"]
    variables = {"gpunodes_kubernetes_version": requested} if requested else {}
    inspection = preflight.inspect(inventory, workers, folder, Silent(), variables)
    assert inspection.cluster == cluster
    assert list(inspection.facts) == ["worker-1"]
    return checked


def test_the_requested_version_is_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checked_versions(monkeypatch, tmp_path, None) == ["1.36"]


def test_the_requested_version_is_checked_once_if_the_cluster_has_that_minor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.36.2"}) == ["1.36"]


def test_a_cluster_with_another_minor_is_checked_for_its_own_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.35.4"}) == ["1.36", "1.35.4"]


def test_without_a_requested_version_the_cluster_s_version_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.35.4"}, requested="") == ["", "1.35.4"]
    (tmp_path / "again").rmdir()
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.36.2"}, requested="") == [""]
