"""A reinstalled worker joins again under its old name: Ansible is real, the machines are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile import PIN, Machines, cluster_report, machine_report, machines
from tests.trust.test_walk import playbook

NEW: dict[str, Any] = {"machine_id": "e" * 32, "boot_id": "eeeeeeee-1111-0000-0000-000000000000"}


def rejoin(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Machines, str]:
    """The output of a join of worker-1, whose node is in the cluster, with changes of what it reports."""
    made = machines(folder, {"control_plane": ["control-1"], "workers": ["worker-1"]}, {})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    report = machine_report("worker-1", 2, **changes)
    report["gpu"] = {"functions": []}
    made.answer("worker-1", "host_facts", {"host_facts": report})
    nodes = cluster_report({"control-1": 1, "worker-1": 2})
    made.answer("control-1", "cluster_info", {"cluster": nodes})
    made.answer("control-1", "join_token", {"token": "abcdef.0123456789abcdef"})
    made.answer("worker-1", "kubeadm_join", {"actions": ["kubeadm join"], "changed": True})
    made.answer("control-1", "node_ready", {"not_ready": {"worker-1": ""}})
    output = playbook(made, "join.yml", "--limit", "worker-1", "--skip-tags", "preflight")
    return made, " ".join(output.split())


def joined(made: Machines) -> list[str]:
    wanted = {"control-1/node_removed", "worker-1/kubeadm_join"}
    return [each for each in made.asked if each in wanted]


def test_its_old_node_is_deleted_and_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, output = rejoin(tmp_path, monkeypatch, **NEW)
    assert joined(made) == ["control-1/node_removed", "worker-1/kubeadm_join"], output


def test_a_node_that_works_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"role": "worker", "ca_hash": PIN, "server": "https://10.0.0.1:6443"}
    made, output = rejoin(tmp_path, monkeypatch, kubernetes=own)
    assert joined(made) == [], output


def test_another_machine_of_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**NEW, "product_uuid": "eeeeeeee-0000-0000-0000-000000000000"}
    made, output = rejoin(tmp_path, monkeypatch, **other)
    assert joined(made) == []
    assert "the node of that name belongs to another machine" in output
