"""Ansible sends a module with all the code that it imports, in packages within packages too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import process

ANSIBLE = Path(process.__file__).parents[1]


def run(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """The output of ``ansible`` on this machine, with nothing of the user's environment."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible")), "localhost", "--connection=local", *arguments],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_module_runs_on_a_machine_that_has_nothing_of_gpunodes(tmp_path: Path) -> None:
    wanted = {"wanted": {"one": {"files": [{"path": str(tmp_path / "file"), "content": "x"}]}, "two": {}}}
    output = run(
        tmp_path,
        "--module-name=host_diff",
        f"--args={json.dumps(wanted)}",
        ANSIBLE_LIBRARY=str(ANSIBLE / "modules"),
        ANSIBLE_MODULE_UTILS=str(ANSIBLE / "module_utils"),
    )
    result = json.loads(output.partition("=>")[2])
    assert (result["pending"], result["versions"]) == (["one"], {})


@pytest.mark.long
def test_ansible_prints_the_differences_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("level = 1\npassword = hunter2\n\x1b[2J\n")
    wanted = {"wanted": {"files": [{"path": str(tmp_path / "config"), "content": "level = 2\n"}]}}
    output = run(
        tmp_path,
        *("--check", "--diff", "--module-name=gpunodes.bootstrap.host", f"--args={json.dumps(wanted)}"),
        ANSIBLE_COLLECTIONS_PATH=str(ANSIBLE.parents[1]),
        ANSIBLE_CALLBACKS_ENABLED="gpunodes.bootstrap.printable",
        ANSIBLE_LOAD_CALLBACK_PLUGINS="true",
    )
    lines = [line.strip() for line in output.splitlines()]
    assert {"-level = 1", "-password = (secret 1)", "+level = 2"} <= set(lines)
    assert f"--- before: {tmp_path}/config" in lines
    assert "hunter2" not in output
    assert "\x1b" not in output
