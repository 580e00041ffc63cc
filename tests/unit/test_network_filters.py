"""The other nodes whose firewalls a join updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from gpunodes.ansible.filter.network import firewalled
from gpunodes.planner import firewall

ROOT = Path(__file__).parents[2]
MACHINES = {"control-1": "10.0.0.1", "gpu-1": "10.0.0.2", "gpu-2": "10.0.0.3", "gpu-3": ""}
ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "gpu-3"]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def node(name: str, address: str, role: str = "worker", value: str = "ufw") -> dict[str, Any]:
    labels = {firewall.LABEL: value} if value else {}
    return {
        "name": name,
        "role": role,
        "uid": name,
        "address": address,
        "addresses": [address, name],
        "machine_id": name,
        "product_uuid": "",
        "boot_id": name,
        "managed": {"labels": labels, "taints": []},
    }


def names(nodes: list[dict[str, Any]], joining: tuple[str, ...] = ("gpu-3",)) -> list[str]:
    found = firewalled(nodes, MACHINES, ["control-1"], joining, addresses=ADDRESSES, pods="10.244.0.0/16")
    return [each["name"] for each in found]


def test_only_nodes_whose_firewall_gpunodes_opened_are_updated() -> None:
    nodes = [
        node("control-1", "10.0.0.1", "control_plane"),
        node("gpu-1", "10.0.0.2"),
        node("gpu-2", "10.0.0.3", value=""),
    ]
    assert names(nodes) == ["control-1", "gpu-1"]
    assert names(nodes, ("gpu-3", "gpu-1")) == ["control-1"]
    assert names([node("gpu-2", "10.0.0.3", value="")]) == []


def test_a_node_of_no_machine_is_left_alone() -> None:
    assert names([node("other", "10.9.9.9")]) == []


def test_each_gets_the_rules_of_its_role() -> None:
    nodes = [node("control-1", "10.0.0.1", "control_plane"), node("gpu-1", "10.0.0.2")]
    control, worker = firewalled(nodes, MACHINES, ["control-1"], ["gpu-3"], addresses=ADDRESSES, pods="10.244.0.0/16")
    machines = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert control["wanted"]["firewall"]["ports"]["tcp 6443"] == []
    assert "tcp 6443" not in worker["wanted"]["firewall"]["ports"]
    assert worker["wanted"]["firewall"]["ports"]["udp 8472"] == machines
    assert worker["wanted"]["firewall"]["sources"] == machines


@pytest.mark.parametrize("serves", [False, True])
def test_a_control_plane_keeps_the_label_by_which_joins_find_it(serves: bool) -> None:
    """It gets it when it is created, and has no pool unless it runs pods of users."""
    wiring = DataLoader().load_from_file(str(ROOT / "playbooks/group_vars/all.yml"), trusted_as_template=True)
    state = {
        "labels": {"gpunodes.dev/pool": "x", firewall.LABEL: "ufw"},
        "gpu": {"labels": {}, "gpus": 0},
        "taints": [],
    }
    variables = wiring | {
        "desired_state": state,
        "wiring_gpu_labels": {},
        "inventory_hostname": "control-1",
        "groups": {"control_plane": ["control-1"], "workers": ["gpu-1"]},
        "gpunodes_control_plane_schedulable": serves,
    }
    templar = Templar(DataLoader(), variables=variables)
    assert templar.template(wiring["control_plane_labels"]) == {firewall.LABEL: "ufw"}
    assert templar.template(wiring["pool_labels"]) == (state["labels"] if serves else {firewall.LABEL: "ufw"})


def test_the_task_runs_on_each_of_them_once() -> None:
    """The machines that join share the others among them."""
    (task,) = yaml.safe_load((ROOT / "roles/firewall/tasks/main.yml").read_text())
    assert task["delegate_to"] == "{{ item.name }}"
    assert "firewall_share[0] :: firewall_share[1]" in task["loop"]
    others = ["a", "b", "c", "d", "e"]
    assert sorted(name for number in range(2) for name in others[number::2]) == others
