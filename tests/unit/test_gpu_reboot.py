"""A driver that only a reboot can load: where a machine is rebooted, where not, and what is said then.

The role runs by Ansible as it stands; the module `host` and the reboot are stand-ins, since nothing here may reboot.
tests/machines/test_gpu_alone.py reboots a machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner
from gpunodes.cli import common, root

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
IN_USE = "nouveau uses the GPU and cannot be unloaded: Module nouveau is in use"
# Notes its name, and answers what the test has written down for this call.
STAND_IN = """#!/usr/bin/python3
# WANT_JSON
import json, os, pathlib
folder = pathlib.Path(os.environ["MACHINE"])
with (folder / "calls").open("a") as calls:
    calls.write("{name}\\n")
answers = json.loads((folder / "answers").read_text())
if "{name}" == "host":
    print(json.dumps(answers.pop(0)))
    (folder / "answers").write_text(json.dumps(answers))
else:
    print(json.dumps({{"changed": True, "rebooted": True}}))
"""


@dataclass(frozen=True)
class Case:
    """A machine: why its driver needs a reboot, before and after one, and what its settings allow."""

    before: str
    after: str = ""
    allowed: bool = True
    role: str | None = None
    """What the machine is in a cluster, by its own account."""
    node: bool | None = None
    """Whether the node that is this machine is ready; None where there is none."""


CASES = {
    "loads": Case(""),
    "helped": Case(IN_USE),
    "not-helped": Case(IN_USE, IN_USE),
    "forbidden": Case(IN_USE, allowed=False),
    "a-node": Case(IN_USE, role="worker"),
    # What a join that was killed leaves: pods may have been scheduled there.
    "half-a-node": Case(IN_USE, node=True),
    "a-dead-node": Case(IN_USE, node=False),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str]]:
    """The calls of each machine of CASES, and what Ansible printed of it."""
    folder = tmp_path_factory.mktemp("reboot")
    (folder / "library").mkdir()
    for name in ("host", "pretended_reboot"):
        (folder / "library" / f"{name}.py").write_text(STAND_IN.format(name=name))
    role = folder / "roles" / "gpu_driver"
    for path in (ROOT / "roles/gpu_driver").rglob("*.yml"):
        copy = role / path.relative_to(ROOT / "roles/gpu_driver")
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text().replace("ansible.builtin.reboot:", "pretended_reboot:")
        copy.write_text(text.replace("gpunodes.bootstrap.host:", "host:"))
    assert "pretended_reboot:" in (role / "tasks/main.yml").read_text()
    hosts: dict[str, Any] = {}
    for name, case in CASES.items():
        (folder / name).mkdir()
        (folder / name / "answers").write_text(
            json.dumps([{"changed": True, "reboot": case.before}, {"changed": False, "reboot": case.after}])
        )
        hosts[name] = {
            "gpunodes_gpu_reboot": case.allowed,
            "settings_machine": {"kubernetes": {"role": case.role}},
            "wiring_node": {} if case.node is None else {"ready": case.node},
        }
    wiring = yaml.safe_load((ROOT / "playbooks/group_vars/all.yml").read_text())
    play = {
        "hosts": "all",
        "gather_facts": False,
        "environment": {"MACHINE": f"{folder}/{{{{ inventory_hostname }}}}"},
        "vars": {"gpu_driver_reboot": wiring["gpu_driver_reboot"]},
        "roles": ["gpu_driver"],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    connection = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": connection}}))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", "play.yml"],
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "bootstrap"),
            "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.oneline",
            "ANSIBLE_FORKS": "1",
            "ANSIBLE_NOCOLOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    printed = dict.fromkeys(CASES, "")
    for line in done.stdout.splitlines():
        name = line.partition(" | ")[0]
        if name in printed:
            printed[name] += f"{line}\n"
    calls = {name: folder / name / "calls" for name in CASES}
    assert all(path.exists() for path in calls.values()), done.stdout + done.stderr
    return {name: (path.read_text().split(), printed[name]) for name, path in calls.items()}


Outcomes = dict[str, tuple[list[str], str]]


def test_a_driver_that_loads_needs_no_reboot(outcomes: Outcomes) -> None:
    calls, printed = outcomes["loads"]
    assert calls == ["host"]
    assert "FAILED" not in printed


@pytest.mark.parametrize("name", ["helped", "a-dead-node"])
def test_a_machine_is_rebooted_and_its_driver_loaded_then(outcomes: Outcomes, name: str) -> None:
    calls, printed = outcomes[name]
    assert calls == ["host", "pretended_reboot", "host"]
    assert "FAILED" not in printed


def test_a_reboot_that_did_not_help_is_an_error(outcomes: Outcomes) -> None:
    calls, printed = outcomes["not-helped"]
    assert calls == ["host", "pretended_reboot", "host"]
    assert f"the reboot did not help: {IN_USE}" in printed


@pytest.mark.parametrize("name", ["forbidden", "a-node", "half-a-node"])
def test_no_machine_is_rebooted_by_no_reboot_and_no_node_ever(outcomes: Outcomes, name: str) -> None:
    calls, printed = outcomes[name]
    assert calls == ["host"]
    assert f"{IN_USE}; a reboot is required: drain the machine's node" in printed


@pytest.mark.parametrize("command", [("up",), ("join", "worker-1"), ("gpu", "install", "worker-1")])
@pytest.mark.parametrize("option", [(), ("--no-reboot",)])
def test_no_reboot_is_a_setting_of_the_run(tmp_path: Path, command: tuple[str, ...], option: tuple[str, ...]) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("control_plane: {hosts: {control-1: {}}}\nworkers: {hosts: {worker-1: {}}}\n")
    with mock.patch.object(common, "execute", return_value=0) as execute:
        done = CliRunner().invoke(root, [*command, "-i", str(inventory), "--driver", "580", *option])
    assert done.exit_code == 0, done.output
    variables = execute.call_args.args[3].options.variables
    assert variables["gpunodes_driver_branch"] == "580"
    assert variables.get("gpunodes_gpu_reboot") == (False if option else None)
