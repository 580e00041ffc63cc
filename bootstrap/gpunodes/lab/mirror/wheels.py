"""Python packages that Debian does not have, from the Python package index."""

from __future__ import annotations

import configparser
import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from gpunodes.lab.mirror import store
from gpunodes.lab.mirror.programs import run
from gpunodes.lab.mirror.tree import TreeEntry

_PLACE = "/usr/lib/python3/dist-packages"


def pip(folder: Path, *arguments: str | Path) -> None:
    """Run pip, in an environment that is made in ``folder`` for it: gpunodes' own may lack pip."""
    run([sys.executable, "-m", "venv", folder / "venv"])
    run([folder / "venv" / "bin" / "pip", *arguments], limit_s=600)
    shutil.rmtree(folder / "venv")


def download(requirement: str, cache: Path, progress: Callable[[str], None]) -> Path:
    """The wheel of ``requirement``, which has its version and checksum; pip refuses other content."""

    def make(folder: Path) -> None:
        progress(f"downloading the Python package {requirement.partition(' ')[0]}")
        listing = folder / "requirements.txt"
        listing.write_text(f"{requirement}\n")
        options = ("--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes")
        pip(folder, "download", *options, "--dest", folder, "--requirement", listing)

    name = hashlib.sha256(requirement.encode()).hexdigest()[:16]
    [wheel] = store.keep(cache / f"wheel-{name}", make).glob("*.whl")
    return wheel


def tree(wheel: Path) -> list[TreeEntry]:
    """The files of a wheel without compiled code, where Debian's Python looks for them, and its commands."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    commands = configparser.ConfigParser(delimiters=("=",))
    commands.read_string(next(text.decode() for name, text in files.items() if name.endswith("/entry_points.txt")))
    entries = [TreeEntry(f"{_PLACE}/{name}", content) for name, content in files.items()]
    for command, target in commands["console_scripts"].items():
        module, _, function = target.partition(":")
        script = f"#!/usr/bin/python3\nfrom {module} import {function}\n\n{function}()\n"
        entries.append(TreeEntry(f"/usr/bin/{command}", script.encode(), 0o755))
    return entries
