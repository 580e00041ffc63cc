#!/usr/bin/env python3
"""Build the Ansible collection gpunodes.bootstrap as an archive: bootstrap/collection.py FOLDER.

The collection is a folder of links in a checkout. The archive has copies of what they point to, and in
plugins/plugin_utils the modules of the Python package that the filters and the callback import: it needs no other
installation.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from modulefinder import ModuleFinder
from pathlib import Path

ROOT = Path(__file__).parent
SOURCE = ROOT / "ansible_collections" / "gpunodes" / "bootstrap"
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".ruff_cache", "ruff.toml")
_TABLES = (".toml", ".tsv")
_ANSIBLE = ("2.19", "2.20", "2.21")
# Rules of `ansible-test sanity` that do not apply, and the files that are exempt.
_EXEMPT = {
    "validate-modules:missing-gplv3-license": ("modules/[a-z]*.py", "callback/[a-z]*.py"),  # the licence is Apache-2.0
}


def needed() -> Iterator[Path]:
    """The files of the package that the controller's plugins import or read, relative to its parent folder."""
    finder = ModuleFinder([str(ROOT)])
    for kind in ("filter", "callback"):
        for plugin in (SOURCE / "plugins" / kind).glob("[a-z]*.py"):
            finder.load_file(str(plugin))
    modules = [module for name, module in finder.modules.items() if name.split(".")[0] == "gpunodes"]
    files = [Path(vars(module)["__file__"]) for module in modules]
    for folder in {file.parent for file in files}:
        files += [table for table in folder.glob("tables/*") if table.suffix in _TABLES]
    return (file.relative_to(ROOT) for file in files)


def _has_underscore(path: Path) -> bool:
    """Whether a file names a value that it does not use ``_``: Ansible's own code keeps that name for translations.

    pylint accepts it in lambdas, and for any number of arguments.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    accepted = {id(name) for node in nodes if isinstance(node, ast.Lambda) for name in ast.walk(node.args)}
    accepted |= {id(node.vararg) for node in nodes if isinstance(node, ast.arguments)}
    return any(
        (isinstance(node, ast.Name) and node.id == "_" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == "_")
        for node in nodes
        if id(node) not in accepted
    )


def copy(target: Path) -> None:
    """Copy the collection to ``target``, a folder that does not exist."""
    shutil.copytree(SOURCE, target, ignore=_IGNORED)
    for file in needed():
        copied = target / "plugins" / "plugin_utils" / file
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copied)
    exempt = [
        (path, rule)
        for rule, patterns in _EXEMPT.items()
        for pattern in patterns
        for path in (target / "plugins").glob(pattern)
    ]
    exempt += [(path, "pylint:disallowed-name") for path in (target / "plugins").rglob("*.py") if _has_underscore(path)]
    rules = sorted(f"{path.relative_to(target)} {rule}\n" for path, rule in exempt)
    (target / "tests" / "sanity").mkdir(parents=True)
    for version in _ANSIBLE:
        (target / "tests" / "sanity" / f"ignore-{version}.txt").write_text("".join(rules), encoding="utf-8")


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
