#!/usr/bin/env python3
"""Fill a folder with all that a release consists of: bootstrap/dist.py FOLDER GPUNODES ARTEFACT...

Copies the artefacts that are built, and adds the manual pages, the completion of each shell as the installed command
GPUNODES prints it, and SHA256SUMS. Equal inputs make equal files.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from collection import packed
from gpunodes import __version__
from gpunodes.errors import GpunodesError, WrongInput

ROOT = Path(__file__).parents[1]
COMPLETIONS = {"bash": "gpunodes.bash", "zsh": "_gpunodes", "fish": "gpunodes.fish"}
"""The file of each shell, with the name that the shell looks for."""
_RELEASE = re.compile(r"^## \[?([0-9][^\] ]*)\]? - \d{4}-\d{2}-\d{2}$", re.MULTILINE)


def tags() -> list[str]:
    """The tags of releases on this commit; none outside of a git checkout. Raises GpunodesError if git fails in one."""
    # In the tree of a source archive git would find the repository of a folder above.
    if not (ROOT / ".git").exists():
        return []
    argv = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        failure = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        failure = f"git: {error.strerror}"
    if failure:
        wanted = "a git that reads this checkout: a release is only built of the commit with its tag"
        raise GpunodesError(f"the tags of this commit are not known: {failure}", wanted, "correct that")
    return done.stdout.split()


def check_release(found: Sequence[str], changelog: str) -> None:
    """Raise WrongInput where the commit has the tag of a release, and its version or changelog is another's."""
    if not found:
        return
    if f"v{__version__}" not in found:
        remedy = "correct __version__ in bootstrap/gpunodes/__init__.py, or the tag"
        raise WrongInput(f"this commit has the tag {' '.join(found)}", f"v{__version__}, the package's version", remedy)
    if __version__ not in _RELEASE.findall(changelog):
        heading = f"## [{__version__}] - YYYY-MM-DD"
        raise WrongInput(f"CHANGELOG.md has no release {__version__}", heading, "name it there before you tag it")


def completions(gpunodes: Path, folder: Path) -> None:
    """Write what the installed command prints for each shell."""
    for shell, name in COMPLETIONS.items():
        done = subprocess.run([gpunodes, "completion", shell], capture_output=True, check=True)
        (folder / name).write_bytes(done.stdout)


def fill(folder: Path, gpunodes: Path, artefacts: Sequence[Path]) -> None:
    """Make the folder, which does not exist."""
    folder.mkdir(parents=True)
    for artefact in artefacts:
        shutil.copy(artefact, folder)
    completions(gpunodes, folder)
    pages = {f"share/man/man1/{page.name}": page.read_bytes() for page in (ROOT / "build" / "man").glob("*.1")}
    (folder / f"gpunodes-{__version__}-man.tar.gz").write_bytes(packed(pages, set()))
    sums = []
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as stream:
            sums.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {path.name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def main() -> int:
    """Fill the folder that the command line names."""
    folder, gpunodes, *artefacts = map(Path, sys.argv[1:])
    try:
        check_release(tags(), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    except GpunodesError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    fill(folder, gpunodes, artefacts)
    sys.stdout.write((folder / "SHA256SUMS").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
