#!/usr/bin/env python3
"""Build the Ansible collection gpunodes.bootstrap as an archive: bootstrap/collection.py FOLDER.

The collection is a folder of links in a checkout. The archive has copies of what they point to, and in
plugins/plugin_utils the modules of the Python package that the filters and the callback import: it needs no other
installation. Equal trees make equal archives.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from modulefinder import ModuleFinder
from pathlib import Path

from gpunodes import __version__

ROOT = Path(__file__).parent
SOURCE = ROOT / "ansible_collections" / "gpunodes" / "bootstrap"
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".ruff_cache", "ruff.toml")
_TABLES = (".toml", ".tsv")
_NO_VERSION = "version: 0.0.0\n"
_MTIME = 1767225600
"""Modification time of all files (2026-01-01, in seconds since the epoch), as in the image."""
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
    metadata = target / "galaxy.yml"
    metadata.write_text(with_version(metadata.read_text(encoding="utf-8")), encoding="utf-8")
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


def with_version(metadata: str) -> str:
    """The text of galaxy.yml with the version of the package, which is the only source of it."""
    if metadata.count(_NO_VERSION) != 1:
        raise ValueError(f"galaxy.yml must have the line {_NO_VERSION.strip()!r} once: the package has the version")
    return metadata.replace(_NO_VERSION, f"version: {__version__}\n")


def normalised(archive: bytes) -> bytes:
    """An archive of ansible-galaxy with its files in a fixed order, with fixed times, owners and modes.

    ansible-galaxy lists the files in the order of the file system, and MANIFEST.json has the checksum of that list.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {member.name: member for member in tar}
        files = {name: stream.read() for name in members if (stream := tar.extractfile(name)) is not None}
    listing = json.loads(files["FILES.json"])
    listing["files"].sort(key=lambda entry: entry["name"])
    files["FILES.json"] = json.dumps(listing, indent=1).encode()
    manifest = json.loads(files["MANIFEST.json"])
    manifest["file_manifest_file"]["chksum_sha256"] = hashlib.sha256(files["FILES.json"]).hexdigest()
    files["MANIFEST.json"] = json.dumps(manifest, indent=1).encode()
    return packed({name: files.get(name) for name in members}, {name for name in members if members[name].mode & 0o100})


def packed(files: Mapping[str, bytes | None], executable: set[str]) -> bytes:
    """A compressed tar archive of files, and of directories, which have no content."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.mtime = _MTIME
            if content is None:
                info.type = tarfile.DIRTYPE
            info.mode = 0o755 if content is None or name in executable else 0o644
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
    return gzip.compress(plain.getvalue(), mtime=0)


def main() -> int:
    """Build the archive in the folder that the command line names; returns the exit code of ansible-galaxy."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "ansible_collections" / "gpunodes" / "bootstrap"
        copy(tree)
        argv = ["ansible-galaxy", "collection", "build", "--force", "--output-path", temporary, str(tree)]
        code = subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode
        for archive in Path(temporary).glob("*.tar.gz"):
            (folder / archive.name).write_bytes(normalised(archive.read_bytes()))
            sys.stdout.write(f"{folder / archive.name}\n")
        return code


if __name__ == "__main__":
    sys.exit(main())
