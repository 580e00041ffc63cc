"""The address of a machine in the cluster, from inventory to kubeadm: Ansible is real, the machines are stand-ins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import Machines, cluster_report, machine_report, machines
from tests.trust.test_walk import playbook

ADDRESSES = ["192.168.7.2", "10.0.0.2"]


def fleet(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Machines:
    """A cluster, and a machine with two networks that is to join it."""
    made = machines(folder, {"control_plane": ["control-1"], "workers": ["worker-1"]}, settings)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    joined = {"role": "control_plane", "ca_hash": cluster_report({"control-1": 1})["ca_hash"], "server": None}
    made.answer("control-1", "host_facts", {"host_facts": machine_report("control-1", 1, kubernetes=joined)})
    made.answer("control-1", "cluster_info", {"cluster": cluster_report({"control-1": 1})})
    made.answer("control-1", "join_token", {"token": "abcdef.0123456789abcdef"})
    two = machine_report(
        "worker-1", 2, swap=[], gpu={"functions": []}, default_address=ADDRESSES[0], addresses=ADDRESSES
    )
    made.answer("worker-1", "host_facts", {"host_facts": two})
    made.answer("worker-1", "kubeadm_join", {"actions": ["kubeadm join"], "changed": True})
    return made


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("10.0.0.9", "it does not have the address 10.0.0.9 of gpunodes_node_address (it has 192.168.7.2, 10.0.0.2)"),
        ("0.0.0.0/0", "it has 2 addresses in the network 0.0.0.0/0 of gpunodes_node_address (192.168.7.2, 10.0.0.2)"),
    ],
)
def test_an_address_that_a_stand_in_machine_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, sentence: str
) -> None:
    made = fleet(tmp_path, monkeypatch, gpunodes_node_address=setting)
    # By plain Ansible, with and without preflight, and by the command.
    assert f"worker-1: address: {sentence}" in " ".join(playbook(made, "join.yml").split())
    assert f"worker-1: {sentence}" in " ".join(playbook(made, "join.yml", "--skip-tags", "preflight").split())
    argv = [sys.executable, "-c", "from gpunodes.cli import main; main()", "preflight", "worker-1"]
    done = subprocess.run([*argv, "-i", made.inventory], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert sentence in " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1
    assert {line.partition("/")[2] for line in made.asked} == {"host_facts", "cluster_info"}


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "192.168.7.2"),
        ({"ansible_host": "10.0.0.2"}, "10.0.0.2"),
        ({"ansible_host": "203.0.113.2"}, "192.168.7.2"),
        ({"ansible_host": "192.168.7.2", "gpunodes_node_address": "{{ '10.0.0.0' }}/24"}, "10.0.0.2"),
    ],
)
def test_the_address_with_which_a_stand_in_machine_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], address: str
) -> None:
    made = fleet(tmp_path, monkeypatch, **settings)
    output = playbook(made, "join.yml", "--limit", "worker-1", "--diff", "-vvv")
    assert "worker-1/kubeadm_join" in made.asked, output
    assert f'"node_address": "{address}"' in output


def test_stand_in_machines_that_join_together_know_each_others_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their nodes do not exist yet, and the inventory has neither address: their firewalls must let each other in."""
    names = {"control-1": 1, "worker-1": 2, "worker-2": 3}
    groups = {"control_plane": ["control-1"], "workers": ["worker-1", "worker-2"]}
    made = machines(tmp_path, groups, {"gpunodes_node_address": "10.0.0.0/24"})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    for name, number in names.items():
        addresses = [f"192.168.7.{number}", f"10.0.0.{number}"]
        report = machine_report(
            name, number, swap=[], gpu={"functions": []}, default_address=addresses[0], addresses=addresses
        )
        made.answer(name, "host_facts", {"host_facts": report})
    output = playbook(made, "up.yml", "--diff", "-vvv", "--tags", "always")
    shown = "".join(output.split("Compute the desired state]")[1].split("TASK [")[0].split())
    assert shown.count('"udp8472":["10.0.0.1","10.0.0.2","10.0.0.3"]') == len(names), output
