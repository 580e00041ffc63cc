"""Playbooks with several control planes: Ansible is real, the machines are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import Machines, cluster_report, machine_report, machines
from tests.trust.test_walk import played

CLUSTER = {"cluster": cluster_report({"control-2": 2, "control-1": 1, "control-3": 3})}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Three control planes: the first is unreachable, the second has the API."""
    made = machines(tmp_path, {"control_plane": ["control-1", "control-2", "control-3"], "workers": ["worker-1"]}, {})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    inventory = json.loads(made.inventory.read_text())
    inventory["control_plane"]["hosts"]["control-1"] |= {
        "ansible_connection": "ssh",
        "ansible_host": "127.0.0.1",
        "ansible_port": 1,
    }
    made.inventory.write_text(json.dumps(inventory))
    for name in ("control-2", "control-3"):
        made.answer(name, "cluster_info", CLUSTER)
    made.answer("worker-1", "host_facts", {"host_facts": machine_report("worker-1", 4)})
    return made


OF_EACH = ("control_plane_drift", "certificate_ends")
"""What every control plane that responds is asked for `status`: of itself."""
OF_CLUSTER = ("cluster_info", "etcd_members", "kubelet_settings")
"""What the one that is used is asked for `status`."""


def test_stand_in_control_planes_are_tried_in_turn_by_plain_ansible(fleet: Machines) -> None:
    done = played(fleet, "status.yml")
    assert done.returncode == 0, done.stdout
    assert set(fleet.asked) == {f"control-2/{module}" for module in OF_CLUSTER} | {
        f"{name}/{module}" for name in ("control-2", "control-3") for module in OF_EACH
    }
    done = played(fleet, "revoke.yml", "-e", "revoke_run=ann")
    assert done.returncode == 0, done.stdout
    assert [line for line in fleet.asked if line.endswith("join_token")] == ["control-2/join_token"]
    done = played(fleet, "remove.yml", "--limit", "worker-1", "--check")
    assert done.returncode == 0, done.stdout
    assert "control-3/cluster_info" not in fleet.asked


def test_another_control_plane_is_asked_for_the_members_that_the_one_in_use_does_not_know(fleet: Machines) -> None:
    """Its API responds through the virtual address, while its own etcd is down."""
    fleet.answer("control-2", "etcd_members", {"etcd": {"problem": "etcd does not run", "members": []}})
    done = played(fleet, "status.yml")
    assert done.returncode == 0, done.stdout
    assert [line for line in fleet.asked if line.endswith("etcd_members")] == [
        "control-2/etcd_members",
        "control-3/etcd_members",
    ]


def test_a_stand_in_control_plane_with_garbage_or_without_a_cluster_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[dict[str, Any]] = [
        {"cluster": None},
        {"cluster": {"version": "{{ 1 }}"}},
        {"failed": True, "msg": "{{ 1 }}"},
        {},
    ]
    *others, last = names = [f"control-{number}" for number in range(1, len(wrong) + 2)]
    fleet = machines(tmp_path, {"control_plane": names}, {})
    for name, value in fleet.environment.items():
        monkeypatch.setenv(name, value)
    for name, answer in zip(others, wrong, strict=True):
        fleet.answer(name, "cluster_info", answer)
    fleet.answer(last, "cluster_info", CLUSTER)
    done = played(fleet, "status.yml")
    assert done.returncode == 0, done.stdout
    assert [line for line in fleet.asked if not line.endswith(OF_EACH)] == [
        *(f"{name}/cluster_info" for name in names),
        *(f"{last}/{module}" for module in OF_CLUSTER),
    ]


def test_a_stand_in_control_plane_that_the_command_line_chose_is_used_without_trying_others(fleet: Machines) -> None:
    done = played(fleet, "status.yml", "-e", "gpunodes_control_plane=control-3")
    assert done.returncode == 0, done.stdout
    assert [line for line in fleet.asked if not line.endswith(OF_EACH)] == [
        f"control-3/{module}" for module in OF_CLUSTER
    ]


def test_without_a_stand_in_control_plane_that_responds_the_first_one_is_reported(fleet: Machines) -> None:
    for name in ("control-2", "control-3"):
        fleet.answer(name, "cluster_info", {"cluster": None, "unresponsive": "connection refused"})
    done = played(fleet, "status.yml")
    assert done.returncode
    assert "control-1" in done.stdout.partition("PLAY RECAP")[0]
    assert "UNREACHABLE" in done.stdout
