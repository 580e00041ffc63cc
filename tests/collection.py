"""The built collection, installed in an environment that has Ansible and nothing else of gpunodes.

``make build/ansible/.installed`` makes both.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = Path(__file__).parents[1] / "build" / "ansible"
CONFIG = """[defaults]
callbacks_enabled = gpunodes.bootstrap.printable
inject_facts_as_vars = False
"""
"""What docs/ansible.md asks for."""


def run(
    folder: Path, program: str, *arguments: str, environment: Mapping[str, str] = {}, limit_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible in ``folder``, which is its home and may have an ansible.cfg."""
    given = {
        "PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_COLLECTIONS_PATH": str(ENVIRONMENT / "collections"),
        **environment,
    }
    return subprocess.run(
        [str(ENVIRONMENT / "bin" / program), *arguments],
        cwd=folder,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
