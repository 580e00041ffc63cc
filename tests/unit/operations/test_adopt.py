"""What `gpunodes adopt` shows of the machines of a cluster that kubeadm made."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import runner
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations import adopt
from gpunodes.planner.adoption import Fit, Row

from tests.stand_ins import Silent, facts

INVENTORY = "control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}\n"
CLUSTER = {"version": "v1.36.3", "endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "a" * 64, "nodes": []}
DIFFERENCE = {"component": "kube-apiserver", "name": "--v", "running": "2", "wanted": None, "kind": "foreign"}


def rows(monkeypatch: pytest.MonkeyPatch, folder: Path, **report: Any) -> list[Row]:
    """The rows of a control plane that gpunodes did not make, which reports this drift."""

    def run(play: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        def reports(role: str, **result: Any) -> None:
            on_event(TaskEnded("control-1", role, "Read", Outcome.UNCHANGED, 1.0, result))

        assert (play.variables or {}).get("control_plane_foreign") is True
        reports("cluster", cluster=CLUSTER)
        role = {"role": "control_plane", "ca_hash": CLUSTER["ca_hash"], "server": "https://10.0.0.1:6443"}
        now = {"time": time.time(), "clock": {"began": time.time(), "synchronised": True, "services": ["a"], "own": ""}}
        own = facts(gpu={"functions": []}, hostname="control-1", memory_mib=4000, kubernetes=role, **now)
        reports("settings", host_facts=own)
        drift = {"managed": False, "problem": "", "unverified": False, "left_out": 0, "differences": [], **report}
        reports("control_plane", control_plane_drift=drift)
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    (folder / "hosts.yml").write_text(INVENTORY)
    return [each for each in adopt._machines(Inventory(folder / "hosts.yml"), Silent()) if each.what == "settings"]


def test_settings_of_others_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [row] = rows(monkeypatch, tmp_path, differences=[DIFFERENCE])
    assert row.found == "kube-apiserver --v is 2, neither the settings nor kubeadm set it"
    assert (row.machine, row.fit) == ("control-1", Fit.OTHER)


def test_settings_that_cannot_be_compared_are_said_to_be_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [row] = rows(monkeypatch, tmp_path, problem="no manifest of etcd", left_out=0)
    assert row.found == "not known: no manifest of etcd"
    assert row.fit is Fit.OTHER


def test_more_differences_than_fit_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [each.found for each in rows(monkeypatch, tmp_path, differences=[DIFFERENCE], left_out=7)][1:] == [
        "7 more differences"
    ]
