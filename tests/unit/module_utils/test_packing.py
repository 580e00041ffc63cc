"""Ansible sends a module with all the code that it imports, in packages within packages too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpunodes.ansible.module_utils import process

ANSIBLE = Path(process.__file__).parents[1]


def test_a_module_runs_on_a_machine_that_has_nothing_of_gpunodes(tmp_path: Path) -> None:
    wanted = {"wanted": {"one": {"files": [{"path": str(tmp_path / "file"), "content": "x"}]}, "two": {}}}
    program = str(Path(sys.executable).with_name("ansible"))
    done = subprocess.run(
        [program, "localhost", "--connection=local", "--module-name=host_diff", f"--args={json.dumps(wanted)}"],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ANSIBLE_LIBRARY": str(ANSIBLE / "modules"),
            "ANSIBLE_MODULE_UTILS": str(ANSIBLE / "module_utils"),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.partition("=>")[2])
    assert (result["pending"], result["versions"]) == (["one"], {})
