"""The address of a machine in the cluster, from inventory to kubeadm: Ansible is real, the machines are stand-ins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import Machines, cluster_report, machine_report, machines
from tests.trust.test_walk import playbook


def fleet(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: Sequence[Mapping[str, Any]]) -> Machines:
    """A cluster, and machines with two networks that are to join it, each with its settings.

    The addresses of the first, worker-2, are 192.168.7.2 and 10.0.0.2, those of worker-3 end in 3.
    """
    numbers = range(2, len(settings) + 2)
    made = machines(folder, {"control_plane": ["control-1"], "workers": [f"worker-{each}" for each in numbers]}, {})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    joined = {"role": "control_plane", "ca_hash": cluster_report({"control-1": 1})["ca_hash"], "server": None}
    made.answer("control-1", "host_facts", {"host_facts": machine_report("control-1", 1, kubernetes=joined)})
    made.answer("control-1", "cluster_info", {"cluster": cluster_report({"control-1": 1})})
    made.answer("control-1", "join_token", {"token": "abcdef.0123456789abcdef"})
    for number, own in zip(numbers, settings, strict=True):
        name, addresses = f"worker-{number}", [f"192.168.7.{number}", f"10.0.0.{number}"]
        made.vary(name, **own)
        two = machine_report(
            name, number, swap=[], gpu={"functions": []}, default_address=addresses[0], addresses=addresses
        )
        made.answer(name, "host_facts", {"host_facts": two})
        made.answer(name, "kubeadm_join", {"actions": ["kubeadm join"], "changed": True})
    return made


def test_addresses_that_stand_in_machines_cannot_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet(tmp_path, monkeypatch, [{"gpunodes_node_address": each} for each in ("10.0.0.9", "0.0.0.0/0")])
    one = "it does not have the address 10.0.0.9 of gpunodes_node_address (it has 192.168.7.2, 10.0.0.2)"
    two = "it has 2 addresses in the network 0.0.0.0/0 of gpunodes_node_address (192.168.7.3, 10.0.0.3)"
    # By plain Ansible, with and without preflight, and by the command.
    shown = " ".join(playbook(made, "join.yml", "--limit", "workers").split())
    assert f"worker-2: address: {one}" in shown
    assert f"worker-3: address: {two}" in shown
    shown = " ".join(playbook(made, "join.yml", "--limit", "workers", "--skip-tags", "preflight").split())
    assert f"worker-2: {one}" in shown
    assert f"worker-3: {two}" in shown
    argv = [sys.executable, "-c", "from gpunodes.cli import main; main()", "preflight", "worker-*"]
    done = subprocess.run([*argv, "-i", made.inventory], capture_output=True, text=True, check=False, cwd=tmp_path)
    shown = " ".join((done.stdout + done.stderr).split())
    assert one in shown
    assert two in shown
    assert done.returncode == 1
    assert {line.partition("/")[2] for line in made.asked} == {"host_facts", "cluster_info", "kubelet_settings"}


def test_the_addresses_with_which_stand_in_machines_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [
        {},
        {"ansible_host": "10.0.0.3"},
        {"ansible_host": "203.0.113.2"},
        {"ansible_host": "192.168.7.5", "gpunodes_node_address": "{{ '10.0.0.0' }}/24"},
    ]
    made = fleet(tmp_path, monkeypatch, settings)
    output = playbook(made, "join.yml", "--limit", "workers", "--diff", "-vvv")
    for number, address in enumerate(("192.168.7.2", "10.0.0.3", "192.168.7.4", "10.0.0.5"), 2):
        assert f"worker-{number}/kubeadm_join" in made.asked, output
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
