"""Preflight's inspection: for which version the machines query their package sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import runner
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations import preflight
from test_operations import Silent
from test_preflight import facts

INVENTORY = """
control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}
workers: {hosts: {worker-1: {ansible_host: 10.0.0.2}}}
"""


def versions_queried(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: Mapping[str, Any] | None, requested: str = "1.36"
) -> list[str]:
    """The queried versions of each inspection with ``cluster`` as the cluster; "" is the settings' version."""
    queried = []
    if cluster:
        cluster = {"endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "a" * 64, "nodes": [], **cluster}

    def run(play: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        queried.append((play.variables or {}).get("gpunodes_kubernetes_version", ""))
        if cluster:
            answer = {"cluster": cluster}
            on_event(TaskEnded("control-1", "cluster", "Read the cluster", Outcome.UNCHANGED, 1.0, answer))
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
    seen = preflight.inspect(inventory, workers, folder, Silent(), variables)
    assert seen.cluster == cluster
    assert list(seen.facts) == ["worker-1"]
    return queried


def test_the_requested_version_is_queried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions_queried(monkeypatch, tmp_path, None) == ["1.36"]


def test_one_query_if_the_cluster_has_the_requested_minor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions_queried(monkeypatch, tmp_path, {"version": "v1.36.2"}) == ["1.36"]


def test_a_second_query_if_the_cluster_has_another_minor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions_queried(monkeypatch, tmp_path, {"version": "v1.35.4"}) == ["1.36", "1.35.4"]


def test_a_second_query_without_a_requested_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions_queried(monkeypatch, tmp_path, {"version": "v1.35.4"}, requested="") == ["", "1.35.4"]
    (tmp_path / "again").rmdir()
    assert versions_queried(monkeypatch, tmp_path, {"version": "v1.36.2"}, requested="") == [""]
