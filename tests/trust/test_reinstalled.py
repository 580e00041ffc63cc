"""A reinstalled worker joins again under its old name: Ansible is real, the machines are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile import PIN, cluster_report, machine_report, machines
from tests.trust.test_walk import playbook, reason

NEW: dict[str, Any] = {"machine_id": "e" * 32, "boot_id": "eeeeeeee-1111-0000-0000-000000000000"}
CHANGES: dict[str, dict[str, Any]] = {
    "reinstalled": NEW,
    "works": {"kubernetes": {"role": "worker", "ca_hash": PIN, "server": "https://10.0.0.1:6443"}},
    "another": {**NEW, "product_uuid": "eeeeeeee-0000-0000-0000-000000000000"},
}
"""The machines of one join, whose nodes are in the cluster, and what each reports otherwise than its node."""


def test_only_the_old_node_of_a_reinstalled_stand_in_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"control-1": 1} | {name: number for number, name in enumerate(CHANGES, 2)}
    made = machines(tmp_path, {"control_plane": ["control-1"], "workers": list(CHANGES)}, {})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    for name, changes in CHANGES.items():
        report = machine_report(name, numbers[name], **changes)
        report["gpu"] = {"functions": []}
        made.answer(name, "host_facts", {"host_facts": report})
        made.answer(name, "kubeadm_join", {"actions": ["kubeadm join"], "changed": True})
    made.answer("control-1", "cluster_info", {"cluster": cluster_report(numbers)})
    made.answer("control-1", "join_token", {"token": "abcdef.0123456789abcdef"})
    made.answer("control-1", "node_ready", {"not_ready": dict.fromkeys(CHANGES, "")})
    output = playbook(made, "join.yml", "--limit", "workers", "--skip-tags", "preflight")
    # A node that works stays; the node of another machine is not deleted, and that machine does not join.
    acts = [line for line in made.asked if line.endswith(("/node_removed", "/kubeadm_join"))]
    assert acts == ["control-1/node_removed", "reinstalled/kubeadm_join"], output
    assert "the node of that name belongs to another machine" in reason(output, "another")
