"""The playbook of `certs renew`, run by Ansible on three control planes; modules and other roles are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
ROLES = ("etcd_certificates", "certificates_renewed")
# Notes what it is asked for on which machine.
STAND_IN = """#!/usr/bin/python3
# WANT_JSON
import json, os, pathlib, sys
folder, given = pathlib.Path(os.environ["FOLDER"]), json.loads(pathlib.Path(sys.argv[1]).read_text())
name, stage = os.environ["MACHINE"], "files" if given.get("ended_only") else "restarts"
with (folder / "calls").open("a") as calls:
    calls.write(f"{stage} {name}\\n")
failed = f"{stage} {name}" in (folder / "failing").read_text()
print(json.dumps({"failed": failed, "msg": "no", "changed": True, "actions": []}))
"""


@dataclass
class Site:
    """Control planes, and the calls of the last run."""

    folder: Path
    off: str = ""
    failing: str = ""
    calls: list[str] = field(default_factory=list)

    def run(self) -> str:
        (self.folder / "failing").write_text(self.failing)
        (self.folder / "calls").write_text("")
        here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
        hosts = {name: away if name == self.off else here for name in ("control-1", "control-2", "control-3")}
        (self.folder / "hosts.yml").write_text(json.dumps({"control_plane": {"hosts": hosts}}))
        program = Path(sys.executable).with_name("ansible-playbook")
        done = subprocess.run(
            [str(program), "-i", "hosts.yml", "play.yml"],
            env={**os.environ, "FOLDER": str(self.folder), "ANSIBLE_LIBRARY": "library", "ANSIBLE_ROLES_PATH": "roles"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        self.calls = (self.folder / "calls").read_text().splitlines()
        return done.stdout + done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/certificates_renewed.py").write_text(STAND_IN)
    for role in ROLES:
        shutil.copytree(ROOT / "roles" / role, tmp_path / "roles" / role)
        tasks = tmp_path / "roles" / role / "tasks/main.yml"
        tasks.write_text(tasks.read_text().replace("gpunodes.bootstrap.", ""))
    # The first thing that contacts a machine.
    for role in ("settings", "cluster", "identity"):
        (tmp_path / "roles" / role / "tasks").mkdir(parents=True)
        text = yaml.safe_dump([{"name": "Contact the machine", "ansible.builtin.command": "true"}])
        (tmp_path / "roles" / role / "tasks/main.yml").write_text(text)
    plays = yaml.safe_load((ROOT / "playbooks/certs_renew.yml").read_text())[1:]
    for play in plays:
        play["become"] = False
        play["environment"] = {"MACHINE": "{{ inventory_hostname }}"}
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays))
    return Site(tmp_path)


def test_all_files_are_renewed_before_the_first_restart(site: Site) -> None:
    output = site.run()
    assert sorted(site.calls[:3]) == ["files control-1", "files control-2", "files control-3"], output
    assert site.calls[3:] == ["restarts control-1", "restarts control-2", "restarts control-3"]


def test_the_others_are_renewed_where_one_does_not_respond(site: Site) -> None:
    site.off = "control-1"
    output = site.run()
    assert sorted(site.calls[:2]) == ["files control-2", "files control-3"], output
    assert site.calls[2:] == ["restarts control-2", "restarts control-3"]
    assert "fatal: [control-1]: UNREACHABLE!" in output


def test_a_restart_that_fails_is_the_last_one(site: Site) -> None:
    site.failing = "restarts control-2"
    output = site.run()
    assert site.calls[3:] == ["restarts control-1", "restarts control-2"], output
