"""The device plugin keeps the driver in use: it leaves a node while the driver is replaced, and always returns.

The role runs by Ansible as it stands, its modules are stand-ins. tests/machines/test_driver_rollout.py replaces
drivers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles/gpu_upgrade"
LABELS = {"gpunodes.dev/gpu": "true", "gpunodes.dev/pool": "a"}
TAINTS = [{"key": "a", "value": "b", "effect": "NoSchedule"}]
# Notes what it is asked for.
STAND_IN = """#!/usr/bin/python3
# WANT_JSON
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["MACHINE"])
given = json.loads(pathlib.Path(sys.argv[1]).read_text())
check = given["_ansible_check_mode"]
with (folder / "calls").open("a") as calls:
    if "{name}" == "node_pools":
        [(node, marks)] = given["nodes"].items()
        calls.write(node + ": " + " ".join(sorted(marks["labels"])) + " " + marks["taints"][0]["key"] + "\\n")
    else:
        calls.write(given["state"] + (", only compared" if check else "") + "\\n")
case = json.loads((folder / "case").read_text())
if "{name}" == "gpu_upgrade" and case["fails"] and not check:
    print(json.dumps({{"failed": True, "msg": "sleep uses the GPUs"}}))
else:
    print(json.dumps({{"changed": case["differs"], "actions": ["replace"] if case["differs"] else [], "reboot": ""}}))
"""
WITH, WITHOUT = "gpu-1: gpunodes.dev/gpu gpunodes.dev/pool a", "gpu-1: gpunodes.dev/pool a"


@dataclass(frozen=True)
class Case:
    """A machine: whether it has another driver, whether that stays in use, its node, and the calls of modules."""

    calls: tuple[str, ...]
    differs: bool = True
    fails: bool = False
    node: str = "gpu-1"


CASES = {
    "replaced": Case(("applied, only compared", WITHOUT, "applied", WITH)),
    "in-use": Case(("applied, only compared", WITHOUT, "applied", WITH), fails=True),
    # A run that was killed may have left the node without its label.
    "has-it": Case(("applied, only compared", "applied", WITH), differs=False),
    "no-node": Case(("applied",), node=""),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """What was called for each machine of CASES."""
    folder = tmp_path_factory.mktemp("upgrade")
    (folder / "library").mkdir()
    for name in ("gpu_upgrade", "node_pools"):
        (folder / "library" / f"{name}.py").write_text(STAND_IN.format(name=name))
    for path in ROLE.rglob("*.yml"):
        copy = folder / "roles/gpu_upgrade" / path.relative_to(ROLE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("gpunodes.bootstrap.", ""))
    hosts = {}
    for name, case in CASES.items():
        (folder / name).mkdir()
        (folder / name / "case").write_text(json.dumps({"differs": case.differs, "fails": case.fails}))
        hosts[name] = {"gpu_upgrade_node": case.node, "gpu_upgrade_control_plane": name}
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "gpu_upgrade_labels": LABELS,
        "gpu_upgrade_taints": TAINTS,
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": common}}))
    play = {
        "hosts": "all",
        "gather_facts": False,
        "environment": {"MACHINE": f"{folder}/{{{{ inventory_hostname }}}}"},
        "roles": ["gpu_upgrade"],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run(
        [program, "-i", "hosts.yml", "play.yml", "--tags", "apply"],
        cwd=folder,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORKS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert "in-use" in done.stdout, done.stdout + done.stderr
    return {name: tuple((folder / name / "calls").read_text().splitlines()) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_the_device_plugin_leaves_and_returns(calls: dict[str, tuple[str, ...]], name: str) -> None:
    assert calls[name] == CASES[name].calls
