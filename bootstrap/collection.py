#!/usr/bin/env python3
"""Build the Ansible collection gpunodes.bootstrap as an archive: bootstrap/collection.py FOLDER.

The collection is a folder of links in a checkout. The archive holds copies of what they point to, and under
plugins/plugin_utils the parts of the Python package that the filters import: it needs no other installation.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent / "gpunodes"
SOURCE = Path(__file__).parent / "ansible_collections" / "gpunodes" / "bootstrap"
# What the filters and the callback import; tests/package runs them from the archive alone.
PARTS = (
    "__init__.py",
    "ansible/__init__.py",
    "ansible/module_utils",
    "engine/__init__.py",
    "engine/identities.py",
    "errors.py",
    "health",
    "kubeconfig.py",
    "model.py",
    "planner",
    "settings.py",
    "shape.py",
)
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".ruff_cache", "ruff.toml")


def copy(target: Path) -> None:
    """Copy the collection to ``target``, a folder that does not exist."""
    shutil.copytree(SOURCE, target, ignore=_IGNORED)
    for part in PARTS:
        copied = target / "plugins" / "plugin_utils" / "gpunodes" / part
        copied.parent.mkdir(parents=True, exist_ok=True)
        if (PACKAGE / part).is_dir():
            shutil.copytree(PACKAGE / part, copied, ignore=_IGNORED)
        else:
            shutil.copy(PACKAGE / part, copied)


def main() -> int:
    """Build the archive in the folder that the command line names; returns the exit code of ansible-galaxy."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "ansible_collections" / "gpunodes" / "bootstrap"
        copy(tree)
        argv = ["ansible-galaxy", "collection", "build", "--force", "--output-path", str(folder), str(tree)]
        return subprocess.run(argv, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
